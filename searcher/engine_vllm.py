"""Generation with vLLM: an engine in this process, stepped by the searcher's loop.

vLLM can only swap weights safely while no step is under way. Stepping it ourselves makes that trivially so:
`load_weights` runs between two steps, nothing has to be paused, and the version of each token is exact.

    submit ──► _queue ──► vLLM ──step──► _finished ──► step() returns it
                            ▲               ▲
                     load_weights: exchange, score the canary (which steps all the others too), accept or undo

What finishes while a canary is being scored waits in `_finished` until the weights are accepted.

The ladder of a swap: what `prepare` made ready beside generation is exchanged and read back; if that fails, or
the canary does, all weights are loaded again by vLLM's own slow reload; if that fails too, the old weights come
back and are proved again. An engine that does not take weights or cannot go back is faulty, and the process ends.

docs/vllm.md says what was run, and what was not (CUDA).
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tba.common.errors import CanaryMismatch, EngineError, EngineFaulty, SnapshotError
from tba.common.log import get_logger
from tba.common.model_files import eos_ids, model_directory, read_json, weight_files
from tba.common.snapshot import Snapshot
from tba.common.trajectory import STOP_EOS, STOP_LENGTH, Float32
from tba.searcher.engine import (
    Generation,
    GenerationRequest,
    LoadReport,
    SamplingSettings,
    check_request,
    in_vocabulary,
)
from tba.searcher.snapshot_checks import check_snapshot, prove, tensor_shapes
from tba.searcher.vllm_start import for_platform, import_vllm, leave_process_groups, start_vllm

log = get_logger(__name__)

# Places in vLLM's batch that no request gets, so that a full batch does not keep the canary waiting.
SCORING_SLOTS = 8
SCORING_PRIORITY = -1  # lower goes first, which matters when the KV cache is full
STOP_REASONS = {"stop": STOP_EOS, "length": STOP_LENGTH}
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights, where to read them again, and what proves them (None: those the engine started with)."""

    version: int
    files: list[str]
    snapshot: Snapshot | None


class _NotTaken(SnapshotError):
    """The workers could not load weights, or do not compute with them."""


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
        self._served = _Weights(initial_version, [*map(str, files)], None)
        self._version = initial_version
        self._prepared: Path | None = None  # the snapshot that the workers have ready
        self._read_seconds = 0.0
        self._salt = 0
        self._loading = threading.Lock()  # held while weights are prepared or exchanged
        self._stepping = threading.Lock()  # held while vLLM's workers are spoken to
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
        start = self._rpc("tba_start")[0]
        self._way = str(start["way"])
        log.info("weights are swapped", way=self._way, reason=start["reason"] or "as the model allows")

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
        """Check a snapshot, and let the workers read, convert and pack it, while stepping goes on.

        Raises SnapshotError if it is no snapshot of this model. What else fails is logged: `load_weights` then
        tries again, and goes down the ladder.
        """
        with self._loading:
            self._check(snapshot)
            try:
                self._prepare(self._weights_of(snapshot), self._delta_of(snapshot))
                self._prepared = snapshot.path
            except _NotTaken as error:
                log.warning("weights not prepared", version=snapshot.manifest.version, reason=str(error))

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, prove it on the canary, and go on from there.

        All or nothing: on SnapshotError or CanaryMismatch the old weights serve again, no token of the
        refused ones reaches a Generation, and requests in flight are still answered.
        """
        started = time.perf_counter()
        with self._loading:
            if self._prepared != snapshot.path:
                self._check(snapshot)
            try:
                report = self._adopt(snapshot)
            except BaseException as error:
                # Also when a signal handler raised: unproven weights must not serve.
                self._undo()
                if isinstance(error, _NotTaken):
                    self._check(snapshot)
                    self._fail(f"the engine does not take the weights of v{snapshot.manifest.version}: {error}")
                raise
            self._served = self._weights_of(snapshot)
            self._rpc("tba_keep")
        return dataclasses.replace(report, pause_seconds=time.perf_counter() - started)

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
            with self._stepping:
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

    # ------------------------------------------------------------ weights

    def _check(self, snapshot: Snapshot) -> None:
        self._require_working()
        check_snapshot(snapshot, self._shapes, tied=self._tied, vocabulary=self._vocabulary)

    def _weights_of(self, snapshot: Snapshot) -> _Weights:
        return _Weights(snapshot.manifest.version, [*map(str, snapshot.weight_files)], snapshot)

    def _delta_of(self, snapshot: Snapshot) -> str | None:
        """The file of a snapshot's changes, if they are changes of the very weights that serve."""
        served = self._served.snapshot
        if snapshot.delta is None or served is None or snapshot.manifest.run != served.manifest.run:
            return None
        return str(snapshot.delta) if snapshot.manifest.base == served.manifest.version else None

    def _prepare(self, weights: _Weights, delta: str | None) -> None:
        started = time.perf_counter()
        self._prepared = None
        self._rpc("tba_prepare", weights.files, delta, weights.version)
        while (states := self._rpc("tba_prepared")) and not all(ended for ended, _ in states):
            time.sleep(_POLL_SECONDS)
        if failures := [failure for _, failure in states if failure]:
            raise _NotTaken(f"v{weights.version} could not be prepared: {failures[0]}")
        self._read_seconds = time.perf_counter() - started

    def _adopt(self, snapshot: Snapshot) -> LoadReport:
        """The first two rungs of the ladder. Raises _NotTaken or CanaryMismatch."""
        weights = self._weights_of(snapshot)
        try:
            if self._prepared != snapshot.path:
                self._prepare(weights, self._delta_of(snapshot))
            return self._swap(weights, snapshot, "tba_exchange", self._way)
        except (_NotTaken, CanaryMismatch) as error:
            if self._way == "reload":
                raise
            log.warning("weights did not take, loading all of them again", version=weights.version, reason=str(error))
            return self._swap(weights, snapshot, "tba_reload", "reload")

    def _swap(self, weights: _Weights, snapshot: Snapshot, method: str, way: str) -> LoadReport:
        """Exchange the weights, and prove them."""
        times = [time.perf_counter()]
        self._write(weights, method)
        times.append(time.perf_counter())
        found = prove(self, snapshot, self._tolerance, context=self._context)
        exchange, canary = times[1] - times[0], time.perf_counter() - times[1]
        return LoadReport(found.maximum, found.mean, found.kl, way, self._read_seconds, exchange, canary, 0.0)

    def _write(self, weights: _Weights, method: str) -> None:
        self._prepared = None
        self._version = weights.version
        self._salt += not self._keep_prefix_cache
        self._llm.set_weight_version(str(weights.version))
        self._rpc(method, weights.files, weights.version)

    def _undo(self) -> None:
        """Serve the last good weights again, prove them, and start every request in flight over.

        All requests, since scoring the canary advanced them with the refused weights: those with new tokens
        hold wrong ones, and those without may hold a partly computed prompt.
        """
        if self._broken is not None:
            return
        served = self._served
        self._llm.abort_request([*map(str, self._flights)])  # unknown and finished ones are ignored
        self._finished.clear()
        self._queue = deque(self._flights)
        self._salt += 1  # what the refused weights left in the cache is reused in no case
        self._version = served.version
        self._llm.set_weight_version(str(served.version))
        try:
            if not all(self._rpc("tba_undo")):
                self._load_back(served)
            if served.snapshot is not None:
                prove(self, served.snapshot, self._tolerance, context=self._context)
        except (SnapshotError, EngineError) as error:
            self._fail(f"a snapshot was refused and v{served.version} could not be loaded back: {error}")

    def _load_back(self, served: _Weights) -> None:
        try:
            self._prepare(served, None)
            self._write(served, "tba_exchange")
        except _NotTaken as error:
            log.warning(
                "old weights did not take, loading all of them again", version=served.version, reason=str(error)
            )
            self._write(served, "tba_reload")

    def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker, between two steps. Raises _NotTaken if one fails."""
        try:
            with self._stepping:
                results: list[Any] = self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise _NotTaken(f"vLLM could not do it ({method}): {error}") from error
        return results

    def _fail(self, reason: str) -> NoReturn:
        self._broken = f"{reason}; start the searcher again"
        raise EngineFaulty(self._broken)


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
