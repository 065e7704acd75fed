"""A started vLLM: the requests that it works on, its steps, and calls to its workers.

    submit ──► _queue ──► vLLM ──step──► _finished ──► take_finished
                            ▲
                  score: prompts of its own, which step all other requests too

A response that finishes while a canary is being scored waits in `_finished` until the weights are accepted.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tba.common.errors import EngineError, EngineFaulty, SnapshotError
from tba.common.rotation import Rotation
from tba.common.wire.trajectory import STOP_EOS, STOP_LENGTH, Float32
from tba.searcher.engines.engine import Generation, GenerationRequest, SamplingSettings, fit_request, in_vocabulary
from tba.searcher.engines.vllm.fair_lock import FairLock
from tba.searcher.engines.vllm.scheduler import VllmScheduler

# Rows of vLLM's batch that no request gets, so that a full batch does not delay the canary.
SCORING_ROWS = 8
# Lower comes first, which matters when the KV cache is full.
_SCORING_PRIORITY = -1
# Key of a worker's reply that says why it could not do what was asked.
FAILURE = "tba_failure"
_STOP_REASONS = {"stop": STOP_EOS, "length": STOP_LENGTH}


class LoadFailed(SnapshotError):
    """The workers could not load weights, or do not compute with them."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    request: GenerationRequest
    params: Any
    started: float


class RunningVllm:
    """Requests of one `LLMEngine`, which is stepped by its caller. Only `call` may be used by several threads.

    Each token's version is vLLM's own weight-version tag, set between steps while no batch is computed ahead.
    Log-probabilities are vLLM's "processed" ones: of the distribution after temperature and top-p. For greedy requests
    vLLM sets temperature and top-p to 1 there, as the engine protocol requires; prompt log-probabilities, which `score`
    uses, skip sampling altogether and are at temperature 1 in every mode.
    """

    def __init__(
        self,
        llm: Any,
        *,
        scheduler: VllmScheduler,
        max_in_flight: int,
        end_ids: list[int],
        stop_strings: Sequence[str],
        adapter: Any = None,
    ) -> None:
        """`adapter` is vLLM's request of the adapter that all requests use; None without LoRA."""
        self._llm = llm
        self.scheduler = scheduler
        self.max_in_flight = max_in_flight
        self._end_ids = end_ids
        self._stop_strings = list(stop_strings)
        self._adapter = adapter
        self.version = 0
        llm.set_weight_version("0")
        self.context = int(llm.model_config.max_model_len)
        self.rotation = Rotation.of(llm.model_config.hf_config)
        self.vocabulary = int(llm.model_config.get_vocab_size())
        self.quantized = llm.model_config.quantization is not None
        self.uses_adapters = adapter is not None
        self._salt = 0
        # Held by each step and each call: the preparing thread must not wait for more than one step.
        self._workers = FairLock()
        self._scorings = 0
        # Submitted and not yet returned; those that vLLM does not have yet; those that are done.
        self._in_flight: dict[int, _InFlight] = {}
        self._queue: deque[int] = deque()
        self._finished: dict[int, Generation] = {}
        # Why vLLM cannot continue.
        self._broken: str | None = None

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `take_finished`."""
        return len(self._in_flight)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if the prompt does not fit the model's context."""
        self.check()
        request = fit_request(request, vocabulary=self.vocabulary, context=self.context)
        if request.id in self._in_flight:
            raise EngineError(f"request {request.id} is already in flight")
        params = self._sampling_params(request.sampling)
        self._in_flight[request.id] = _InFlight(request, params, time.perf_counter())
        self._queue.append(request.id)

    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""
        self.check()
        if len(self._finished) < len(self._in_flight):
            self._advance()
        finished, self._finished = list(self._finished.values()), {}
        for generation in finished:
            del self._in_flight[generation.id]
        return finished

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: see `Engine.score`."""
        self.check()
        # vLLM samples one token after the prompt, which needs a position in the context.
        if too_long := [len(ids) for ids in sequences if len(ids) >= self.context]:
            raise EngineError(f"cannot score {too_long[0]} tokens: at most {self.context - 1} fit the engine")
        waiting = {}
        for index, ids in enumerate(sequences):
            if len(ids) > 1:
                # vLLM checks this only if it has a tokenizer. Without the check the step fails, and all requests.
                if not in_vocabulary(ids, self.vocabulary):
                    raise EngineError(f"a sequence to score has token ids outside 0 to {self.vocabulary - 1}")
                self._scorings += 1
                waiting[f"score{self._scorings}"] = index
                self._add(f"score{self._scorings}", ids, self._scoring_params(), _SCORING_PRIORITY)
        scores = [np.zeros(0, np.float32) for _ in sequences]
        while waiting:
            for name, output in self._advance().items():
                # One that is not waiting is left over from a scoring that failed.
                if name in waiting:
                    index = waiting.pop(name)
                    scores[index] = _prompt_logprobs(output, len(sequences[index]) - 1)
        return scores

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, between two steps. Raises LoadFailed if one fails."""
        try:
            with self._workers:
                results: list[Any] = self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise LoadFailed(f"vLLM could not do {method}: {error}") from error
        for result in results:
            if isinstance(result, dict) and FAILURE in result:
                raise LoadFailed(f"vLLM could not do {method}: {result[FAILURE]}")
        return results

    def set_version(self, version: int) -> None:
        """Label the tokens of the next steps, whose weights are about to change; reuse no cache of other weights.

        Tokens that vLLM has computed ahead are handed out first, with the version they were computed with.
        """
        self.scheduler.drain(self._step)
        self.version = version
        self._salt += 1
        self._llm.set_weight_version(str(version))

    def start_over(self) -> None:
        """Discard what all requests in flight have generated, and generate it again."""
        # vLLM ignores unknown and finished ones.
        self._llm.abort_request([*map(str, self._in_flight)])
        self._finished.clear()
        self._queue = deque(self._in_flight)
        # Cached keys and values of refused weights are never reused.
        self._salt += 1

    def check(self) -> None:
        """Raise EngineFaulty if a step failed, a rollback failed, or vLLM is closed."""
        if self._broken is not None:
            raise EngineFaulty(self._broken)

    def give_up(self, reason: str) -> None:
        """Refuse all further work: `check` raises from now on."""
        self._broken = reason

    def close(self) -> bool:
        """Free the device and end the workers. Returns False if it was closed before."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.engine_core.shutdown()
        return llm is not None

    def _feed(self) -> None:
        """Hand queued requests to vLLM, up to `max_in_flight`."""
        while self._queue and len(self._in_flight) - len(self._queue) - len(self._finished) < self.max_in_flight:
            one = self._in_flight[self._queue.popleft()]
            self._add(str(one.request.id), one.request.prompt_ids.tolist(), one.params, priority=0)

    def _add(self, name: str, ids: Sequence[int], params: Any, priority: int) -> None:
        """Hand one request to vLLM, with a cache salt that changes at each swap.

        The salt prevents reuse of a prefix computed with other weights, also by requests that were submitted before a
        swap and continue after it. The alternative, `reset_prefix_cache`, does nothing while a request is running. The
        salt counts swaps, not versions: a rollback leaves keys and values of the refused weights behind.
        """
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(list(ids), cache_salt=str(self._salt))
        try:
            self._llm.add_request(name, prompt, params, lora_request=self._adapter, priority=priority)
        except Exception as error:
            raise EngineError(f"vLLM refused a request: {error}") from error

    def _sampling_params(self, sampling: SamplingSettings) -> Any:
        return _params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=self._end_ids,
            # Only these end a response, not also the end token of vLLM's tokenizer.
            ignore_eos=True,
            **self._stop_settings(),
            # Of the sampled token, and of no alternatives.
            logprobs=0,
        )

    def _stop_settings(self) -> dict[str, Any]:
        """Without stop strings, vLLM decodes no tokens, which it would do in the thread that steps it."""
        if not self._stop_strings:
            return {"detokenize": False}
        # It concerns only vLLM's own text, which is not used: all tokens are returned.
        return {"detokenize": True, "stop": self._stop_strings, "include_stop_str_in_output": True}

    def _scoring_params(self) -> Any:
        return _params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def _advance(self) -> dict[str, Any]:
        """Feed vLLM and step it."""
        self._feed()
        scored = self._step()
        self.scheduler.report(len(self._in_flight))
        return scored

    def _step(self) -> dict[str, Any]:
        """One step of vLLM. Finished responses go to `_finished`; finished scorings are returned by name."""
        try:
            with self._workers:
                outputs = self._llm.step()
        except Exception as error:
            self.give_up(f"vLLM failed in a step and must be restarted: {error}")
            raise EngineFaulty(self._broken) from error
        scored = {}
        for output in outputs:
            if output.request_id.startswith("score"):
                scored[output.request_id] = output
            else:
                one = self._in_flight[int(output.request_id)]
                self._finished[one.request.id] = _generation(one, output.outputs[0])
        return scored


def _params(**settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # FINAL_ONLY: vLLM builds one output object per response, not one per token.
    kind = RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(flat_logprobs=True, output_kind=kind, **settings)
    except Exception as error:
        raise EngineError(f"vLLM cannot sample with {settings}: {error}") from error


def _generation(one: _InFlight, output: Any) -> Generation:
    if output.finish_reason not in _STOP_REASONS:
        raise EngineError(f"vLLM ended request {one.request.id} with {output.finish_reason!r}")
    runs = [(int(span.version), span.end - span.start) for span in output.weight_versions]
    return Generation(
        id=one.request.id,
        response_ids=np.asarray(output.token_ids, np.int32),
        logprobs=_values(output.logprobs, len(output.token_ids)),
        version_runs=np.asarray(runs, np.int32).reshape(-1, 2),
        stop_reason=_STOP_REASONS[output.finish_reason],
        seconds=time.perf_counter() - one.started,
    )


def _prompt_logprobs(output: Any, count: int) -> Float32:
    if output.prompt_logprobs is None:
        raise EngineError("vLLM returned no log-probabilities for a sequence to score")
    return _values(output.prompt_logprobs, count)


def _values(logprobs: Any, count: int) -> Float32:
    """The values of vLLM's FlatLogprobs, which has one per token because no alternatives are requested."""
    values = np.asarray(logprobs.logprobs, np.float32)
    if len(values) != count:
        raise EngineError(f"vLLM returned {len(values)} log-probabilities for {count} tokens")
    return values
