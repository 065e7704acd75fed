"""Time travel: the buffer of a recorded run as it was, for a trainer with no server and no searcher.

    the recorded run's file (read only) ──► index, tokens ──┐
    the offline run's own file ◄── batches, reports ────────┴──► the trainer, by the very messages of the server

Invariant: the recorded file is never written to. What the offline trainer does is recorded in a file of its own,
whose rows name trajectories of the recorded one.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tba.buffer.history import Choose, History
from tba.buffer.origin import Origin, earlier_origin, recorded_origin
from tba.buffer.reader import open_reader
from tba.buffer.run import software
from tba.buffer.service import WRITE_NOTHING, BufferService
from tba.buffer.store import Store
from tba.buffer.tables import past as past_tables
from tba.buffer.tables.runs import Run
from tba.common import wire
from tba.common.clock import SystemClock
from tba.common.codec import MAX_FRAME_BYTES, RequestHeader
from tba.common.config import Config
from tba.common.errors import ConfigError, StorageError, UsageError
from tba.common.log import get_logger

log = get_logger(__name__)
M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True, slots=True)
class Past:
    """A recorded run at a step of its history: what was there when the batch of that step was sampled."""

    path: Path
    run: int
    run_name: str
    run_uuid: str
    step: int
    at_end: bool  # the step was not asked for
    newest_trajectory: int
    policy_steps: dict[int, int]  # the optimiser step of each policy version
    losses: dict[int, float]  # of the steps before
    lost_steps: list[int]  # steps before whose batches have lost tokens to `tba buffer compact`
    lost: int  # trajectories that were there, and have lost theirs


_LOST_STEPS = """
SELECT DISTINCT c.step FROM trajectory_rows t JOIN consumption_rows c ON c.trajectory = t.id
WHERE t.run = ? AND t.compacted_at IS NOT NULL AND c.run = t.run AND c.step < ? ORDER BY c.step
"""
_LOST = """
SELECT COUNT(*) FROM trajectory_rows WHERE run = ? AND id <= ? AND error IS NULL AND compacted_at IS NOT NULL
"""


def read_past(path: Path, *, run: str | None, as_of: int | None) -> Past:
    """Read what is needed of a recorded run. `run` may be None if the file holds one, `as_of` for its end.

    Raises UsageError for a file, a run or a step that is not there, ConfigError for a file that is not a buffer
    database of this release.
    """
    try:
        return _read_past(path, run=run, as_of=as_of)
    except StorageError as error:
        raise ConfigError(str(error)) from error


def _read_past(path: Path, *, run: str | None, as_of: int | None) -> Past:
    with open_reader(path) as connection:
        rows = connection.execute("SELECT name, id, uuid FROM runs ORDER BY id").fetchall()
        runs = {name: id_ for name, id_, _ in rows}
        name = _choose_run(path, list(runs), run)
        uuid = next(uuid for known, _, uuid in rows if known == name)
        losses = dict(
            connection.execute(
                "SELECT step, json_extract(metrics, '$.loss') FROM batches WHERE run = ? AND trained_at IS NOT NULL",
                (runs[name],),
            )
        )
        step = max(losses, default=-1) + 1 if as_of is None else as_of
        newest = _newest_trajectory(connection.execute, runs[name], step, path, at_end=as_of is None)
        versions = connection.execute("SELECT version, step FROM snapshots WHERE run = ?", (runs[name],)).fetchall()
        lost_steps = [row[0] for row in connection.execute(_LOST_STEPS, (runs[name], step))]
        lost = connection.execute(_LOST, (runs[name], newest)).fetchone()[0]
    if newest == 0:
        _refuse_record(path)
        raise UsageError(f"{path} holds no trajectories of run {name}, or none before step {step}")
    return Past(
        path=path,
        run=runs[name],
        run_name=name,
        run_uuid=uuid,
        step=step,
        at_end=as_of is None,
        newest_trajectory=newest,
        policy_steps=dict(versions),
        losses={trained: loss for trained, loss in losses.items() if trained < step and loss is not None},
        lost_steps=lost_steps,
        lost=lost,
    )


def _refuse_record(path: Path) -> None:
    found = recorded_origin(path)
    if found is not None and found[1] is not None:
        raise UsageError(f"{path} is the record of a run that was trained offline from {found[1].file}: name that file")


def _choose_run(path: Path, names: list[str], wanted: str | None) -> str:
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        known = ", ".join(names) or "none"
        raise UsageError(f"{path} holds the runs {known}: choose one with --source-run")
    return wanted


def _newest_trajectory(execute: Callable[..., "object"], run: int, step: int, path: Path, *, at_end: bool) -> int:
    def one(query: str, *values: object) -> tuple[int | None, ...] | None:
        row: tuple[int | None, ...] | None = execute(query, values).fetchone()  # type: ignore[attr-defined]
        return row

    if at_end:
        query = "SELECT MAX(id) FROM trajectory_rows WHERE run = ?"
        return (one(query, run) or (0,))[0] or 0
    batch = one("SELECT newest_trajectory, handed_out_at FROM batches WHERE run = ? AND step = ?", run, step)
    if batch is None:
        steps = (one("SELECT COUNT(*) FROM batches WHERE run = ?", run) or (0,))[0]
        raise UsageError(f"{path} has no batch of step {step}: --as-of can be 0 to {(steps or 0) - 1}")
    if batch[0] is not None:
        return batch[0]
    # Written before batches remembered it.
    query = "SELECT MAX(id) FROM trajectory_rows WHERE run = ? AND received_at <= ?"
    return (one(query, run, batch[1]) or (0,))[0] or 0


def _as_it_began(config: Config, past: Past, *, replay: bool) -> Past:
    """The past that the run in run.dir trains from, also if the recorded run has gone on since.

    Raises UsageError if run.dir is of another run, or of an offline run that began with something else.
    """
    if config.database.resolve() == past.path.resolve():
        raise UsageError(f"{past.path} is this run's own database: set another run.dir for the offline run")
    if config.run.dir.resolve() == past.path.resolve().parent:
        raise UsageError(f"{past.path} is in run.dir, which a run writes to: set another run.dir for the offline run")
    if replay and past.step == 0:
        raise UsageError(f"run {past.run_name} in {past.path} has no trained steps to replay")
    origin = earlier_origin(config)
    if origin is None:
        if replay:
            _refuse_compacted(past)
        return past
    # A replay may become longer: its batches are the recorded ones whenever they are copied.
    as_of = origin.as_of if replay or past.at_end else past.step
    if (past.run_uuid, replay, as_of) != (origin.uuid, origin.replay, origin.as_of):
        what = "replays" if origin.replay else f"trains as of step {origin.as_of} from"
        raise UsageError(
            f"the offline run in {config.run.dir} {what} run {origin.run} of {origin.file}: say the same again, or "
            "set another run.dir"
        )
    return past if replay else replace(past, step=origin.as_of, newest_trajectory=origin.newest_trajectory)


def _refuse_compacted(past: Past) -> None:
    """A replay makes every step: one that it cannot make is better known before the first. Raises UsageError."""
    if not past.lost_steps:
        return
    first, last, count = past.lost_steps[0], past.lost_steps[-1], len(past.lost_steps)
    which = f"step {first}" if count == 1 else f"{count} steps between {first} and {last}"
    way_out = f"--as-of {first} replays those before, " if first else ""
    raise UsageError(
        f"{which} of run {past.run_name} in {past.path} cannot be replayed, since `tba buffer compact` dropped tokens "
        f"of their batches: {way_out}a backup from before has them all"
    )


class PastHistory(History):
    """The history of a recorded run. Nothing is old or new but as it was then, and nothing is added.

    A replay takes the recorded run's own batches, from the database that `past_tables.overlay` has attached.
    """

    grows = False

    def __init__(self, store: Store, run: Run, past: Past, *, replay: bool) -> None:
        self._store = store
        self._run = run
        self._past = past
        self._replay = replay

    def step(self, _: int) -> int:
        """The step of the past that it is."""
        return self._past.step

    def policy_steps(self, _: Mapping[int, wire.WeightsRef]) -> dict[int, int]:
        """Those of the recorded run."""
        return self._past.policy_steps

    def batch(self, message: wire.SampleBatch, choose: Choose) -> None:
        """Record a batch. Raises ConfigError if there is none."""
        if self._replay:
            self._repeat(message)
        elif shortage := choose(message):  # nobody will add to it: waiting would not help
            raise ConfigError(f"{shortage.reason}, and offline there will be no more")

    def _repeat(self, message: wire.SampleBatch) -> None:
        recorded = past_tables.copy_batch(self._store.database, self._run, message.step, self._past.run)
        if recorded is None:
            raise ConfigError(f"{self._past.path} has no batch of step {message.step} to replay")
        prompts, samples = recorded
        if (message.prompts, message.samples) != recorded:
            raise ConfigError(
                f"step {message.step} was recorded with {prompts} x {samples} trajectories: a replay needs "
                f"train.prompts_per_step = {prompts} and train.samples_per_prompt = {samples}"
            )


def _nobodys(batch: wire.Batch) -> wire.Batch:
    """Data of staleness 0 came from the recorded trainer's weights, not from those that train now."""
    return batch.model_copy(update={"plain_sampling": [False] * len(batch.plain_sampling)})


class OfflineBuffer:
    """The buffer of an offline run. Clients of it may be used by several threads.

    Raises UsageError if run.dir is not that of a new offline run, or of one that began with the same.
    """

    def __init__(self, config: Config, past: Past, *, replay: bool) -> None:
        past = _as_it_began(config, past, replay=replay)
        self._past = past
        self._replay = replay
        self._lock = threading.Lock()
        self._store = Store(config.database, durability=config.buffer.durability)
        origin = Origin(
            file=str(past.path.resolve()),
            run=past.run_name,
            uuid=past.run_uuid,
            as_of=past.step,
            newest_trajectory=past.newest_trajectory,
            replay=replay,
        )
        settings = origin.into(config.model_dump(mode="json"))
        run = self._store.open_run(config.run.name, seed=config.run.seed, config=settings, software=software())
        past_tables.overlay(self._store.database, run, past.path, past.run, past.newest_trajectory)
        self._run = run
        history = PastHistory(self._store, run, past, replay=replay)
        self._service = BufferService(self._store, run, config, SystemClock(), history)
        if past.lost and not replay:
            log.warning("compacted trajectories cannot be sampled", trajectories=past.lost)
        log.info("offline", file=str(past.path), run=past.run_name, step=past.step, trajectories=self.sampleable)

    @property
    def sampleable(self) -> int:
        """Trajectories that can be sampled."""
        return self._service.status().sampleable

    def client(self, role: wire.Role, name: str) -> "OfflineClient":
        """A stand-in for the client of a server."""
        return OfflineClient(self, role, name)

    def handle(self, header: RequestHeader, message: wire.Message) -> tuple[wire.Message, list[bytes]]:
        """Answer a request, durably. Raises Refused, ConfigError if there is no such batch."""
        with self._lock:
            self._service.hear(header)
            if isinstance(message, WRITE_NOTHING):
                answer = self._service.handle(header, message)
            else:
                with self._store.transaction():
                    answer = self._service.handle(header, message)
                self._store.log.sync()
                self._store.log.copy(unless_short=True)
        assert answer is not None, "nothing waits offline"
        if isinstance(answer.message, wire.Batch) and not self._replay:
            return _nobodys(answer.message), answer.frames
        return answer.message, answer.frames

    def compare_losses(self) -> tuple[int, float]:
        """(steps whose loss both runs have recorded, the largest difference)."""
        ours = self._store.batches.losses(self._run)
        both = ours.keys() & self._past.losses.keys()
        return len(both), max((abs(ours[step] - self._past.losses[step]) for step in both), default=0.0)

    def close(self) -> None:
        """Close the files."""
        self._store.close()


class OfflineClient:
    """Asks an OfflineBuffer as `tba.common.client.BufferClient` asks a server."""

    def __init__(self, buffer: OfflineBuffer, role: wire.Role, name: str) -> None:
        self._buffer = buffer
        self._role: wire.Role = role
        self._name = name
        self._ahead: dict[int, wire.Message] = {}

    def call(
        self,
        message: wire.Message,
        expect: type[M],
        *,
        deadline_seconds: float | None = None,  # noqa: ARG002  # the answer is there at once
        stop: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> tuple[M, list[memoryview]]:
        """Ask. Raises Refused."""
        header = RequestHeader(
            v=wire.PROTOCOL_VERSION, type=message.TYPE, id=0, run="", role=self._role, sender=self._name
        )
        answer, frames = self._buffer.handle(header, message)
        assert isinstance(answer, expect)
        assert all(len(frame) <= MAX_FRAME_BYTES for frame in frames)
        return answer, [memoryview(frame) for frame in frames]

    def ask(self, message: wire.Message, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Ask. Raises Refused."""
        return self.call(message, expect, stop=stop)

    def ask_ahead(self, message: wire.Message) -> int:
        """The answer takes no time: the buffer is asked when it is collected, as if nothing had been asked ahead."""
        self._ahead[id(message)] = message
        return id(message)

    def collect(self, id_: int, expect: type[M], stop: Callable[[], bool]) -> tuple[M, list[memoryview]]:
        """Ask now. Raises Refused."""
        return self.ask(self._ahead.pop(id_), expect, stop)

    def close(self) -> None:
        """Nothing to do: the buffer is closed by its owner."""
