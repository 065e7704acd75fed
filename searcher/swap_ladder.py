"""Adopting a snapshot in a running engine: exchange and prove; if that fails, the slow way; if that fails, go back.

    1  what `prepare` made ready beside generation is exchanged, read back, and the canary is scored
    2  the engine loads all weights again by its own slow reload; read back and canary as before
    3  the old weights come back and are proved on their own canary: the snapshot is refused, the engine is good
    4  the engine is faulty and its process ends: it cannot go back, or does not take weights that are readable

Between the first exchange and the end of a rung nothing that was generated is handed out.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tba.common.errors import CanaryMismatch, EngineError, EngineFaulty, SnapshotError
from tba.common.log import get_logger
from tba.common.snapshot import Snapshot
from tba.searcher.engine import LoadReport
from tba.searcher.snapshot_checks import Mismatch, on_one_base

log = get_logger(__name__)

_POLL_SECONDS = 0.01
RELOAD = "reload"  # the way of a model whose tensors were not found in the engine: rung 2 is all there is


class NotTaken(SnapshotError):
    """The workers could not load weights, or do not compute with them."""


class Host(Protocol):
    """What the ladder needs of an engine."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each worker (searcher/vllm_worker.py), between two steps. Raises NotTaken."""

    def relabel(self, version: int) -> None:
        """Weights change now: label the tokens that follow, and reuse no cache of other weights."""

    def start_over(self) -> None:
        """Forget what all requests in flight have got so far, and generate it again."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights, and where to read them again.

    `proof` carries the canary that they pass. `run` is None for those the engine started with, which no trainer
    published; there the canary is the engine's own.
    """

    version: int
    files: list[str]
    run: str | None
    proof: Snapshot


class SwapLadder:
    """The swaps of one engine. `check` raises SnapshotError before anything is touched, `prove` CanaryMismatch."""

    def __init__(
        self,
        host: Host,
        served: Weights,
        *,
        check: Callable[[Snapshot], None],
        prove: Callable[[Snapshot], Mismatch],
    ) -> None:
        self._host = host
        self._served = served
        self._check = check
        self._prove = prove
        self._prepared: Path | None = None  # the snapshot that the workers have ready
        self._read_seconds = 0.0
        self._lock = threading.Lock()  # held while weights are prepared or exchanged
        start = host.call("tba_start")[0]
        self.way = str(start["way"])
        log.info("weights are swapped", way=self.way, reason=start["reason"] or "as the model allows")

    def prepare(self, snapshot: Snapshot) -> None:
        """Let the workers read, convert and pack a snapshot, and wait for it. May be called from any thread.

        Raises SnapshotError if it is no snapshot of this model. What else fails is logged: `load` then tries
        again, and goes down the ladder.
        """
        with self._lock:
            self._check(snapshot)
            try:
                self._prepare(_weights_of(snapshot), self._delta_of(snapshot))
                self._prepared = snapshot.path
            except NotTaken as error:
                log.warning("weights not prepared", version=snapshot.manifest.version, reason=str(error))

    def load(self, snapshot: Snapshot) -> LoadReport:
        """Adopt a snapshot. Raises SnapshotError or CanaryMismatch if the old weights serve on, else EngineFaulty."""
        started = time.perf_counter()
        with self._lock:
            if self._prepared != snapshot.path:
                self._check(snapshot)
            try:
                report = self._adopt(snapshot)
            except BaseException as error:
                # Also when a signal handler raised: unproven weights must not serve.
                self._go_back()
                if isinstance(error, NotTaken):
                    self._check(snapshot)
                    _fail(f"the engine does not take the weights of v{snapshot.manifest.version}: {error}")
                raise
            self._served = _weights_of(snapshot)
            self._host.call("tba_keep")
        return dataclasses.replace(report, pause_seconds=time.perf_counter() - started)

    def wait(self) -> None:
        """Until nothing is being prepared."""
        with self._lock:
            pass

    def _delta_of(self, snapshot: Snapshot) -> str | None:
        """The file of a snapshot's changes, if they are all that differs from the very weights that serve."""
        manifest, served = snapshot.manifest, self._served
        if snapshot.delta is None or manifest.run != served.run:
            return None
        return str(snapshot.delta) if manifest.base == served.version or on_one_base(snapshot, served.proof) else None

    def _prepare(self, weights: Weights, delta: str | None) -> None:
        started = time.perf_counter()
        self._prepared = None
        self._host.call("tba_prepare", weights.files, delta, weights.version)
        while (states := self._host.call("tba_prepared")) and not all(ended for ended, _ in states):
            time.sleep(_POLL_SECONDS)
        if failures := [failure for _, failure in states if failure]:
            raise NotTaken(f"v{weights.version} could not be prepared: {failures[0]}")
        self._read_seconds = time.perf_counter() - started

    def _adopt(self, snapshot: Snapshot) -> LoadReport:
        """Rungs 1 and 2."""
        try:
            if self._prepared != snapshot.path:
                self._prepare(_weights_of(snapshot), self._delta_of(snapshot))
            return self._swap(snapshot, "tba_exchange", self.way)
        except (NotTaken, CanaryMismatch) as error:
            if self.way == RELOAD:
                raise
            version = snapshot.manifest.version
            log.warning("weights did not take, loading all of them again", version=version, reason=str(error))
        # Not where the error is caught: by its traceback it holds the weights that did not take.
        return self._swap(snapshot, "tba_reload", RELOAD)

    def _swap(self, snapshot: Snapshot, method: str, way: str) -> LoadReport:
        started = time.perf_counter()
        self._write(_weights_of(snapshot), method)
        written = time.perf_counter()
        found = self._prove(snapshot)
        parts = (self._read_seconds, written - started, time.perf_counter() - written)
        return LoadReport(found.maximum, found.mean, found.kl, way, *parts, pause_seconds=0.0)

    def _write(self, weights: Weights, method: str) -> None:
        self._prepared = None
        self._host.relabel(weights.version)
        self._host.call(method, weights.files, weights.version)

    def _go_back(self) -> None:
        """Rung 3. All requests start over, since scoring the canary advanced them with the refused weights: those
        with new tokens hold wrong ones, and those without may hold a partly computed prompt."""
        served = self._served
        self._prepared = None
        self._host.start_over()
        self._host.relabel(served.version)
        try:
            if not all(self._host.call("tba_undo")):
                self._load_back(served)
            self._prove(served.proof)
        except (SnapshotError, EngineError) as error:
            _fail(f"a snapshot was refused and v{served.version} could not be loaded back: {error}")

    def _load_back(self, served: Weights) -> None:
        try:
            self._prepare(served, None)
            self._write(served, "tba_exchange")
        except NotTaken as error:
            log.warning("old weights did not take, loading all again", version=served.version, reason=str(error))
            self._write(served, "tba_reload")


def _weights_of(snapshot: Snapshot) -> Weights:
    manifest = snapshot.manifest
    return Weights(manifest.version, [*map(str, snapshot.weight_files)], manifest.run, snapshot)


def _fail(reason: str) -> NoReturn:
    raise EngineFaulty(f"{reason}; start the searcher again")
