"""A started vLLM: the requests that it works on, its steps, and calls to its workers.

    submit ──► _queue ──► vLLM ──► _finished ──► returned by step
                            ▲
                  score: prompts of its own, which step all other requests too

A response that finishes while a canary is being scored waits in `_finished` until the weights are accepted.

With asynchronous scheduling, vLLM starts a batch before it has processed the one before:

    step n      schedule and start batch n + 1, then wait for batch n and hand out its tokens
    drain       schedule nothing, wait for each batch that was started
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tba.common.clock import Clock, SystemClock
from tba.common.config.search import SearchSection
from tba.common.errors import EngineError, EngineFaulty, SnapshotError, raised_at
from tba.common.log import get_logger
from tba.common.rotation import Rotation
from tba.common.wire.trajectory import STOP_EOS, STOP_LENGTH, Float32, Int32, encode_kept
from tba.searcher.engines.engine import Generation, GenerationRequest, SamplingSettings, fit_request
from tba.searcher.engines.stopping import Stopping
from tba.searcher.engines.vllm.start import most_in_flight

log = get_logger(__name__)

_REPORT_SECONDS = 60.0
# From this fraction of the responses in flight, preempted in a minute, a lower limit is advised.
_FREQUENT = 0.1

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


class FairLock:
    """A FIFO lock, for a thread that re-acquires it immediately after releasing it, and others that need it at times.

    With `threading.Lock` that thread would win again and again, before a waiting thread has woken up.
    """

    def __init__(self) -> None:
        # Held by the first thread in the queue; threads that come later wait for it.
        self._next = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class VllmScheduler:
    """The core of an `LLMEngine`, in this process: the KV cache, preemptions, batches computed ahead."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core.engine_core
        self._clock: Clock = SystemClock()
        self.preemptions = 0
        self._reported = 0
        # The end of the minute of the preemptions that are not reported yet.
        self._report_at: float | None = None
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        # vLLM's statistics count them too, at a cost per token.
        scheduler._preempt_request = counted

    @property
    def kv_cache_tokens(self) -> int:
        """The tokens that fit the KV cache; 0 for a model without one."""
        return int(self._core.vllm_config.cache_config.kv_cache_size_tokens or 0)

    @property
    def kv_cache_gib(self) -> float:
        """The KV cache of each GPU in GiB, 0 without one. As `search.kv_cache_gib` it gives the same cache again."""
        cache = self._core.scheduler.kv_cache_config
        return float(sum(tensor.size for tensor in cache.kv_cache_tensors) / 2**30)

    def choose_in_flight(self, search: SearchSection, prompt_tokens: int) -> int:
        """Return the limit of responses in flight, and log it with the size of the KV cache.

        `auto` counts each with its prompt and half of its budget: responses in flight are of all ages.
        """
        most = most_in_flight(search)
        context = int(self._core.vllm_config.model_config.max_model_len)
        each = min(prompt_tokens + -(-search.max_tokens // 2), context)
        automatic = search.max_in_flight == "auto" and self.kv_cache_tokens > 0
        chosen = min(max(self.kv_cache_tokens // each, 1), most) if automatic else most
        size = round(self.kv_cache_gib, 2)
        log.info("KV cache", gib=size, tokens=self.kv_cache_tokens, max_in_flight=chosen, tokens_each=each)
        if automatic and chosen < search.samples_per_prompt:
            advice = "raise search.gpu_memory_utilization, or search.kv_cache_gib if it is set; another process that "
            advice += "allocates on the GPU while vLLM starts makes the cache smaller"
            log.warning("the KV cache holds less than one visit", visit=search.samples_per_prompt, advice=advice)
        return chosen

    def drain(self, step: Callable[[], object]) -> None:
        """Call `step` until every batch that was started is processed. Does nothing without asynchronous scheduling.

        Tokens get the version that is set when they are processed: call this before a change of weights or version.
        """
        if not self._core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                step()
        finally:
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def report(self, in_flight: int) -> None:
        """Log the preemptions of each minute in which there were any."""
        if self.preemptions == self._reported:
            return
        now = self._clock.monotonic()
        self._report_at = self._report_at or now + _REPORT_SECONDS
        if now < self._report_at:
            return
        count, self._reported, self._report_at = self.preemptions - self._reported, self.preemptions, None
        advice = "lower search.max_in_flight" if count > _FREQUENT * in_flight else "rare enough to ignore"
        log.warning("responses preempted: the KV cache is full", preemptions=count, in_flight=in_flight, advice=advice)


class RunningVllm:
    """Requests of one `LLMEngine`, which is stepped by its caller. Only `call` may be used by several threads.

    Each token's version is vLLM's own weight-version tag, set between steps while no batch is computed ahead.
    Log-probabilities are vLLM's "processed" ones: of the distribution after temperature and top-p. For greedy requests
    vLLM sets temperature and top-p to 1 there, as the engine protocol requires; prompt log-probabilities, which `score`
    uses, skip sampling altogether and are at temperature 1 in every mode.
    """

    def __init__(
        self, llm: Any, search: SearchSection, stopping: Stopping, *, prompt_tokens: int, adapter: Any
    ) -> None:
        """`adapter` is vLLM's request of the adapter that all requests use; None without LoRA."""
        self._llm = llm
        self.scheduler = VllmScheduler(llm)
        # Responses that it generates concurrently; more are queued.
        self.max_in_flight = self.scheduler.choose_in_flight(search, prompt_tokens)
        self._stopping = stopping
        self._adapter = adapter
        # vLLM returns the tokens that were left to sample from, and refuses greedy requests.
        self._kept = search.top_k > 0
        # Version that the next token will be produced by.
        self.weights_version = 0
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
        # Tokens of the prompts of finished requests, and those of them whose keys and values were in the prefix cache.
        self.prompt_tokens = 0
        self.cached_tokens = 0
        # Why vLLM cannot continue.
        self._broken: str | None = None

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, request: GenerationRequest) -> None:
        self.check()
        request = fit_request(request, vocabulary=self.vocabulary, context=self.context)
        self._in_flight[request.id] = _InFlight(request, self._params(request.sampling), time.perf_counter())
        (self._queue.appendleft if request.first else self._queue.append)(request.id)

    def step(self) -> list[Generation]:
        self.check()
        if len(self._finished) < len(self._in_flight):
            self._advance()
        finished, self._finished = list(self._finished.values()), {}
        for generation in finished:
            del self._in_flight[generation.id]
        return finished

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """See `Engine.score`. Sequences are shorter than the context, since vLLM samples one more token."""
        self.check()
        waiting = {}
        for index, ids in enumerate(sequences):
            if len(ids) > 1:
                self._scorings += 1
                waiting[f"score{self._scorings}"] = index
                params = _params(**self._greedy(), max_tokens=1, prompt_logprobs=0, detokenize=False)
                self._add(f"score{self._scorings}", ids, params, _SCORING_PRIORITY)
        scores = [np.zeros(0, np.float32) for _ in sequences]
        while waiting:
            for name, output in self._advance().items():
                # One that is not waiting is left over from a scoring that failed.
                if name in waiting:
                    index = waiting.pop(name)
                    if output.prompt_logprobs is None:
                        raise EngineError("vLLM returned no log-probabilities for a sequence to score")
                    scores[index] = _values(output.prompt_logprobs, len(sequences[index]) - 1)
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
        self.weights_version = version
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

    def _params(self, sampling: SamplingSettings) -> Any:
        stopping, text = sampling.stopping or self._stopping, dict[str, Any](detokenize=False)
        # Without stop strings, vLLM decodes no tokens, which it would do in the thread that steps it.
        if stopping.strings:
            # The last one concerns only vLLM's own text, which is not used: all tokens are returned.
            text = {"detokenize": True, "stop": [*stopping.strings], "include_stop_str_in_output": True}
        how = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return _params(
            **(how if sampling.temperature > 0 else self._greedy()),
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=sorted(stopping.ids),
            # Only these end a response, not also the end token of vLLM's tokenizer.
            ignore_eos=True,
            **text,
            # Log-probabilities of the sampled token, and of no alternatives.
            logprobs=0,
        )

    def _greedy(self) -> dict[str, Any]:
        """Return the settings of greedy decoding. Where vLLM refuses them, the log-probability of each token is 0."""
        return {"temperature": 1.0, "top_k": 1} if self._kept else {"temperature": 0.0}

    def _advance(self) -> dict[str, Any]:
        """Hand queued requests to vLLM, up to `max_in_flight`, and step it."""
        while self._queue and len(self._in_flight) - len(self._queue) - len(self._finished) < self.max_in_flight:
            one = self._in_flight[self._queue.popleft()]
            self._add(str(one.request.id), one.request.prompt_ids.tolist(), one.params, priority=0)
        scored = self._step()
        self.scheduler.report(len(self._in_flight))
        return scored

    def _step(self) -> dict[str, Any]:
        """One step of vLLM. Finished responses go to `_finished`; finished scorings are returned by name."""
        try:
            with self._workers:
                outputs = self._llm.step()
        except Exception as error:
            self.give_up(f"vLLM failed in a step and must be restarted: {raised_at(error)}")
            raise EngineFaulty(self._broken) from error
        scored = {}
        for output in outputs:
            if output.request_id.startswith("score"):
                scored[output.request_id] = output
            else:
                one = self._in_flight[int(output.request_id)]
                self._finished[one.request.id] = _generation(one, output.outputs[0])
                self.prompt_tokens += len(one.request.prompt_ids)
                self.cached_tokens += output.num_cached_tokens or 0
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
        kept=_kept(output) if one.request.sampling.cuts else np.zeros(0, np.int32),
    )


def _kept(output: Any) -> Int32:
    """Return the tokens that were left to sample from; empty if vLLM does not return them."""
    if output.sampling_mask is None:
        return np.zeros(0, np.int32)
    masks = [np.sort(np.asarray(ids, np.int32)) for ids in output.sampling_mask.token_ids]
    tokens = list(output.token_ids)
    if len(masks) != len(tokens) or not all(token in ids for token, ids in zip(tokens, masks, strict=True)):
        raise EngineError(f"vLLM returned {len(masks)} masks for {len(tokens)} tokens, or one without its token")
    return encode_kept(tokens, masks)


def _values(logprobs: Any, count: int) -> Float32:
    """The values of vLLM's FlatLogprobs, which has one per token because no alternatives are requested."""
    values = np.asarray(logprobs.logprobs, np.float32)
    if len(values) != count:
        raise EngineError(f"vLLM returned {len(values)} log-probabilities for {count} tokens")
    return values
