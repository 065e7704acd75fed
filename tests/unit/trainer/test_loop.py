"""The trainer with a real buffer: complete runs, killed and resumed runs, and an unavailable buffer."""

import itertools
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tba.buffer.offline.offline_buffer import OfflineBuffer, read_recorded_run
from tba.buffer.tools.backup import backup
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, ConfigError, TrainingBroken, UsageError
from tba.common.weights import snapshot
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import ClientStatus, GetStatus, Status
from tba.tests.conftest import ROOT
from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.trainer import FakeSearcher, run_with_buffer
from tba.tests.helpers.weights import verify
from tba.trainer import checkpoint
from tba.trainer.distributed import Ranks
from tba.trainer.loop import Trainer, train
from tba.trainer.metrics.stopwatch import PHASES
from tba.trainer.model.host_buffers import HostCopy
from tba.trainer.publishing.snapshot_writer import SnapshotWriter

STEPS = 6
_TIMES = {"time", "seconds_step", "tokens_per_second", *(f"seconds_{phase}" for phase in PHASES)}


class Run:
    """A run directory with a model, a buffer and trajectories for all steps."""

    def __init__(self, root: Path, **train_keys: Any) -> None:
        train = {"steps": STEPS, "micro_batch_tokens": 30} | train_keys
        self.config, self.buffer = run_with_buffer(root, train=train)

    @contextmanager
    def fed(self, broken: Sequence[str] = ()) -> Iterator[None]:
        """Put trajectories once the first weights are announced; those of `broken` prompts overflow the loss."""

        def feed() -> None:
            with closing(FakeSearcher(self.buffer.address, prompts=4)) as searcher:
                searcher.wait_for_weights()
                searcher.put_groups(8, broken=broken)

        thread = threading.Thread(target=feed)
        thread.start()
        yield
        thread.join()

    def train(self, *, resume: bool = False, stop: Callable[[], bool] = lambda: False) -> None:
        """Run the trainer in this thread."""
        train(self.config, resume=resume, device="cpu", stop=stop)

    def query(self, sql: str) -> list[Any]:
        """Return the first column of a query on the buffer's database."""
        with closing(sqlite3.connect(self.config.database)) as connection, connection:
            return [row[0] for row in connection.execute(sql)]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without values that depend on the clock."""
        lines = (self.config.run.dir / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in _TIMES} for line in lines]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    # A restarted buffer would wait for the trainer that the test has ended.
    monkeypatch.setattr("tba.buffer.service.clients._RETURN_SECONDS", 0.0)
    made: list[Run] = []

    def make(name: str = "a", **train_keys: Any) -> Run:
        made.append(Run(tmp_path / name, **train_keys))
        return made[-1]

    yield make
    for run in made:
        run.buffer.stop()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run, to compare others with."""
    run = Run(tmp_path_factory.mktemp("straight"))
    finish(run)
    run.buffer.stop()
    return run


def finish(run: Run) -> Run:
    """Feed and train a run to its end."""
    with run.fed():
        run.train()
    return run


@pytest.mark.slow
def test_a_run_makes_all_steps_and_is_declared_finished(make_run, monkeypatch):
    # No second one in time: the status of the finished run is the trainer's last word.
    monkeypatch.setattr("tba.trainer.buffer_link._PAUSE_SECONDS", 60.0)
    run = finish(make_run())
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    searcher = FakeSearcher(run.buffer.address, prompts=4)
    state = not_none(searcher.client.state)
    assert state.finished
    assert state.step == STEPS
    # Its place in memory is cleared.
    newest = not_none(state.weights)
    kept = verify(replace(newest, path=str(run.config.snapshots / "v00000003")))
    assert (newest.version, kept.manifest.step) == (3, STEPS)
    searcher.close()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")
    assert [client.weights_version for client in clients(monitor) if client.role == "trainer"] == [newest.version]
    monitor.close()


def published(run: Run) -> list[tuple[int, int]]:
    """Return (version, step) of the snapshots on disk."""
    paths = snapshot.list_snapshots(run.config.snapshots)
    return [(m.version, m.step) for m in (snapshot.read(path).manifest for path in paths)]


def clients(monitor: BufferClient) -> list[ClientStatus]:
    return monitor.call(GetStatus(), Status, deadline_seconds=60)[0].clients


@pytest.mark.slow
def test_the_heartbeat_reports_that_publishing_waits_and_why(make_run, monkeypatch):
    run = make_run()
    trainer = Trainer(run.config, None, torch.device("cpu"), lambda: False)
    trainer.connect()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")

    def reported() -> list[tuple[str, str]]:
        return [(client.activity, client.reason) for client in clients(monitor) if client.role == "trainer"]

    def wait_for_the_report(_step: int) -> int:
        wait_until(lambda: reported() == [("publishing", "no space")])
        return 0

    not_none(trainer._publisher).reason = "no space"
    monkeypatch.setattr(trainer._publisher, "publish", wait_for_the_report)
    trainer.publish()
    trainer.close()
    monitor.close()


@pytest.mark.slow
def test_the_last_weights_are_published_although_none_are_due_and_the_last_checkpoint_does_not_wait_for_them(
    make_run, monkeypatch
):
    run, attempts, has_room = make_run(publish_every=4), itertools.count(1), threading.Event()
    copy, no_room = SnapshotWriter.copy, "2 GiB are free"

    def copy_if_there_is_room(writer: SnapshotWriter, ranks: Ranks) -> HostCopy | None:
        return copy(writer, ranks) if next(attempts) < 3 or has_room.is_set() else None

    monkeypatch.setattr(SnapshotWriter, "copy", copy_if_there_is_room)
    monkeypatch.setattr(SnapshotWriter, "no_room", no_room)
    trainer = threading.Thread(target=finish, args=(run,))
    trainer.start()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")
    reason = f"the weights of step {STEPS} wait for memory: {no_room}"
    wait_until(lambda: reason in [client.reason for client in clients(monitor)])
    assert not_none(checkpoint.newest(run.config.checkpoints)).step == STEPS
    has_room.set()
    trainer.join(60)
    monitor.close()
    # That of step 4 is not kept on disk.
    assert published(run) == [(0, 0), (2, STEPS)]


class Killed(BaseException):
    """Ends the trainer without any clean-up, as SIGKILL does."""


def killed_at(run: Run, step: int) -> Callable[[], bool]:
    """Return a `stop` that kills the trainer once this number of steps is recorded."""
    at = stopped_at(run, step)

    def stop() -> bool:
        if at():
            raise Killed
        return False

    return stop


def stopped_at(run: Run, step: int) -> Callable[[], bool]:
    """Return a `stop` that is true once this number of steps is recorded."""
    return lambda: (run.config.run.dir / "metrics.jsonl").exists() and len(run.metrics()) >= step


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.config.checkpoints / f"step_{STEPS:08d}" / "model.safetensors")


def same_weights(a: Run, b: Run) -> bool:
    left, right = final_weights(a), final_weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def without_reference_counts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the number of computed reference values: a repeated step finds them stored."""
    return [{k: v for k, v in line.items() if k != "reference_computed"} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3])
def test_a_run_killed_between_update_and_report_and_its_replay_equal_an_uninterrupted_one(
    make_run, straight, monkeypatch, tmp_path, step
):
    killed = make_run("killed")
    with killed.fed(), monkeypatch.context() as patch:
        patch.setattr(BufferClient, "call", kill_on_report_of(step))
        with pytest.raises(Killed):
            killed.train()
    assert len(killed.metrics()) == step + 1
    killed.train(resume=True)
    assert without_reference_counts(killed.metrics()) == without_reference_counts(straight.metrics())
    assert same_weights(killed, straight)
    assert replayed(killed, tmp_path / "replay") == (STEPS, 0.0)


def kill_on_report_of(step: int) -> Callable[..., Any]:
    """Return a `BufferClient.call` with which the trainer dies before it reports a step."""
    call = BufferClient.call

    def call_or_die(self: BufferClient, message: messages.Message, expect: Any, **options: Any) -> Any:
        if isinstance(message, messages.ReportStep) and message.step == step:
            raise Killed
        return call(self, message, expect, **options)

    return call_or_die


@pytest.mark.slow
def test_a_stopped_run_saves_a_checkpoint_resumes_from_it_and_publishes_what_it_restored(make_run, straight):
    stopped = make_run("stopped")
    with stopped.fed():
        stopped.train(stop=stopped_at(stopped, 3))
    assert not_none(checkpoint.newest(stopped.config.checkpoints)).step == 3
    stopped.train(resume=True)
    assert stopped.metrics() == straight.metrics()
    assert same_weights(stopped, straight)
    # Version 1 was the newest when the trainer stopped, 4 is the last; 2 and 3 were not to be kept.
    assert published(stopped) == [(0, 0), (1, 2), (4, 6)]


def started(run: Run) -> tuple[threading.Event, Trainer]:
    """Return the event that stops a trainer, and the trainer, with its first snapshot and all data."""
    stop = threading.Event()
    trainer = Trainer(run.config, None, torch.device("cpu"), stop.is_set)
    trainer.connect()
    with run.fed():
        trainer.publish()
    return stop, trainer


@pytest.mark.slow
def test_an_unreported_step_is_reported_after_the_resume(make_run):
    run = make_run(publish_every=6)
    stop, trainer = started(run)
    batch = not_none(trainer.sample())
    stop_while_the_buffer_is_away(run, trainer, batch, stop)
    run.train(resume=True)
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert all(run.query("SELECT trained_at IS NOT NULL FROM batches"))
    references = run.query("SELECT COUNT(*) FROM consumption_rows LEFT JOIN reference_logprobs USING (trajectory) "
                           "WHERE reference_logprobs.logprob IS NULL")  # fmt: skip
    assert references == [0]
    assert run.query("SELECT COUNT(*) FROM consumption_rows WHERE token_log_ratios IS NULL") == [0]


def stop_while_the_buffer_is_away(run: Run, trainer: Trainer, batch, stop: threading.Event) -> None:
    """Make and save an update whose report does not reach the buffer; then start the buffer again."""
    run.buffer.stop()
    stop.set()
    with pytest.raises(BufferUnavailable):
        trainer.learn(batch)
    trainer.save()
    trainer.close()
    run.buffer.start()


def restore(run: Run, copy: Path) -> None:
    """Restore a copy of the database, as docs/storage.md describes."""
    run.buffer.stop()
    for left in ("-wal", "-shm"):
        run.config.database.with_name(run.config.database.name + left).unlink(missing_ok=True)
    copy.replace(run.config.database)
    run.buffer.start()


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [True, False], ids=["resume", "live"])
def test_training_continues_if_a_restored_database_does_not_know_a_step(make_run, tmp_path, caplog, resumes):
    run = make_run(publish_every=2)
    stop, trainer = started(run)
    trainer.learn(not_none(trainer.sample()))
    copy = tmp_path / "older.sqlite"
    backup(run.config.database, copy, force=True, progress=lambda *_: None)
    batch = not_none(trainer.sample())
    # The checkpoint keeps the report.
    if resumes:
        stop_while_the_buffer_is_away(run, trainer, batch, stop)
        restore(run, copy)
        run.train(resume=True)
    else:
        restore(run, copy)
        trainer.learn(batch)
        while trainer.learner.steps_done < STEPS:
            trainer.learn(not_none(trainer.sample()))
        trainer.close()
    assert "does not know this step" in caplog.text
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert run.query("SELECT step FROM batches WHERE trained_at IS NOT NULL") == [0, *range(2, STEPS)]


@pytest.mark.slow
def test_a_trainer_without_data_reports_what_it_waits_for_and_can_be_stopped(make_run):
    run = make_run()
    stop = threading.Event()
    trainer = threading.Thread(target=run.train, kwargs={"stop": stop.is_set})
    trainer.start()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")
    waiting: list[ClientStatus] = []
    wait_until(lambda: waiting.extend(one for one in clients(monitor) if one.activity == "waiting") or waiting)
    assert [client.role for client in waiting] == ["trainer"]
    assert "0 of 2 prompts have trajectories" in waiting[0].reason
    stop.set()
    trainer.join(60)
    monitor.close()
    assert not trainer.is_alive()
    assert not list(run.config.checkpoints.glob("*"))


@pytest.mark.slow
def test_a_finished_run_is_resumed_to_no_effect_and_by_the_trainer_of_another_run_not_at_all(make_run):
    run = make_run()
    with run.fed():
        # Without a checkpoint it starts at the first step.
        run.train(resume=True)
    with pytest.raises(UsageError, match="pass --resume"):
        run.train()
    run.train(resume=True)
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    known = run.query("SELECT COUNT(*) FROM clients WHERE role = 'trainer'")
    sections = run.config.model_dump()
    sections["run"] |= {"name": "other", "dir": run.config.run.dir.with_name("other")}
    before, run.config = run.config, Config.model_validate(sections)
    with pytest.raises(ConfigError, match="belongs to run test, and run.name is other"):
        run.train()
    run.config = before
    assert run.query("SELECT COUNT(*) FROM clients WHERE role = 'trainer'") == known
    with closing(BufferClient(run.buffer.address, role="monitor", name="m")) as monitor:
        status, _ = monitor.call(GetStatus(), Status, deadline_seconds=60)
    assert {client.activity for client in status.clients if client.role == "trainer"} == {"gone"}
    assert status.finished


def replayed(run: Run, directory: Path) -> tuple[int, float]:
    """Replay a run while its server still runs. Returns (steps compared, largest difference of the losses)."""
    sections = run.config.model_dump()
    sections["run"]["dir"] = directory
    config = Config.model_validate(sections)
    past = read_recorded_run(run.config.database, run=None, as_of=None)
    buffer = OfflineBuffer(config, past, replay=True)
    try:
        train(config, resume=False, device="cpu", stop=lambda: False, dial=buffer.client, last_step=past.step)
        return buffer.compare_losses()
    finally:
        buffer.close()


# With this beta only the squared residual of a reward near 1e9 overflows float64.
OVERFLOWING = {"beta": 1e-150, "beta_final": 1e-150}


@pytest.mark.slow
def test_a_run_with_skipped_steps_can_be_killed_resumed_and_replayed(make_run, tmp_path):
    straight, killed = (make_run(name, **OVERFLOWING) for name in ("straight", "killed"))
    for run in (straight, killed):
        with run.fed(broken=["p0"]):
            if run is killed:
                with pytest.raises(Killed):
                    run.train(stop=killed_at(run, 4))
            run.train(resume=run is killed)
    lines = straight.metrics()
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert skipped == straight.query("SELECT DISTINCT step FROM consumption WHERE reward > 1000 ORDER BY step")
    assert 0 < len(skipped) < STEPS
    assert [line["step"] for line in lines if "loss" not in line] == skipped
    assert without_reference_counts(killed.metrics()) == without_reference_counts(lines)
    assert same_weights(killed, straight)
    assert replayed(killed, tmp_path / "replay") == (STEPS - len(skipped), 0.0)


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_checkpoint_after_them(make_run):
    run = make_run(**OVERFLOWING)
    broken = pytest.raises(TrainingBroken, match=r"5 steps in a row were skipped, the last is step 4: loss inf")
    with run.fed(broken=["p0", "p1", "p2", "p3"]), broken:
        run.train()
    assert not_none(checkpoint.newest(run.config.checkpoints)).step == 5
    assert [len(line["skipped_trajectories"]) for line in run.metrics()] == [6] * 5
    # The next start counts from zero, and has fewer steps left.
    run.train(resume=True)
    assert [len(line["skipped_trajectories"]) for line in run.metrics()] == [6] * STEPS


@pytest.mark.slow
def test_the_seconds_of_all_phases_sum_to_those_of_the_step(straight):
    lines = [json.loads(line) for line in (straight.config.run.dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert sum(line[f"seconds_{phase}"] for phase in PHASES) == pytest.approx(line["seconds_step"], rel=1e-9)
    assert any(line["seconds_publish"] for line in lines)


def documented_metrics() -> set[str]:
    """The names in docs/metrics.md; `_std` after `log_ratio_mean` stands for `log_ratio_std`."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`\w+`.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE):
        first, *others = re.findall(r"`(\w+)`", row)
        stems = [first[: cut.start()] for cut in re.finditer("_", first)]
        names |= {first} | {stem + other for stem in stems for other in others} | set(others)
    return names


@pytest.mark.slow
def test_every_metric_of_a_step_is_documented(straight):
    metrics = {name for line in straight.metrics() for name in line} - {"step"}
    undocumented = {
        name for name in metrics - documented_metrics() if not re.match("staleness_share_|reward_part_", name)
    }
    assert "loss" in metrics
    assert not undocumented
