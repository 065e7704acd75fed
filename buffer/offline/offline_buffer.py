"""Time travel: the buffer of a recorded run as it was at a step, for a trainer without a server or searchers.

    the recorded run's file (read only) ──► index, tokens ──┐
    the offline run's own file ◄── batches, reports ────────┴──► the trainer, by the messages of the server

Invariant: the recorded file is never written to. The offline run records its batches and reports in a file of its own,
whose rows refer to trajectories of the recorded file.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

import typer
from msgspec import structs

from tba.buffer.offline.recorded_run import RecordedRun, copy_batch, overlay
from tba.buffer.service.run_state import AsOf
from tba.buffer.service.service import BufferService
from tba.buffer.store.starts import OFFLINE, OfflineSource, record_of, recorded_source, refuse_other_runs
from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.common import run_files
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError, quantity
from tba.common.log import get_logger
from tba.common.system.process import software
from tba.common.wire import fields, messages
from tba.common.wire.codec import MAX_FRAME_BYTES, RequestHeader

log = get_logger(__name__)
M = TypeVar("M", bound=messages.Message)


def _as_first_started(config: Config, recorded: RecordedRun, *, replay: bool) -> RecordedRun:
    """Return the recorded run as the offline run in run.dir first saw it, even if it has continued since.

    Raises ConfigError if run.dir belongs to another run, or to an offline run of another source.
    """
    if config.database.resolve() == recorded.path.resolve():
        raise UsageError(f"{recorded.path} is this run's own database: set another run.dir for the offline run")
    if config.run.dir.resolve() == recorded.path.resolve().parent:
        raise UsageError(
            f"{recorded.path} is in run.dir, which a run writes to: set another run.dir for the offline run"
        )
    if replay and recorded.step == 0:
        raise UsageError(f"run {recorded.run_name} in {recorded.path} has no trained steps to replay")
    refuse_other_runs(config, str(recorded.path))
    source = recorded_source(config.database)
    if source is None:
        if any((config.run.dir / name).exists() for name in (run_files.METRICS, run_files.CHECKPOINTS)):
            raise ConfigError(f"{config.run.dir} holds a run that was not trained offline: set another run.dir")
        if replay:
            _refuse_compacted(recorded)
        return recorded
    # A replay may become longer: a recorded batch is the same whenever it is copied.
    as_of = source.as_of if replay or recorded.at_end else recorded.step
    if (recorded.run_uuid, replay, as_of) != (source.uuid, source.replay, source.as_of):
        what = "replays" if source.replay else f"trains as of step {source.as_of} from"
        raise UsageError(
            f"the offline run in {config.run.dir} {what} run {source.run} of {source.file}: pass the same options "
            "again, or set another run.dir"
        )
    return recorded if replay else replace(recorded, step=source.as_of, newest_trajectory=source.newest_trajectory)


def _refuse_compacted(recorded: RecordedRun) -> None:
    """Raise UsageError for a replay that compaction made impossible, instead of failing at the step in question."""
    if not recorded.compacted_steps:
        return
    first, last, count = recorded.compacted_steps[0], recorded.compacted_steps[-1], len(recorded.compacted_steps)
    which = f"step {first}" if count == 1 else f"{count} steps between {first} and {last}"
    way_out = f"--as-of {first} replays the steps before, " if first else ""
    raise UsageError(
        f"{which} of run {recorded.run_name} in {recorded.path} cannot be replayed, since `tba buffer prune --tokens` "
        f"dropped tokens of their batches: {way_out}an earlier backup has them all"
    )


def _copy_batch(store: Store, run: Run, recorded: RecordedRun, message: messages.SampleBatch) -> None:
    """Copy the batch of a step from the recorded run, for a replay. Raises ConfigError if it lacks that batch."""
    shape = copy_batch(store.database, run, message.step, recorded.run)
    if shape is None:
        raise ConfigError(f"{recorded.path} has no batch of step {message.step} to replay")
    if (message.prompts, message.samples) != shape:
        prompts, samples = shape
        raise ConfigError(
            f"step {message.step} was recorded with {prompts} x {samples} trajectories: a replay needs "
            f"train.prompts_per_step = {prompts} and train.samples_per_prompt = {samples}"
        )


class OfflineBuffer:
    """The buffer of an offline run, for clients in several threads. Raises as `_as_first_started`."""

    def __init__(
        self, config: Config, recorded: RecordedRun, *, replay: bool, origins: Mapping[str, str] | None = None
    ) -> None:
        self._recorded = recorded = _as_first_started(config, recorded, replay=replay)
        self._replay = replay
        self._lock = threading.Lock()
        self._store = Store(config.database, durability=config.buffer.durability)
        source = OfflineSource(
            file=str(recorded.path.resolve()),
            run=recorded.run_name,
            uuid=recorded.run_uuid,
            as_of=recorded.step,
            newest_trajectory=recorded.newest_trajectory,
            replay=replay,
        )
        settings = {**record_of(config), OFFLINE: asdict(source)}
        run = self._store.open_run(
            config.run.name, seed=config.run.seed, config=settings, software=software(), origins=origins
        )
        overlay(self._store.database, run, recorded.path, recorded.run, recorded.newest_trajectory)
        self._run = run
        self._service = BufferService(
            self._store,
            run,
            config,
            SystemClock(),
            as_of=AsOf(recorded.step, recorded.policy_steps),
            record_batch=functools.partial(_copy_batch, self._store, run, recorded) if replay else None,
        )
        if recorded.compacted and not replay:
            log.warning("compacted trajectories cannot be sampled", trajectories=recorded.compacted)
        file, count = str(recorded.path), self.sampleable_count
        log.info("offline", file=file, run=recorded.run_name, step=recorded.step, trajectories=count)

    @property
    def sampleable_count(self) -> int:
        """The number of trajectories that can be sampled."""
        return self._service.status().sampleable

    def client(self, role: fields.Role, name: str) -> "OfflineClient":
        """Return a client that stands in for a client of a server."""
        return OfflineClient(self, role, name)

    def handle(self, header: RequestHeader, message: messages.Message) -> tuple[messages.Message, list[bytes]]:
        """Return the reply to a request, durably. Raises Refused, or ConfigError if there is no such batch."""
        with self._lock:
            reply = self._service.handle_durably(header, message)
        # A parked request would wait indefinitely: no searcher adds data.
        if reply is None:
            raise ConfigError(f"{self._service.state.pace.waits_for}, and offline there will be no more")
        batch = reply.message
        if isinstance(batch, messages.Batch) and not self._replay:
            # Not sampled by the current weights: staleness 0 refers to the recorded trainer's weights.
            batch = structs.replace(batch, policy_version=[-1] * len(batch.policy_version))
        return batch, reply.frames

    def compare_losses(self) -> tuple[int, float]:
        """Return (number of steps with a loss in both runs, largest difference)."""
        ours = self._store.batches.losses(self._run)
        both = ours.keys() & self._recorded.losses.keys()
        return len(both), max((abs(ours[step] - self._recorded.losses[step]) for step in both), default=0.0)

    def close(self) -> None:
        """Close the files."""
        self._store.close()


class OfflineClient:
    """Asks an OfflineBuffer with the methods of `tba.common.wire.client.BufferClient`. Replies are immediate."""

    def __init__(self, buffer: OfflineBuffer, role: fields.Role, name: str) -> None:
        self._buffer = buffer
        self._role: fields.Role = role
        self._name = name
        self._ahead: dict[int, messages.Message] = {}

    def call(
        self,
        message: messages.Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,  # noqa: ARG002
        stop: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> tuple[M, list[memoryview]]:
        """Return the reply and its frames. Raises Refused."""
        header = RequestHeader(
            v=messages.PROTOCOL_VERSION, type=message.TYPE, id=0, run="", role=self._role, sender=self._name
        )
        reply, frames = self._buffer.handle(header, message)
        assert isinstance(reply, expect)
        assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
        return reply, [memoryview(frame) for frame in frames]

    def ask_ahead(self, message: messages.Message) -> int:
        """Keep the request until `collect`, so that it is handled as if it had been sent then."""
        self._ahead[id(message)] = message
        return id(message)

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Return the reply to a request of `ask_ahead`. Raises Refused."""
        return self.call(self._ahead.pop(id_), expect, stop=stop)

    def close(self) -> None:
        """Do nothing: the owner of the buffer closes it."""


def train_offline(
    config: Config,
    recorded: RecordedRun,
    run_trainer: Callable[..., None],
    *,
    replay: bool,
    origins: Mapping[str, str] | None,
) -> None:
    """Run a trainer on a recorded run; with `replay`, on its batches, and then print how far the losses differ.

    `run_trainer` takes `dial`, which connects it to the buffer. `origins` (what set each key) are recorded.
    """
    if replay and recorded.step < config.train.steps:
        steps = quantity(recorded.step, "trained step")
        typer.echo(f"{recorded.path} has {steps} to replay, of train.steps = {config.train.steps}")
    buffer = OfflineBuffer(config, recorded, replay=replay, origins=origins)
    try:
        run_trainer(dial=buffer.client)
        if replay:
            compared, difference = buffer.compare_losses()
            same = "bit for bit the same" if difference == 0.0 else f"largest difference {difference:.3g}"
            sentence = f"replayed {quantity(compared, 'step')}; losses: {same}"
            typer.echo(sentence if compared else "no step whose loss could be compared with the recorded one")
    finally:
        buffer.close()
