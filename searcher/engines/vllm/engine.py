"""Generation with vLLM: an engine in this process, stepped by the searcher's loop, and its hot reload of weights.

vLLM can only swap weights safely while no step is running. Because the searcher's own thread steps it, `load_weights`
runs between two steps: nothing is paused, and the version of each token is exact. A load swaps and verifies, else
reloads everything, else rolls back:

    1  swap      exchange the weights that `prepare` read, read a sample back, and score the canary
    2  reload    load all weights with vLLM's slow reload; read back and canary as before
    3  rollback  restore the old weights and verify their own canary: the snapshot is refused, the engine is fine
    4  faulty    the engine cannot roll back, or does not accept weights that are readable: its process must end

From the first write until the end of the attempt, nothing that was generated is handed out.

A self-test at the start of the engine chooses the way that swaps take: all weights are zeroed, and the files that the
engine serves are loaded again in that way. If all parameters, buffers and tensors made from them are then what they
were, it is right.

docs/vllm.md lists what was run, and what was not (CUDA).
"""

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np

from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection
from tba.common.errors import CanaryMismatch, ConfigError, EngineError, EngineFaulty, SnapshotError, quantity
from tba.common.log import get_logger
from tba.common.system.load_errors import out_of_memory
from tba.common.system.process import KV_CACHE_NOTICE, notify_systemd
from tba.common.weights.model_files import model_directory, read_json, weight_files
from tba.common.weights.snapshot import Canary, FileEntry, Manifest, Snapshot
from tba.searcher.engines.acceptance import Acceptance, routes_or_quantizes, tensor_shapes
from tba.searcher.engines.engine import LoadReport, Mismatch
from tba.searcher.engines.stopping import Stopping
from tba.searcher.engines.vllm import start
from tba.searcher.engines.vllm.running import SCORING_ROWS, LoadFailed, RunningVllm

log = get_logger(__name__)

# How weights get into the engine. ADAPTER: the base weights stay; only the LoRA adapter is replaced.
ADAPTER, IN_PLACE, RELOAD = "adapter", "in place", "reload"

_POLL_SECONDS = 0.01
_OWN_TOKENS = 32
# Tensors that a message names.
_NAMED = 3


class HotReload:
    """The swaps of one engine."""

    def __init__(self, running: RunningVllm, own_files: list[Path], acceptance: Acceptance) -> None:
        """`own_files` are those that the engine started with."""
        self._running = running
        self._acceptance = acceptance
        # The snapshot that the workers have ready, the one that was checked, and how long preparing took.
        self._prepared: Path | None = None
        self._checked: Path | None = None
        self._read_seconds = 0.0
        # Held while weights are prepared or swapped.
        self.lock = threading.Lock()
        # First: with LoRA it installs the adapter that also the engine's own canary is scored with.
        unable = running.call("tba_start")
        self._served = _own_snapshot(running, own_files)
        self.way = self._self_test(unable)
        # The complete files that the parameters hold: the base of an adapter. None before the first write and after one
        # that failed, {} after a rollback to the files that the engine started with.
        self._base: Mapping[str, FileEntry] | None = None

    def _self_test(self, unable: list[str | None]) -> str:
        """Return the first way that restores this model, for all workers. Raises ConfigError if none does.

        `unable` has the reason of each worker that cannot swap in place.
        """
        started = time.perf_counter()
        # All workers must swap alike: one that can only reload decides for all.
        reason = next((one for one in unable if one is not None), None)
        reasons = [] if reason is None else [f"not {IN_PLACE}: {reason}"]
        for way in (IN_PLACE, RELOAD)[len(reasons) :]:
            if (failure := self._failure_of(way)) is None:
                seconds = time.perf_counter() - started
                reason = "; ".join(reasons) or "it passed the self-test"
                log.info("weights are swapped", way=way, reason=reason, seconds=seconds)
                return way
            reasons.append(f"not {way}: {failure}")
        raise ConfigError(
            f"vLLM cannot replace the weights of {self._served.path} while it runs ({'; '.join(reasons)}): "
            'choose another model, or search.engine = "transformers"'
        )

    def _failure_of(self, way: str) -> str | None:
        """Zero all weights, load the engine's own files in a way, and say what is not as before."""
        own = self._served
        # So that no cached key or value of the engine's start hides a difference.
        self._running.set_version(own.manifest.version)
        try:
            found = self._running.call("tba_try", _files(own), way == IN_PLACE)
            if wrong := sorted({name for names in found for name in names}):
                many = quantity(len(wrong), "tensor is", "tensors are")
                return f"{many} not restored, for example {', '.join(wrong[:_NAMED])}"
            self._check_canary(own)
        except SnapshotError as error:
            return str(error)
        return None

    def prepare(self, snapshot: Snapshot) -> None:
        """Let the workers read a snapshot, and wait for them. May be called from any thread.

        Raises SnapshotError if it is another model's. Any other failure is logged: `load` tries again, and falls back.
        """
        with self.lock:
            self._check(snapshot)
            try:
                if self._first_way(snapshot) == IN_PLACE:
                    self._prepare(snapshot)
            except LoadFailed as error:
                log.warning("weights not prepared", version=snapshot.manifest.version, reason=str(error))

    def load(self, snapshot: Snapshot) -> LoadReport:
        """Adopt a snapshot. Raises SnapshotError or CanaryMismatch after a rollback, else EngineFaulty."""
        started = time.perf_counter()
        with self.lock:
            if self._checked != snapshot.path:
                self._check(snapshot)
            try:
                report = self._adopt(snapshot, started)
            # Also when a signal handler raised: unchecked weights must not serve.
            except BaseException as error:
                self._roll_back()
                if isinstance(error, LoadFailed):
                    # If the files are gone it is the snapshot's fault, and a lack of memory may pass.
                    self._check(snapshot)
                    if not out_of_memory(error):
                        _fail(f"the engine does not accept the weights of v{snapshot.manifest.version}: {error}")
                raise
            self._served = snapshot
            self._acceptance.uncalibrated = False
        return report

    def _check(self, snapshot: Snapshot) -> None:
        self._checked = None
        self._acceptance.check(snapshot)
        if snapshot.adapter is not None and not self._running.uses_adapters:
            raise SnapshotError(
                f"v{snapshot.manifest.version} is an adapter, and this engine was started without adapters: "
                'set lora.rank and lora.publish = "adapter" as the trainer has them'
            )
        self._checked = snapshot.path

    def _first_way(self, snapshot: Snapshot) -> str:
        """How to write weights, if nothing fails."""
        if self._running.uses_adapters and snapshot.manifest.model_files == self._base:
            return ADAPTER
        return self.way

    def _prepare(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        self._prepared = None
        self._running.call("tba_prepare", _files(snapshot), snapshot.manifest.version)
        while (states := self._running.call("tba_prepared")) and not all(ended for ended, _ in states):
            time.sleep(_POLL_SECONDS)
        if failures := [failure for _, failure in states if failure]:
            raise LoadFailed(f"v{snapshot.manifest.version} could not be prepared: {failures[0]}")
        self._read_seconds = time.perf_counter() - started
        self._prepared = snapshot.path

    def _adopt(self, snapshot: Snapshot, started: float) -> LoadReport:
        """Attempts 1 and 2."""
        way = self._first_way(snapshot)
        try:
            return self._swap(snapshot, way, started)
        except (LoadFailed, CanaryMismatch) as error:
            if way == RELOAD:
                raise
            version = snapshot.manifest.version
            log.warning("weight swap failed, reloading all weights", version=version, reason=str(error))
        # Not inside the except clause: the error's traceback keeps the weights of the first attempt alive.
        return self._swap(snapshot, RELOAD, started)

    def _swap(self, snapshot: Snapshot, way: str, started: float) -> LoadReport:
        if way == IN_PLACE and self._prepared != snapshot.path:
            self._prepare(snapshot)
        begun = time.perf_counter()
        self._write(snapshot, way)
        written = time.perf_counter()
        found = self._check_canary(snapshot, calibrate=self._acceptance.uncalibrated and self._may_calibrate(way))
        now = time.perf_counter()
        read_seconds = self._read_seconds if way == IN_PLACE else 0.0
        parts = (read_seconds, written - begun, now - written)
        return LoadReport(found, way, *parts, pause_seconds=now - started)

    def _write(self, snapshot: Snapshot, way: str) -> None:
        """Overwrite the weights, and the adapter after them: vLLM's reload removes it. Raises LoadFailed."""
        self._running.set_version(snapshot.manifest.version)
        if way != ADAPTER:
            self._prepared = self._base = None
            if way == IN_PLACE:
                self._running.call("tba_exchange")
            else:
                self._running.call("tba_reload", _files(snapshot), snapshot.manifest.version)
            self._base = snapshot.manifest.model_files
        self._running.call("tba_set_adapter", str(snapshot.adapter or ""))

    def _check_canary(self, snapshot: Snapshot, *, calibrate: bool = False) -> Mismatch:
        running, check = self._running, self._acceptance.check_canary
        return check(running.score, snapshot, context=running.context, calibrate=calibrate)

    def _may_calibrate(self, way: str) -> bool:
        """Whether the first snapshot's deviation from the trainer is numerical noise, which sets the later limits.

        It is if the weights are those of the start. With routed experts or quantized weights the first snapshot counts
        in any case: a searcher that joins later sees no other.
        """
        return self._acceptance.routed or (way != ADAPTER and all(self._running.call("tba_is_own")))

    def _roll_back(self) -> None:
        """Attempt 3. All requests start over, because scoring the canary advanced them with the refused weights: those
        with new tokens have wrong ones, and those without may have a partly computed prompt."""
        served, version = self._served, self._served.manifest.version
        self._running.start_over()
        try:
            way = self._first_way(served)
            try:
                if way == IN_PLACE:
                    self._prepare(served)
                self._write(served, way)
            except LoadFailed as error:
                log.warning("old weights not restored, reloading all weights", version=version, reason=str(error))
                self._write(served, RELOAD)
            self._check_canary(served)
        except (SnapshotError, EngineError) as error:
            _fail(f"a snapshot was refused and v{version} could not be restored: {error}")


class VllmEngine(RunningVllm):
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

        With `search.top_k` vLLM returns the tokens that were left to sample from.

        `pack_weights` False makes vLLM on a CPU compute with its parameters, as it does on a GPU.
        """
        start.import_vllm()
        directory = model_directory(model.path)
        files = weight_files(directory)
        llm = start.start_vllm(
            model,
            search,
            max_num_seqs=start.most_in_flight(search) + SCORING_ROWS,
            seed=seed,
            lora_rank=lora_rank,
            pack_weights=pack_weights,
            # Requests to the endpoint may have strings of their own.
            reads_text=bool(stopping.strings or search.serve),
        )
        adapter = start.adapter_request("") if lora_rank else None
        super().__init__(llm, search, stopping, prompt_tokens=prompt_tokens, adapter=adapter)
        try:
            self._limit_context()
            self.hot_reload = HotReload(self, files, self._acceptance(directory, canary_tolerance))
        except BaseException:
            self._end()
            raise
        # Its supervisor gives the next start the same cache, so that vLLM does not measure while a trainer allocates.
        if self.scheduler.kv_cache_gib:
            notify_systemd(f"{KV_CACHE_NOTICE}{self.scheduler.kv_cache_gib!r}")

    @property
    def metrics(self) -> dict[str, float]:
        """The limit of responses in flight, the tokens that fit the KV cache, and since the start: the preemptions, the
        tokens of prompts, and those of them that the prefix cache had."""
        return {
            "max_in_flight": float(self.max_in_flight),
            "kv_cache_tokens": float(self.scheduler.kv_cache_tokens),
            "preemptions": float(self.scheduler.preemptions),
            "prompt_tokens": float(self.prompt_tokens),
            "cached_tokens": float(self.cached_tokens),
        }

    def prepare(self, snapshot: Snapshot) -> None:
        self.check()
        self.hot_reload.prepare(snapshot)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        self.check()
        try:
            return self.hot_reload.load(snapshot)
        except EngineFaulty as error:
            self.give_up(str(error))
            raise

    def close(self) -> None:
        """Free the device and end the workers. The engine cannot be used afterwards; closing twice is fine."""
        self.give_up("the engine is closed")
        # No snapshot is being prepared then.
        with self.hot_reload.lock:
            pass
        self._end()

    def _end(self) -> None:
        llm = self._llm
        if llm is not None:
            # Workers with processes of their own end, and may not answer.
            if llm.vllm_config.parallel_config.world_size == 1:
                with contextlib.suppress(LoadFailed):
                    self.call("tba_close")
            self._llm = None
            llm.engine_core.shutdown()
            start.leave_process_groups()

    def _limit_context(self) -> None:
        """Keep to the sequences that vLLM and the trainer rotate alike. Raises ConfigError if vLLM does so for none."""
        limit = self.rotation.limit
        if limit is None or self.context <= limit:
            return
        if self.rotation.kind == "longrope":
            raise ConfigError(
                f"above {limit} tokens this model rotates positions by other factors (LongRoPE), which vLLM then uses "
                f"for short sequences too, unlike the trainer: set search.max_model_len to at most {limit}"
            )
        # Beyond it vLLM does not scale dynamic NTK.
        self.context = limit

    def _acceptance(self, directory: Path, tolerance: float) -> Acceptance:
        """Return the checks of snapshots for the model in a directory, which vLLM serves."""
        files = weight_files(directory)
        workers = self.call("tba_unplaced", [*map(str, files)])
        # With several workers each holds a part of the model.
        unplaced = set.intersection(*map(set, workers))
        return Acceptance(
            tensor_shapes(files, without=unplaced),
            copies={name for name in unplaced if any(one[name] for one in workers)},
            vocabulary=self.vocabulary,
            tolerance=tolerance,
            routed=routes_or_quantizes(read_json(directory / "config.json")) or self.quantized,
        )


def _files(snapshot: Snapshot) -> list[str]:
    return [*map(str, snapshot.weight_files)]


def _own_snapshot(running: RunningVllm, files: list[Path]) -> Snapshot:
    """A snapshot of the weights that serve, whose canary is what the engine itself gives some random tokens."""
    length = min(_OWN_TOKENS, running.context - 1)
    tokens = np.random.default_rng(0).integers(0, running.vocabulary, length).tolist()
    canary = Canary([tokens], [score.tolist() for score in running.score([tokens])])
    return Snapshot(files[0].parent, Manifest("", running.weights_version, 0, 0.0, {}, canary), files)


def _fail(reason: str) -> NoReturn:
    raise EngineFaulty(f"{reason}; restart the searcher")
