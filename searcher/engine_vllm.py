"""Generation with vLLM: an engine in this process, stepped by the searcher's loop.

vLLM can only swap weights safely while no step is under way. Stepping it ourselves makes that trivially so:
`load_weights` runs between two steps, nothing has to be paused, and the version of each token is exact.

    submit ──► _queue ──► vLLM ──step──► _finished ──► step() returns it
                            ▲               ▲
                     load_weights: exchange, score the canary (which steps all the others too), accept or undo

What finishes while a canary is being scored waits in `_finished` until the weights are accepted.

What happens when weights are refused is in swap_ladder.py. docs/vllm.md says what was run, and what was not (CUDA).
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tba.common.errors import EngineError, EngineFaulty
from tba.common.model_files import eos_ids, model_directory, read_json, weight_files
from tba.common.snapshot import Canary, Manifest, Snapshot
from tba.common.trajectory import STOP_EOS, STOP_LENGTH, Float32
from tba.searcher.engine import (
    Generation,
    GenerationRequest,
    LoadReport,
    SamplingSettings,
    check_request,
    in_vocabulary,
)
from tba.searcher.snapshot_checks import Mismatch, check_snapshot, prove, tensor_shapes
from tba.searcher.swap_ladder import NotTaken, SwapLadder, Weights
from tba.searcher.turns import Turns
from tba.searcher.vllm_start import for_platform, import_vllm, leave_process_groups, start_vllm

# Places in vLLM's batch that no request gets, so that a full batch does not keep the canary waiting.
SCORING_SLOTS = 8
_OWN_TOKENS = 32
SCORING_PRIORITY = -1  # lower goes first, which matters when the KV cache is full
STOP_REASONS = {"stop": STOP_EOS, "length": STOP_LENGTH}


@dataclass(frozen=True, slots=True)
class _Flight:
    request: GenerationRequest
    params: Any
    started: float


class VllmEngine:
    """An `Engine` (searcher/engine.py) on vLLM.

    Each token's version is vLLM's own weight-version tag, set between steps. Log-probabilities are vLLM's
    "processed" ones: of the distribution after temperature and top-p. For greedy requests vLLM itself sets
    temperature and top-p to 1 there, which is what the protocol asks for; prompt log-probabilities, which
    `score` uses, skip sampling altogether and are at temperature 1 in every mode.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int | None,
        max_in_flight: int,
        seed: int,
        kv_cache_gib: float,
        gpu_memory_utilization: float,
        tensor_parallel: int,
        enforce_eager: bool,
        canary_tolerance: float,
        keep_prefix_cache: bool = False,
        pack_weights: bool = True,
        initial_version: int = 0,
    ) -> None:
        """`pack_weights` False makes vLLM on a CPU compute with its parameters, as it does on a GPU."""
        import_vllm()
        directory = model_directory(model)
        files = weight_files(directory)
        self._tied = bool(read_json(directory / "config.json").get("tie_word_embeddings", False))
        self._shapes = tensor_shapes(files, tied=self._tied)
        self._eos_ids = eos_ids(directory)
        self._tolerance = canary_tolerance
        self._max_in_flight = max_in_flight
        self._keep_prefix_cache = keep_prefix_cache
        self._version = initial_version
        self._salt = 0
        self._speaking = Turns()  # held while vLLM's workers are spoken to
        self._scorings = 0
        self._flights: dict[int, _Flight] = {}  # what was submitted and not yet returned
        self._queue: deque[int] = deque()  # those that vLLM does not have yet
        self._finished: dict[int, Generation] = {}
        self._broken: str | None = None  # why the engine can not go on
        self._llm = start_vllm(
            model=str(directory),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_in_flight + SCORING_SLOTS,
            seed=seed,
            tensor_parallel_size=tensor_parallel,
            enforce_eager=enforce_eager,
            pack_weights=pack_weights,
            **for_platform(kv_cache_gib, gpu_memory_utilization),
        )
        self._llm.set_weight_version(str(initial_version))
        self._context = int(self._llm.model_config.max_model_len)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        served = Weights(initial_version, [*map(str, files)], run=None, proof=self._own_proof(initial_version, files))
        self._ladder = SwapLadder(self, served, check=self._check, prove=self._prove)

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        return len(self._flights)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if prompt and response do not fit the model's context."""
        self._require_working()
        check_request(request, vocabulary=self._vocabulary, context=self._context)
        if request.id in self._flights:
            raise EngineError(f"request {request.id} is already in flight")
        params = self._sampling_params(request.sampling)
        self._flights[request.id] = _Flight(request, params, time.perf_counter())
        self._queue.append(request.id)

    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""
        self._require_working()
        if len(self._finished) < len(self._flights):
            self._advance()
        finished, self._finished = list(self._finished.values()), {}
        for generation in finished:
            del self._flights[generation.id]
        return finished

    def prepare(self, snapshot: Snapshot) -> None:
        """Read, convert and pack a snapshot beside generation; to be called from another thread.

        Raises SnapshotError if it is no snapshot of this model.
        """
        self._require_working()
        self._ladder.prepare(snapshot)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, prove it on the canary, and go on from there.

        All or nothing: on SnapshotError or CanaryMismatch the old weights serve again, no token of the
        refused ones reaches a Generation, and requests in flight are still answered.
        """
        self._require_working()
        try:
            return self._ladder.load(snapshot)
        except EngineFaulty as error:
            self._broken = str(error)
            raise

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for a sequence of T tokens an array [T - 1],
        whose t-th entry is log p(token t + 1 | tokens up to t)."""
        self._require_working()
        # vLLM samples one token after the prompt, which needs a place in the context.
        if too_long := [len(ids) for ids in sequences if len(ids) >= self._context]:
            raise EngineError(f"cannot score {too_long[0]} tokens: at most {self._context - 1} fit the engine")
        waiting = {}
        for index, ids in enumerate(sequences):
            if len(ids) > 1:
                if not in_vocabulary(ids, self._vocabulary):
                    # vLLM itself checks this only where it has a tokenizer: the step would fail, and with it all.
                    raise EngineError(f"a sequence to score has token ids outside 0 to {self._vocabulary - 1}")
                self._scorings += 1
                waiting[f"score{self._scorings}"] = index
                self._add(f"score{self._scorings}", ids, self._scoring_params(), SCORING_PRIORITY)
        scores = [np.zeros(0, np.float32) for _ in sequences]
        while waiting:
            for name, output in self._advance().items():
                if name in waiting:  # else left over from a scoring that failed
                    index = waiting.pop(name)
                    scores[index] = _prompt_logprobs(output, len(sequences[index]) - 1)
        return scores

    def close(self) -> None:
        """Free the device and end the workers. The engine is of no use afterwards; closing twice is fine."""
        if self._llm is None:
            return
        self._broken = "the engine is closed"
        self._ladder.wait()
        llm, self._llm = self._llm, None
        llm.engine_core.shutdown()
        del llm
        leave_process_groups()

    def _require_working(self) -> None:
        if self._broken is not None:
            raise EngineFaulty(self._broken)

    def _feed(self) -> None:
        """Give vLLM as many of the queued requests as it may have."""
        while self._queue and len(self._flights) - len(self._queue) - len(self._finished) < self._max_in_flight:
            flight = self._flights[self._queue.popleft()]
            self._add(str(flight.request.id), flight.request.prompt_ids.tolist(), flight.params, priority=0)

    def _add(self, name: str, ids: Sequence[int], params: Any, priority: int) -> None:
        """Hand a request to vLLM, with a cache salt that changes at each swap (unless asked to keep the cache).

        The salt keeps a prefix computed with other weights from being reused, also by requests that were
        submitted before a swap and go on after it. The alternative, `reset_prefix_cache`, does nothing while
        a request is running. The salt counts swaps, not versions: an undone swap leaves keys and values of
        the refused weights behind.
        """
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(list(ids), cache_salt=str(self._salt))
        try:
            self._llm.add_request(name, prompt, params, priority=priority)
        except Exception as error:
            raise EngineError(f"request {name} was refused by vLLM: {error}") from error

    def _sampling_params(self, sampling: SamplingSettings) -> Any:
        return self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=self._eos_ids,
            logprobs=0,  # that of the sampled token, no others
        )

    def _scoring_params(self) -> Any:
        return self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def _params(self, **settings: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # FINAL_ONLY: vLLM builds one output object per response, not one per token.
        kind = RequestOutputKind.FINAL_ONLY
        try:
            return SamplingParams(detokenize=False, flat_logprobs=True, output_kind=kind, **settings)
        except Exception as error:
            raise EngineError(f"vLLM cannot sample with {settings}: {error}") from error

    def _advance(self) -> dict[str, Any]:
        """One step of vLLM. Finished responses go to `_finished`; finished scorings are returned by name."""
        self._feed()
        try:
            with self._speaking:
                outputs = self._llm.step()
        except Exception as error:
            self._broken = f"vLLM failed in a step and has to be started again: {error}"
            raise EngineFaulty(self._broken) from error
        scored = {}
        for output in outputs:
            if output.request_id.startswith("score"):
                scored[output.request_id] = output
            else:
                flight = self._flights[int(output.request_id)]
                self._finished[flight.request.id] = _generation(flight, output.outputs[0])
        return scored

    # ------------------------------------------------------------ what the ladder of a swap needs (its Host)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, between two steps. Raises NotTaken if one fails."""
        try:
            with self._speaking:
                results: list[Any] = self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise NotTaken(f"vLLM could not do {method}: {error}") from error
        return results

    def relabel(self, version: int) -> None:
        """Weights change now: label the tokens that follow, and reuse no cache of other weights."""
        self._version = version
        self._salt += not self._keep_prefix_cache
        self._llm.set_weight_version(str(version))

    def start_over(self) -> None:
        """Forget what all requests in flight have got so far, and generate it again."""
        self._llm.abort_request([*map(str, self._flights)])  # unknown and finished ones are ignored
        self._finished.clear()
        self._queue = deque(self._flights)
        self._salt += 1  # what refused weights left in the cache is reused in no case

    def _own_proof(self, version: int, files: list[Path]) -> Snapshot:
        """A snapshot of the weights that serve, with this engine's own log-probabilities of some tokens as canary."""
        tokens = np.random.default_rng(0).integers(0, self._vocabulary, min(_OWN_TOKENS, self._context - 1)).tolist()
        canary = Canary([tokens], [score.tolist() for score in self.score([tokens])])
        return Snapshot(files[0].parent, Manifest("", version, 0, 0.0, {}, canary), files)

    def _check(self, snapshot: Snapshot) -> None:
        check_snapshot(snapshot, self._shapes, tied=self._tied, vocabulary=self._vocabulary)

    def _prove(self, snapshot: Snapshot) -> Mismatch:
        return prove(self, snapshot, self._tolerance, context=self._context)


def _generation(flight: _Flight, output: Any) -> Generation:
    if output.finish_reason not in STOP_REASONS:
        raise EngineError(f"vLLM ended request {flight.request.id} with {output.finish_reason!r}")
    runs = [(int(span.version), span.end - span.start) for span in output.weight_versions]
    return Generation(
        id=flight.request.id,
        response_ids=np.asarray(output.token_ids, np.int32),
        logprobs=_flat(output.logprobs, len(output.token_ids)),
        version_runs=np.asarray(runs, np.int32).reshape(-1, 2),
        stop_reason=STOP_REASONS[output.finish_reason],
        seconds=time.perf_counter() - flight.started,
    )


def _prompt_logprobs(output: Any, count: int) -> Float32:
    if output.prompt_logprobs is None:
        raise EngineError("vLLM returned no log-probabilities for a sequence it was asked to score")
    return _flat(output.prompt_logprobs, count)


def _flat(logprobs: Any, count: int) -> Float32:
    """The values of vLLM's FlatLogprobs, which holds one per token since we ask for no alternatives."""
    values = np.asarray(logprobs.logprobs, np.float32)
    if len(values) != count:
        raise EngineError(f"vLLM returned {len(values)} log-probabilities for {count} tokens")
    return values
