"""The trainer against a real buffer: a run to its end, a run that is killed, a run whose buffer goes away."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tba.buffer.backup import backup
from tba.buffer.offline import OfflineBuffer, read_past
from tba.common import snapshot, wire
from tba.common.client import BufferClient
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, ConfigError, MemoryShort, TrainingBroken, UsageError
from tba.trainer import checkpoint
from tba.trainer.batch import TrainBatch
from tba.trainer.connection import Connection
from tba.trainer.loop import Trainer, train
from tba.trainer.step import Learner, StepResult
from tba.trainer.stopwatch import PHASES

from .tb_lab import BufferThread, FakeSearcher, save_tiny_model

STEPS = 6
_TIMES = {"time", "seconds_step", "tokens_per_second", *(f"seconds_{phase}" for phase in PHASES)}


class Run:
    """A run directory with a model, a buffer and trajectories for all steps."""

    def __init__(self, root: Path, **train_keys: Any) -> None:
        model = save_tiny_model(root / "model")
        keys = {
            "steps": STEPS,
            "prompts_per_step": 2,
            "samples_per_prompt": 3,
            "learning_rate": 0.01,
            "warmup_steps": 0,
            "decay_steps": 2,
            "publish_every": 2,
            "checkpoint_every": 3,
            "micro_batch_tokens": 30,
        }
        sections = {
            "run": {"dir": str(root / "run"), "name": "test"},
            "model": {"path": str(model), "dtype": "float32"},
            "train": {**keys, **train_keys},
        }
        self.buffer = BufferThread(Config.model_validate(sections))
        sections["buffer"] = {"address": self.buffer.address}
        self.config = Config.model_validate(sections)

    def feed(self, broken: Sequence[str] = ()) -> threading.Thread:
        """Put trajectories as soon as the first weights are announced; those of `broken` prompts overflow the loss."""
        thread = threading.Thread(target=self._feed, args=(broken,))
        thread.start()
        return thread

    def _feed(self, broken: Sequence[str]) -> None:
        searcher = FakeSearcher(self.buffer.address, prompts=4)
        searcher.wait_for_weights()
        searcher.put_groups(8, broken=broken)
        searcher.close()

    def train(self, *, resume: bool = False, stop: Callable[[], bool] = lambda: False) -> None:
        """Run the trainer in this thread."""
        train(self.config, resume=resume, device="cpu", stop=stop)

    def query(self, sql: str) -> list[Any]:
        """The first column of a query on the buffer's database."""
        with sqlite3.connect(self.config.database) as connection:
            return [row[0] for row in connection.execute(sql)]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without what depends on the clock."""
        lines = (self.config.run.dir / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in _TIMES} for line in lines]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    # A buffer that a test has started again need not wait for a trainer that the test has ended.
    monkeypatch.setattr("tba.buffer.clients._RETURN_SECONDS", 0.0)
    made: list[Run] = []

    def make(name: str = "a", **train_keys: Any) -> Run:
        made.append(Run(tmp_path / name, **train_keys))
        return made[-1]

    yield make
    for run in made:
        run.buffer.stop()


def test_a_run_trains_all_its_steps_and_says_that_it_is_finished(make_run):
    run = make_run()
    feeder = run.feed()
    run.train()
    feeder.join()
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    searcher = FakeSearcher(run.buffer.address, prompts=4)
    assert searcher.client.state.finished
    assert searcher.client.state.step == STEPS
    newest = snapshot.verify(searcher.client.state.weights)
    assert (newest.manifest.version, newest.manifest.step) == (3, STEPS)
    searcher.close()


def published(run: Run) -> list[tuple[int, int]]:
    """(version, step) of the snapshots on disk."""
    paths = snapshot.list_snapshots(run.config.snapshots)
    return [(m.version, m.step) for m in (snapshot.read(path).manifest for path in paths)]


def test_the_last_weights_are_published_also_between_two_turns(make_run):
    run = make_run(publish_every=4)
    feeder = run.feed()
    run.train()
    feeder.join()
    assert published(run) == [(0, 0), (1, 4), (2, STEPS)]


def test_a_trainer_that_waits_for_the_snapshot_before_is_heard_to_publish(make_run, monkeypatch):
    run = make_run()
    trainer = Trainer(run.config, None, torch.device("cpu"), lambda: False)
    trainer.connect()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")
    heard = []

    def wait_to_be_heard(_step: int) -> int:
        for _ in range(100):
            status, _ = monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
            heard[:] = [(client.activity, client.reason) for client in status.clients if client.role == "trainer"]
            if heard == [("publishing", "no space")]:
                break
            monitor.poll(0.1)
        return 0

    trainer._publisher.trouble = "no space"
    monkeypatch.setattr(trainer._publisher, "publish", wait_to_be_heard)
    trainer.publish()
    trainer.close()
    monitor.close()
    assert heard == [("publishing", "no space")]


class Killed(BaseException):
    """Ends the trainer without giving it a chance, like SIGKILL does."""


def killed_at(run: Run, step: int) -> Callable[[], bool]:
    """A `stop` that kills once so many steps are on record."""
    at = stopped_at(run, step)

    def stop() -> bool:
        if at():
            raise Killed
        return False

    return stop


def stopped_at(run: Run, step: int) -> Callable[[], bool]:
    """A `stop` that is true once so many steps are on record."""
    return lambda: (run.config.run.dir / "metrics.jsonl").exists() and len(run.metrics()) >= step


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.config.checkpoints / f"step_{STEPS:08d}" / "model.safetensors")


def same_weights(a: Run, b: Run) -> bool:
    left, right = final_weights(a), final_weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def finished_run(make_run: Callable[..., Run], name: str = "straight", **train_keys: Any) -> Run:
    run = make_run(name, **train_keys)
    feeder = run.feed()
    run.train()
    feeder.join()
    return run


def without_reference_counts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A repeated step finds the reference stored that it had computed at first."""
    return [{k: v for k, v in line.items() if k != "reference_computed"} for line in lines]


def test_a_run_with_packed_rows_is_the_padded_run_as_far_as_float32_goes(make_run):
    padded, packed = (finished_run(make_run, packing, packing=packing) for packing in ("padded", "packed"))
    assert published(packed) == published(padded)
    for mine, theirs in zip(packed.metrics(), padded.metrics(), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("step", [1, 2, 4, 5])
def test_a_killed_and_resumed_run_is_the_uninterrupted_run_bit_for_bit(make_run, step):
    straight, killed = finished_run(make_run), make_run("killed")
    feeder = killed.feed()
    with pytest.raises(Killed):
        killed.train(stop=killed_at(killed, step))
    feeder.join()
    assert killed.query("SELECT COUNT(*) FROM batches WHERE trained_at IS NOT NULL") == [step]
    killed.train(resume=True)
    assert without_reference_counts(killed.metrics()) == without_reference_counts(straight.metrics())
    assert same_weights(killed, straight)


@pytest.mark.parametrize("step", [0, 3, 4])
def test_so_it_is_after_a_kill_between_an_update_and_its_report(make_run, monkeypatch, step):
    straight, killed = finished_run(make_run), make_run("killed")
    feeder = killed.feed()
    monkeypatch.setattr(Connection, "ask", kill_on_report_of(step))
    with pytest.raises(Killed):
        killed.train()
    monkeypatch.undo()
    feeder.join()
    assert len(killed.metrics()) == step + 1
    killed.train(resume=True)
    assert without_reference_counts(killed.metrics()) == without_reference_counts(straight.metrics())
    assert same_weights(killed, straight)


def kill_on_report_of(step: int) -> Callable[..., Any]:
    """`Connection.ask`, but the trainer dies before it reports a step."""
    ask = Connection.ask

    def ask_or_die(self: Connection, message: wire.Message, expect: Any) -> Any:
        if isinstance(message, wire.ReportStep) and message.step == step:
            raise Killed
        return ask(self, message, expect)

    return ask_or_die


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_stopped_run_saves_where_it_is_and_goes_on_from_there(make_run, step):
    straight, stopped = finished_run(make_run), make_run("stopped")
    feeder = stopped.feed()
    stopped.train(stop=stopped_at(stopped, step))
    assert checkpoint.newest(stopped.config.checkpoints).step == step
    stopped.train(resume=True)
    feeder.join()
    assert stopped.metrics() == straight.metrics()
    assert same_weights(stopped, straight)


def test_a_resume_publishes_what_it_resumed_as_a_new_version(make_run):
    run = make_run()
    feeder = run.feed()
    run.train(stop=stopped_at(run, 3))
    run.train(resume=True)
    feeder.join()
    assert published(run) == [(0, 0), (1, 2), (2, 3), (3, 4), (4, 6)]


def test_a_step_that_could_not_be_reported_is_reported_after_the_resume(make_run):
    run = make_run(publish_every=6)
    feeder = run.feed()
    stop = threading.Event()
    trainer = Trainer(run.config, None, torch.device("cpu"), stop.is_set)
    trainer.connect()
    trainer.publish()
    batch = trainer.sample()
    feeder.join()
    stop_while_the_buffer_is_away(run, trainer, batch, stop)
    run.train(resume=True)
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert all(run.query("SELECT trained_at IS NOT NULL FROM batches"))
    references = run.query("SELECT COUNT(*) FROM consumption_rows LEFT JOIN reference_logprobs USING (trajectory) "
                           "WHERE logprob IS NULL")  # fmt: skip
    assert references == [0]


def stop_while_the_buffer_is_away(run: Run, trainer: Trainer, batch, stop: threading.Event) -> None:
    """The update is made and saved, and its report is not heard; the buffer is back afterwards."""
    run.buffer.stop()
    stop.set()
    with pytest.raises(BufferUnavailable):
        trainer.learn(batch)
    trainer.save()
    trainer.close()
    run.buffer.start()


def restore(run: Run, copy: Path) -> None:
    """Go back to a copy of the database, as docs/operations.md says."""
    run.buffer.stop()
    for left in ("-wal", "-shm"):
        run.config.database.with_name(run.config.database.name + left).unlink(missing_ok=True)
    copy.replace(run.config.database)
    run.buffer.start()


def keep_copy(run: Run, copy: Path) -> Path:
    backup(run.config.database, copy, force=True, progress=lambda *_: None)
    return copy


@pytest.mark.parametrize("resumes", [True, False], ids=["resume", "live"])
def test_a_step_that_an_older_copy_of_the_database_does_not_know_is_missing_in_it_and_no_end(
    make_run, tmp_path, caplog, resumes
):
    run = make_run(publish_every=2)
    feeder = run.feed()
    stop = threading.Event()
    trainer = Trainer(run.config, None, torch.device("cpu"), stop.is_set)
    trainer.connect()
    trainer.publish()
    trainer.learn(trainer.sample())
    feeder.join()
    copy = keep_copy(run, tmp_path / "older.sqlite")
    batch = trainer.sample()
    if resumes:  # from a checkpoint that keeps the report
        stop_while_the_buffer_is_away(run, trainer, batch, stop)
        restore(run, copy)
        run.train(resume=True)
    else:
        restore(run, copy)
        trainer.learn(batch)
        while trainer.learner.steps_done < STEPS:
            trainer.learn(trainer.sample())
        trainer.close()
    assert "does not know this step" in caplog.text
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))
    assert run.query("SELECT step FROM batches WHERE trained_at IS NOT NULL") == [0, *range(2, STEPS)]


def test_a_trainer_outlives_its_buffer(make_run):
    straight, run = finished_run(make_run), make_run("outlives")
    feeder = run.feed()
    trainer = threading.Thread(target=run.train)
    trainer.start()
    feeder.join()
    run.buffer.stop()
    run.buffer.start()
    trainer.join(60)
    assert not trainer.is_alive()
    assert run.metrics() == straight.metrics()


def test_a_trainer_that_waits_for_data_says_so_and_stops_when_told(make_run):
    run = make_run()
    stop = threading.Event()
    trainer = threading.Thread(target=run.train, kwargs={"stop": stop.is_set})
    trainer.start()
    monitor = BufferClient(run.buffer.address, role="monitor", name="m")
    for _ in range(100):
        status, _ = monitor.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
        waiting = [client for client in status.clients if client.activity == "waiting"]
        if waiting:
            break
        monitor.poll(0.1)
    assert [client.role for client in waiting] == ["trainer"]
    assert "0 of 2 prompts have trajectories" in waiting[0].reason
    stop.set()
    trainer.join(20)
    monitor.close()
    assert not trainer.is_alive()
    assert not list(run.config.checkpoints.glob("*"))


def test_an_existing_checkpoint_needs_resume(make_run):
    run = finished_run(make_run)
    with pytest.raises(UsageError, match="pass --resume"):
        run.train()
    run.train(resume=True)  # there is nothing left to do
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))


def test_resume_without_a_checkpoint_starts_at_the_first_step(make_run):
    run = make_run()
    feeder = run.feed()
    run.train(resume=True)
    feeder.join()
    assert len(run.metrics()) == STEPS


def test_a_buffer_of_another_run_is_refused(make_run):
    run = make_run()
    sections = run.config.model_dump()
    sections["run"]["name"] = "other"
    run.config = Config.model_validate(sections)
    with pytest.raises(ConfigError, match="serves run test, this configuration is of run other"):
        run.train()


def replayed(run: Run, directory: Path) -> tuple[int, float]:
    """Replay a run while its server is still there. Returns (steps compared, largest difference of the losses)."""
    sections = run.config.model_dump()
    sections["run"]["dir"] = directory
    config = Config.model_validate(sections)
    past = read_past(run.config.database, run=None, as_of=None)
    buffer = OfflineBuffer(config, past, replay=True)
    try:
        train(config, resume=False, device="cpu", stop=lambda: False, dial=buffer.client, last_step=past.step)
        return buffer.compare_losses()
    finally:
        buffer.close()


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_whose_trainer_was_killed_and_resumed_is_replayed_bit_for_bit(make_run, tmp_path, step):
    run = make_run()
    feeder = run.feed()
    with pytest.raises(Killed):
        run.train(stop=killed_at(run, step))
    feeder.join()
    run.train(resume=True)
    assert replayed(run, tmp_path / "replay") == (STEPS, 0.0)


def test_so_is_one_that_was_killed_between_an_update_and_its_report(make_run, monkeypatch, tmp_path):
    run = make_run()
    feeder = run.feed()
    monkeypatch.setattr(Connection, "ask", kill_on_report_of(3))
    with pytest.raises(Killed):
        run.train()
    monkeypatch.undo()
    feeder.join()
    run.train(resume=True)
    assert replayed(run, tmp_path / "replay") == (STEPS, 0.0)


# With it the square of a reward near 1e9, over beta, overflows float64, and that of others does not.
OVERFLOWING = {"beta": 1e-150, "beta_final": 1e-150}


def test_a_run_goes_on_after_skipped_steps_also_when_it_is_killed_and_replayed(make_run, tmp_path):
    straight, killed = (make_run(name, **OVERFLOWING) for name in ("straight", "killed"))
    for run in (straight, killed):
        feeder = run.feed(broken=["p0"])
        if run is killed:
            with pytest.raises(Killed):
                run.train(stop=killed_at(run, 4))
        run.train(resume=run is killed)
        feeder.join()
    lines = straight.metrics()
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert skipped == straight.query(
        "SELECT DISTINCT step FROM consumption_rows JOIN trajectory_rows t ON t.id = trajectory "
        "WHERE reward > 1000 ORDER BY step"
    )
    assert 0 < len(skipped) < STEPS
    assert [line["step"] for line in lines if "loss" not in line] == skipped
    assert without_reference_counts(killed.metrics()) == without_reference_counts(lines)
    assert same_weights(killed, straight)
    assert replayed(killed, tmp_path / "replay") == (STEPS - len(skipped), 0.0)


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_checkpoint_that_goes_on_after_them(make_run):
    run = make_run(max_skipped_steps=2, **OVERFLOWING)
    feeder = run.feed(broken=["p0", "p1", "p2", "p3"])
    with pytest.raises(TrainingBroken, match=r"2 steps in a row were skipped, the last is step 1: loss inf"):
        run.train()
    feeder.join()
    assert checkpoint.newest(run.config.checkpoints).step == 2
    assert [len(line["skipped_trajectories"]) for line in run.metrics()] == [6, 6]
    with pytest.raises(TrainingBroken, match="the last is step 3"):
        run.train(resume=True)


def test_a_step_that_lacks_memory_says_what_to_change_and_is_made_by_the_next_start(make_run, monkeypatch):
    run = make_run()
    feeder = run.feed()

    def run_out(learner: Learner, batch: TrainBatch) -> StepResult:
        if learner.steps_done == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return make_step(learner, batch)

    make_step = Learner.step
    monkeypatch.setattr(Learner, "step", run_out)
    said = (
        r"out of memory in step 4 \(CUDA out .*\): lower train.micro_batch_tokens, which is 30 \(the longest .* \d+ tok"
    )
    with pytest.raises(MemoryShort, match=said):
        run.train()
    feeder.join()
    monkeypatch.undo()
    run.train(resume=True)
    assert [line["step"] for line in run.metrics()] == list(range(STEPS))


def test_the_seconds_of_the_lines_sum_to_their_steps(make_run):
    run = finished_run(make_run)
    lines = [json.loads(line) for line in (run.config.run.dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert sum(line[f"seconds_{phase}"] for phase in PHASES) == pytest.approx(line["seconds_step"], rel=1e-9)
    assert any(line["seconds_publish"] for line in lines)
