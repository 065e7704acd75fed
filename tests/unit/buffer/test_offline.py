"""The buffer of an offline run: the batches it hands out, what it records, and what it refuses."""

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.offline.offline_buffer import OfflineBuffer
from tba.buffer.offline.recorded_run import read_recorded_run
from tba.buffer.server.start import serve
from tba.buffer.tools.check import check
from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError
from tba.common.wire import messages
from tba.tests.helpers.buffer import ServiceHarness, change
from tba.tests.helpers.buffer import ask as ask_file
from tba.tests.helpers.puts import make_trajectory

PROMPTS, STEPS = 4, 3
# Trajectories that arrive before each step.
ROUND = PROMPTS * 2


@pytest.fixture
def source(harness: Callable[..., ServiceHarness], tmp_path: Path) -> ServiceHarness:
    """A recorded run. Before the batch of step s, every prompt received two trajectories of the policy of step s."""
    (tmp_path / "source").mkdir()
    run = harness(tmp_path / "source/buffer.sqlite")
    run.register(PROMPTS)
    for step in range(STEPS):
        continue_run(run, step)
    return run


def continue_run(run: ServiceHarness, step: int) -> None:
    """Add a round of trajectories, and train a step."""
    run.announce(step, step)
    for n in range(PROMPTS):
        group = [make_trajectory(f"p{n}", lease=0, version=step, tokens=[n, step, k]) for k in range(2)]
        run.put(group, first_sequence=(step * PROMPTS + n) * 2)
    run.sample(step, prompts=2, samples=2)
    run.report(step)


@pytest.fixture
def offline(source: ServiceHarness, tmp_path: Path) -> Iterator[Callable[..., OfflineBuffer]]:
    """Opens an offline run of the recorded one in directory `at`. Other keywords are configuration sections."""
    made: list[OfflineBuffer] = []

    def make(at: str = "offline", as_of: int | None = None, replay: bool = False, **sections: Any) -> OfflineBuffer:
        recorded = read_recorded_run(source.store.path, run=None, as_of=as_of)
        made.append(OfflineBuffer(config_at(tmp_path / at, **sections), recorded, replay=replay))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()


def config_at(directory: Path, name: str = "off", **sections: Any) -> Config:
    return Config.model_validate({"run": {"dir": directory, "name": name}, **sections})


def ask(buffer: OfflineBuffer, message: messages.Message, expect: type[Any]) -> Any:
    return buffer.client("trainer", "t").call(message, expect)[0]


def sample(buffer: OfflineBuffer, step: int, prompts: int = 2, samples: int = 2) -> messages.Batch:
    message = messages.SampleBatch(step=step, prompts=prompts, samples=samples, reference="initial", wait_seconds=0.0)
    return ask(buffer, message, messages.Batch)


def train(buffer: OfflineBuffer, step: int) -> messages.Batch:
    """Sample the batch of a step and report it, with reference log-probabilities where they are missing."""
    batch = sample(buffer, step)
    known = dict(zip(batch.trajectory_ids, batch.reference_logprobs, strict=True))
    missing = [id_ for id_, logprob in known.items() if logprob is None]
    message = messages.ReportStep(
        step=step, metrics={"loss": 0.5}, reference="initial",
        trajectory_ids=missing, reference_logprobs=[-1.0] * len(missing),
    )  # fmt: skip
    ask(buffer, message, messages.Done)
    return batch


def ids(buffer: OfflineBuffer, steps: range) -> list[list[int]]:
    return [sample(buffer, step).trajectory_ids for step in steps]


EVERYTHING = {"buffer": {"recency_fraction": 0.0}}


def test_a_heartbeat_does_not_wait_for_a_transaction_of_another_program(offline):
    buffer = offline()
    with closing(sqlite3.connect(buffer._store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        heartbeat = messages.Heartbeat(activity="training", reason="", weights_version=None, metrics={})
        assert ask(buffer, heartbeat, messages.Done) == messages.Done()


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("step", range(STEPS))
def test_as_of_a_step_samples_the_data_and_staleness_of_that_step(offline, step):
    buffer = offline(as_of=step, **EVERYTHING)
    batches = [sample(buffer, n) for n in range(40)]
    assert {id_ for batch in batches for id_ in batch.trajectory_ids} == set(range(1, (step + 1) * ROUND + 1))
    assert {age for batch in batches for age in batch.staleness} == set(range(step + 1))
    # Offline data never counts as on-policy.
    assert {version for batch in batches for version in batch.policy_version} == {-1}


def test_file_configuration_and_step_determine_a_batch(offline):
    first = ids(offline("a"), range(9))
    assert ids(offline("b"), range(9)) == first
    newest = {"recency_fraction": 1.0, "recency_window": 1}
    assert ids(offline("c", buffer=newest), range(9)) != first


def test_a_replay_has_the_recorded_reference_logprobs_at_each_step(offline, source):
    buffer, seen = offline(replay=True), set[int]()
    for step in range(STEPS):
        batch = train(buffer, step)
        recorded = source.store.batches.rows(source.run, step, "initial")
        assert (batch.trajectory_ids, batch.staleness) == (recorded["id"], recorded["staleness"])
        known = {i for i, logprob in zip(batch.trajectory_ids, batch.reference_logprobs, strict=True) if logprob}
        assert known == seen & set(batch.trajectory_ids)
        seen |= set(batch.trajectory_ids)


def test_a_checkpoint_is_of_the_own_database_alone(offline, source, caplog):
    """The recorded run may have a WAL of its own, which a checkpoint of all databases would try to write."""
    buffer = offline("a")
    train(buffer, 0)
    own = buffer._store.database
    own.note_written(9 << 20)
    assert "checkpoint failed" not in caplog.text
    buffer.close()


def test_the_recorded_file_is_never_changed(offline, source):
    source.store.database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = hashlib.sha256(source.store.path.read_bytes()).hexdigest()
    for buffer in (offline("a"), offline("b", replay=True)):
        for step in range(STEPS):
            train(buffer, step)
        buffer.close()
    assert hashlib.sha256(source.store.path.read_bytes()).hexdigest() == before
    assert source.store.path.with_name("buffer.sqlite-wal").stat().st_size == 0


# ---------------------------------------------------------------- a second start


def test_a_second_start_repeats_its_batches_although_the_recorded_run_has_continued(offline, source):
    first = offline(**EVERYTHING)
    made = [train(first, step).trajectory_ids for step in range(5)]
    first.close()
    continue_run(source, STEPS)
    again = offline(**EVERYTHING)
    assert ids(again, range(5)) == made
    batches = [sample(again, step) for step in range(5, 40)]
    assert max(id_ for batch in batches for id_ in batch.trajectory_ids) <= STEPS * ROUND
    assert {age for batch in batches for age in batch.staleness} == {1, 2, 3}


@pytest.mark.parametrize("other", [{"as_of": 1}, {"replay": True}, {}])
def test_an_offline_run_continues_only_with_the_same_options_and_the_same_recorded_run(offline, source, other):
    offline().close()
    if not other:
        change(source.store.path, "UPDATE runs SET uuid = 'another'")
    with pytest.raises(UsageError, match="pass the same options again"):
        offline(**other)


def test_a_recorded_file_may_move(offline, source, tmp_path):
    first = offline()
    made = ids(first, range(3))
    first.close()
    with (
        closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy,
        closing(sqlite3.connect(source.store.path)) as original,
    ):
        original.backup(copy)
    buffer = OfflineBuffer(
        config_at(tmp_path / "offline"), read_recorded_run(tmp_path / "copy.sqlite", run=None, as_of=None), replay=False
    )
    assert ids(buffer, range(3)) == made
    buffer.close()


# ---------------------------------------------------------------- runs that must not be mixed


def rows(database: Path, table: str) -> list[tuple[Any, ...]]:
    return ask_file(database, f"SELECT * FROM {table}")


def test_the_database_of_a_server_is_refused_as_an_offline_record(offline, harness, tmp_path):
    (tmp_path / "served").mkdir()
    database = harness(tmp_path / "served/buffer.sqlite").store.path
    before = rows(database, "starts")
    with pytest.raises(ConfigError, match="belongs to run test, which was not trained offline: set another run.dir"):
        offline("served", name="test")
    assert rows(database, "starts") == before


def test_the_directory_of_the_recorded_file_is_refused_as_run_dir(offline, tmp_path):
    with pytest.raises(UsageError, match="is in run.dir"):
        offline("source", buffer={"database": tmp_path / "elsewhere.sqlite"})
    assert not (tmp_path / "elsewhere.sqlite").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_a_directory_with_files_of_another_run_is_refused(offline, tmp_path, name):
    (tmp_path / "offline" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run that was not trained offline"):
        offline()


def test_an_offline_record_holds_one_run(offline):
    offline().close()
    with pytest.raises(ConfigError, match="belongs to run off, and run.name is another"):
        offline(name="another")


def test_a_server_refuses_an_offline_record(offline, tmp_path):
    offline().close()
    with pytest.raises(ConfigError, match="belongs to run off, which was trained offline from"):
        serve(config_at(tmp_path / "offline", buffer={"address": "tcp://127.0.0.1:*"}), stop=lambda: True)
    assert len(rows(tmp_path / "offline/buffer.sqlite", "starts")) == 1


# ---------------------------------------------------------------- refusals


def test_a_replay_needs_trained_steps_and_too_little_data_is_an_error_instead_of_a_wait(offline):
    with pytest.raises(UsageError, match="no trained steps to replay"):
        offline(as_of=0, replay=True)
    with pytest.raises(ConfigError, match="has no batch of step 3"):
        sample(offline("other", replay=True), STEPS)
    with pytest.raises(ConfigError, match="4 of 5 prompts .* there will be no more"):
        sample(offline("third"), 0, prompts=5)


def test_a_replay_with_another_batch_shape_names_the_settings_and_records_nothing(offline, tmp_path):
    buffer = offline(replay=True)
    with pytest.raises(ConfigError, match="train.prompts_per_step = 2 and train.samples_per_prompt = 2"):
        sample(buffer, 0, prompts=1, samples=4)
    assert rows(tmp_path / "offline/buffer.sqlite", "batches") == []


def compact_all_but(source: ServiceHarness, kept: set[int]) -> None:
    with source.store.transaction():
        source.store.trajectories.drop_payloads(sorted(set(range(1, STEPS * ROUND + 1)) - kept), 1.0)


def batch_of(source: ServiceHarness, step: int) -> set[int]:
    return set(source.store.batches.rows(source.run, step, "none")["id"])


def test_a_replay_that_needs_compacted_tokens_is_refused_before_its_first_step(offline, source, tmp_path):
    compact_all_but(source, batch_of(source, 0) | batch_of(source, 2))
    assert not batch_of(source, 1) <= batch_of(source, 0) | batch_of(source, 2)
    with pytest.raises(
        UsageError, match="^step 1 of run test in .* cannot be replayed.* --as-of 1 replays the steps before"
    ):
        offline(replay=True)
    assert not (tmp_path / "offline").exists()
    train(offline(replay=True, as_of=1), 0)


def test_a_replay_needs_only_the_tokens_of_its_batches(offline, source):
    compact_all_but(source, batch_of(source, 0) | batch_of(source, 1) | batch_of(source, 2))
    buffer = offline(replay=True)
    assert [len(train(buffer, step).trajectory_ids) for step in range(STEPS)] == [4] * STEPS


def test_an_offline_run_logs_how_many_compacted_trajectories_it_leaves_out(offline, source, caplog):
    compact_all_but(source, batch_of(source, 2))
    buffer = offline(**EVERYTHING)
    assert buffer.sampleable_count == len(batch_of(source, 2))
    (warning,) = (record for record in caplog.records if "compacted" in record.message)
    assert warning.fields == {"trajectories": STEPS * ROUND - buffer.sampleable_count}


def test_steps_whose_losses_are_not_recorded_are_not_compared(offline):
    buffer = offline(replay=True)
    train(buffer, 0)
    # The recorded run reported no losses.
    assert buffer.compare_losses() == (0, 0.0)


def test_an_offline_record_is_refused_as_a_source_and_names_its_own(offline, source, tmp_path):
    offline().close()
    with pytest.raises(UsageError, match=re.escape(f"trained offline from {source.store.path}")):
        read_recorded_run(tmp_path / "offline/buffer.sqlite", run=None, as_of=None)


def test_the_record_of_an_offline_run_passes_its_check(offline, source, tmp_path):
    buffer = offline()
    train(buffer, 0)
    buffer.close()
    findings = check(tmp_path / "offline/buffer.sqlite")
    assert {finding["result"] for finding in findings} == {"ok", "note"}
    assert f"they are in {source.store.path}" in next(f["detail"] for f in findings if f["result"] == "note")


@pytest.mark.slow
def test_the_wal_of_a_long_run_does_not_grow(offline, tmp_path):
    buffer = offline()
    for step in range(600):
        train(buffer, step)
    # 36e6 without checkpoints.
    assert (tmp_path / "offline/buffer.sqlite-wal").stat().st_size < 10e6
