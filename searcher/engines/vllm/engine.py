"""Generation with vLLM: an engine in this process, stepped by the searcher's loop.

vLLM can only swap weights safely while no step is running. Because the searcher's own thread steps it, `load_weights`
runs between two steps: nothing is paused, and the version of each token is exact.

    VllmEngine ──► HotReload ──► RunningVllm ──► vLLM ──► WeightWorker, in each worker process

docs/vllm.md lists what was run, and what was not (CUDA).
"""

from collections.abc import Sequence
from pathlib import Path

from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection
from tba.common.errors import ConfigError, EngineFaulty
from tba.common.system.process import KV_CACHE_NOTICE, notify_systemd
from tba.common.weights.model_files import model_directory, read_json, weight_files
from tba.common.weights.snapshot import Snapshot
from tba.common.wire.trajectory import Float32
from tba.searcher.engines.acceptance import Acceptance, routes_or_quantizes, tensor_shapes
from tba.searcher.engines.engine import Generation, GenerationRequest, LoadReport
from tba.searcher.engines.stopping import Stopping
from tba.searcher.engines.vllm.hot_reload import HotReload
from tba.searcher.engines.vllm.running import SCORING_ROWS, RunningVllm
from tba.searcher.engines.vllm.scheduler import VllmScheduler
from tba.searcher.engines.vllm.start import (
    adapter_of_all,
    import_vllm,
    leave_process_groups,
    most_in_flight,
    start_vllm,
)


class VllmEngine:
    """An `Engine` (searcher/engines/engine.py) on vLLM."""

    def __init__(
        self,
        model: ModelSection,
        search: SearchSection,
        *,
        seed: int,
        canary_tolerance: float,
        stopping: Stopping,
        lora_rank: int = 0,
        pack_weights: bool = True,
        prompt_tokens: int = 0,
    ) -> None:
        """`lora_rank` 0 is an engine without adapters; `prompt_tokens` is the length of a typical prompt.

        `pack_weights` False makes vLLM on a CPU compute with its parameters, as it does on a GPU.
        """
        import_vllm()
        directory = model_directory(model.path)
        files = weight_files(directory)
        rows = most_in_flight(search) + SCORING_ROWS
        llm = start_vllm(
            model,
            search,
            max_num_seqs=rows,
            seed=seed,
            lora_rank=lora_rank,
            pack_weights=pack_weights,
            reads_text=bool(stopping.strings),
        )
        scheduler = VllmScheduler(llm)
        self._running = RunningVllm(
            llm,
            scheduler=scheduler,
            max_in_flight=scheduler.choose_in_flight(search, prompt_tokens),
            end_ids=sorted(stopping.ids),
            stop_strings=stopping.strings,
            adapter=adapter_of_all() if lora_rank else None,
        )
        try:
            _limit_context(self._running)
            acceptance = _acceptance(self._running, directory, canary_tolerance)
            self._hot_reload = HotReload(self._running, files, acceptance)
        except BaseException:
            self._running.close()
            leave_process_groups()
            raise
        # Its supervisor gives the next start the same cache, so that vLLM does not measure while a trainer allocates.
        if scheduler.kv_cache_gib:
            notify_systemd(f"{KV_CACHE_NOTICE}{scheduler.kv_cache_gib!r}")

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""
        return self._running.version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        return self._running.in_flight

    @property
    def max_in_flight(self) -> int:
        """Responses that it generates concurrently; more are queued."""
        return self._running.max_in_flight

    @property
    def metrics(self) -> dict[str, float]:
        """The limit of responses in flight, the tokens that fit the KV cache, and the preemptions since the start."""
        scheduler = self._running.scheduler
        return {
            "max_in_flight": float(self.max_in_flight),
            "kv_cache_tokens": float(scheduler.kv_cache_tokens),
            "preemptions": float(scheduler.preemptions),
        }

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if the prompt does not fit the model's context."""
        self._running.submit(request)

    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""
        return self._running.step()

    def prepare(self, snapshot: Snapshot) -> None:
        """Read a snapshot alongside generation; call it from another thread.

        Raises SnapshotError if it is not a snapshot of this model.
        """
        self._running.check()
        self._hot_reload.prepare(snapshot)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, check it on the canary, and continue from there.

        All or nothing: on SnapshotError or CanaryMismatch the old weights serve again, no token of the refused ones
        reaches a Generation, and requests in flight are still answered.
        """
        self._running.check()
        try:
            return self._hot_reload.load(snapshot)
        except EngineFaulty as error:
            self._running.give_up(str(error))
            raise

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for a sequence of T tokens an array [T - 1],
        whose t-th entry is log p(token t + 1 | tokens up to t)."""
        return self._running.score(sequences)

    def close(self) -> None:
        """Free the device and end the workers. The engine cannot be used afterwards; closing twice is fine."""
        self._running.give_up("the engine is closed")
        self._hot_reload.wait()
        if self._running.close():
            leave_process_groups()


def _limit_context(running: RunningVllm) -> None:
    """Keep to the sequences that vLLM and the trainer rotate alike. Raises ConfigError if vLLM does so for none."""
    limit = running.rotation.limit
    if limit is None or running.context <= limit:
        return
    if running.rotation.kind == "longrope":
        raise ConfigError(
            f"above {limit} tokens this model rotates positions by other factors (LongRoPE), which vLLM then uses for "
            f"short sequences too, unlike the trainer: set search.max_model_len to at most {limit}"
        )
    # Beyond it vLLM does not scale dynamic NTK.
    running.context = limit


def _acceptance(running: RunningVllm, directory: Path, tolerance: float) -> Acceptance:
    """Return the checks of snapshots for the model in a directory, which vLLM serves."""
    config = read_json(directory / "config.json")
    files = weight_files(directory)
    workers = running.call("tba_unplaced", [*map(str, files)])
    # With several workers each holds a part of the model.
    unplaced = set.intersection(*map(set, workers))
    return Acceptance(
        tensor_shapes(files, without=unplaced),
        copies={name for name in unplaced if any(one[name] for one in workers)},
        vocabulary=running.vocabulary,
        tolerance=tolerance,
        routed=routes_or_quantizes(config) or running.quantized,
    )
