"""`tba search --eval`: evaluate the kept snapshots of a run while it is in progress.

    kept snapshot, on disk or announced ──► queue ──► evaluate ──► eval.jsonl, and the buffer

It is a client of role `evaluator`: it leases no prompts and delivers no trajectories, so training does not notice it.
Without `train.keep_snapshot_every` it evaluates the newest snapshot, then the one that is newest by then.
"""

import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tba.common.clock import Clock, SystemClock
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, EngineFaulty, SnapshotError
from tba.common.evaluations import all_evaluations, as_message, is_measured, key_of, record_evaluations
from tba.common.log import get_logger
from tba.common.run_identity import refuse_other_server
from tba.common.run_snapshots import weights_directory
from tba.common.system.process import StopSignal, notify_systemd
from tba.common.system.watchdog import Watchdog
from tba.common.weights.node_store import make_directory
from tba.common.weights.snapshot import directory_name, list_snapshots, read
from tba.common.wire import fields, messages
from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.keys import buffer_client_keys
from tba.searcher.evaluation.evaluator import Evaluator, open_evaluator, read_subject, ref_of
from tba.searcher.loop import RunEnd
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress

log = get_logger(__name__)

_HEARTBEAT_SECONDS = 1.0
_IDLE_SECONDS = 0.5
_FLUSH_SECONDS = 5.0
# Attempts with a snapshot that cannot be read or that the engine refuses, before it is skipped.
_MAX_ATTEMPTS = 3


def follow(config: Config, *, device: str, label: str, stop: StopSignal) -> None:
    """Evaluate until the run is finished and its kept snapshots are done, or `stop()`.

    `device` and `label` are as those of a searcher. Raises as `tba.searcher.loop.search`.
    """
    log.info("starting", model=config.model.path, engine=config.search.engine, buffer=config.address)
    subject = read_subject(config)
    make_directory(weights_directory(config))
    name = f"{socket.gethostname()}-eval-{label}"
    with contextlib.ExitStack() as ending:
        keys = buffer_client_keys(config.security.keys, config.address)
        client = BufferClient(config.address, role="evaluator", name=name, keys=keys)
        ending.callback(client.close)
        fetching = Progress()
        opened = open_evaluator(config, subject, device=device, name=name, stop=stop, progress=fetching)
        with stop.exits_immediately():
            evaluator, assembler = ending.enter_context(opened)
        Follower(config, evaluator, assembler, fetching, client, SystemClock()).run(stop)


@dataclass(slots=True)
class Follower:
    """Evaluates one snapshot at a time, the oldest first, in one thread. `fetching` is the assembler's progress."""

    config: Config
    evaluator: Evaluator
    assembler: SnapshotAssembler
    fetching: Progress
    client: BufferClient
    clock: Clock
    # It only reports to systemd: the evaluator watches its engine.
    _watchdog: Watchdog = field(default_factory=Watchdog)
    _queue: dict[int, messages.WeightsRef] = field(default_factory=dict)
    # Versions that are evaluated, or given up.
    _done: set[int] = field(default_factory=set)
    _attempts: Counter[int] = field(default_factory=Counter)
    _heartbeat_request: int | None = None
    _heartbeat_at: float = -_HEARTBEAT_SECONDS
    _run: RunEnd = field(init=False)

    def __post_init__(self) -> None:
        self._run = RunEnd(self.client, self.clock)

    def run(self, stop: Callable[[], bool]) -> None:
        """Evaluate until the run is finished and nothing is left, or `stop()`. Raises Refused."""
        try:
            self._join(stop)
        # Raised only after `stop()`.
        except BufferUnavailable:
            return
        while not stop():
            self._watchdog.beat()
            self._find()
            if self._queue:
                self._evaluate(self._queue[min(self._queue)], stop)
            elif self._run.is_over:
                break
            else:
                self._heartbeat("waiting", "no snapshot is to be evaluated", _IDLE_SECONDS)
        try:
            # The buffer has the last evaluation, which was sent before.
            self.client.call(messages.Goodbye(), messages.Done, deadline_seconds=_FLUSH_SECONDS)
        except BufferUnavailable as error:
            log.warning("left without goodbye", reason=str(error))
        log.info("left", evaluations=len(self._done))

    def _join(self, stop: Callable[[], bool]) -> None:
        welcome, _ = self.client.call(make_hello(self.config.run.name), messages.Welcome, stop=stop)
        refuse_other_server(self.client.address, welcome.run_name, self.config.run.name)
        subject = self.evaluator.subject
        for row in all_evaluations(self.config.run.dir):
            run, version, *same = key_of(row)
            if run == welcome.run_name and same == [subject.prompt_set, subject.settings] and is_measured(row):
                self._done.add(version)
        self._run.joined()
        log.info("joined", buffer=self.client.address, prompts=len(subject.prompts), evaluated=len(self._done))
        notify_systemd("READY=1")

    def _find(self) -> None:
        """Queue what is to be evaluated: kept snapshots that are on this machine, and the newest announced one."""
        every = self.config.train.keep_snapshot_every
        newest = self.client.state.weights if self.client.state else None
        if newest is not None and not every:
            self._queue = {}
        if newest is not None and (not every or self.config.train.keeps_snapshot(newest.step)):
            self._add(newest)
        # This runs twice a second: manifests of a long run that are done with are not read again.
        done = {directory_name(version) for version in self._done}
        for path in list_snapshots(self.config.snapshots) if every else ():
            if path.name in done:
                continue
            # The trainer may delete it meanwhile; one that cannot be read is reported by `tba eval`.
            with contextlib.suppress(SnapshotError, OSError):
                manifest = read(path).manifest
                # As its path on disk stays, it replaces the announced one, whose file in memory does not.
                is_kept = self.config.train.keeps_snapshot(manifest.step) and not manifest.only_base
                if is_kept and manifest.run == self.config.run.name:
                    self._add(ref_of(path))

    def _add(self, ref: messages.WeightsRef) -> None:
        if ref.version not in self._done:
            self._queue[ref.version] = ref

    def _evaluate(self, ref: messages.WeightsRef, stop: Callable[[], bool]) -> None:
        """Evaluate one snapshot, and record the result. One that cannot be loaded is tried again, then left out."""

        def report(doing: str, done: int, total: int) -> bool:
            self._watchdog.beat()
            self._heartbeat("evaluating", f"{doing}: {done} of {total} responses", 0.0)
            return not stop()

        def wait() -> bool:
            self._watchdog.beat()
            silence = self.fetching.waits_for
            self._heartbeat("evaluating", f"v{ref.version}: {silence or 'loading'}", 0.0)
            # The trainer of a finished run does not come back.
            return not (stop() or (self._run.finished and silence))

        self._heartbeat("evaluating", f"v{ref.version}: loading", 0.0)
        self.fetching.go_on = wait
        try:
            snapshot, pinned = self.assembler.assemble(ref)
            row = self.evaluator.evaluate(snapshot, pinned, report)
        except EngineFaulty:
            raise
        except SnapshotError as error:
            # A fetch that is stopped fails, too.
            if not stop():
                self._fail(ref, error)
            return
        if row is None:
            return
        self._forget(ref.version)
        record_evaluations(self.config.run.dir, [row])
        self.client.post(as_message(row))
        shown = {name: row[name] for name in ("accuracy", "reward", "seconds") if name in row}
        log.info("evaluated", version=ref.version, step=ref.step, **shown)
        if reason := row.get("not_measured"):
            log.warning("not measured: `tba eval --all` repeats it", version=ref.version, reason=reason)

    def _fail(self, ref: messages.WeightsRef, error: SnapshotError) -> None:
        self._attempts[ref.version] += 1
        attempt = self._attempts[ref.version]
        log.warning("snapshot not evaluated", version=ref.version, attempt=attempt, reason=str(error))
        if attempt >= _MAX_ATTEMPTS:
            self._forget(ref.version)
        else:
            self._heartbeat("waiting", str(error), _IDLE_SECONDS)

    def _forget(self, version: int) -> None:
        self._done.add(version)
        self._queue.pop(version, None)

    def _heartbeat(self, activity: str, reason: str, wait_seconds: float) -> None:
        """Tell the buffer once a second what this process does, and read its replies, waiting at most this long."""
        now = self.clock.monotonic()
        if now - self._heartbeat_at >= _HEARTBEAT_SECONDS and not self.client.is_pending(self._heartbeat_request):
            self._heartbeat_at = now
            heartbeat = messages.Heartbeat(
                activity=activity,
                reason=reason[: fields.MAX_REASON],
                weights_version=min(self._queue) if activity == "evaluating" and self._queue else None,
                metrics={"evaluations": float(len(self._done))},
            )
            self._heartbeat_request = self.client.post(heartbeat)
            notify_systemd(f"STATUS={activity} {reason}")
        for reply in self.client.poll(wait_seconds):
            if isinstance(reply.message, messages.Failure):
                log.warning("refused by the buffer", reason=reply.message.message)
        newest = self.client.state.weights if self.client.state else None
        if newest is not None and self.config.train.keeps_snapshot(newest.step):
            self._add(newest)
