"""The buffer of an offline run, and a run that continues with its task and its model only."""

import hashlib
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.buffer.offline.offline_buffer import OfflineBuffer, read_recorded_run
from tba.buffer.server.start import serve
from tba.buffer.store.archives import NAME_KEY
from tba.buffer.store.starts import (
    IMPORT,
    MODEL_WEIGHTS,
    as_recorded,
    changes_since_last_start,
    model_weights,
    record_of,
    refuse_other_work,
    resolve_start,
)
from tba.buffer.store.store import Store
from tba.buffer.tools.check import check
from tba.buffer.tools.export import archive_record, archive_schema
from tba.common import data_files
from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError, Refused, StorageError, UsageError
from tba.common.terminal import ConfigOptions
from tba.common.wire import messages
from tba.common.wire.messages import Archive
from tba.tests.helpers.buffer import ServiceHarness, change
from tba.tests.helpers.buffer import ask as ask_file
from tba.tests.helpers.index import kept_ids
from tba.tests.helpers.puts import make_trajectory
from tba.ui.runs import find_runs, value_over_steps

PROMPTS, STEPS = 4, 3
# Trajectories that arrive before each step.
ROUND = PROMPTS * 2


@pytest.fixture
def source(harness: Callable[..., ServiceHarness], tmp_path: Path) -> ServiceHarness:
    """A recorded run. Before the batch of step s, every prompt received two trajectories of the policy of step s."""
    run = harness(tmp_path / "source/buffer.sqlite")
    run.register(PROMPTS)
    for step in range(STEPS):
        continue_run(run, step)
    return run


def continue_run(run: ServiceHarness, step: int) -> None:
    """Add a round of trajectories, the second one to each prompt of a nucleus, and train a step."""
    run.announce(step, step)
    cut: list[dict[str, Any]] = [
        {},
        {"sampling": {"temperature": 1.0, "top_p": 0.9}, "kept": np.array([3, 9, 0, 0, 2, 0])},
    ]
    for n in range(PROMPTS):
        group = [make_trajectory(f"p{n}", 0, step, tokens=[n, step, k], **cut[k]) for k in range(2)]
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


def sample_of(step: int, prompts: int = 2, samples: int = 2) -> messages.SampleBatch:
    return messages.SampleBatch(step=step, prompts=prompts, samples=samples, reference="initial", wait_seconds=0.0)


def sample(buffer: OfflineBuffer, step: int, prompts: int = 2, samples: int = 2) -> messages.Batch:
    return ask(buffer, sample_of(step, prompts, samples), messages.Batch)


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


EVERYTHING: dict[str, Any] = {"buffer": {"recency_fraction": 0.0}}


# ---------------------------------------------------------------- batches


def test_as_of_a_step_samples_the_data_and_staleness_of_that_step(offline):
    for step in range(STEPS):
        buffer = offline(f"off{step}", as_of=step, **EVERYTHING)
        batches = [sample(buffer, n) for n in range(40)]
        assert {id_ for batch in batches for id_ in batch.trajectory_ids} == set(range(1, (step + 1) * ROUND + 1))
        assert {age for batch in batches for age in batch.staleness} == set(range(step + 1))
        # Offline data never counts as on-policy.
        assert {version for batch in batches for version in batch.policy_version} == {-1}


@pytest.mark.parametrize("keep", ["reservoir", "both"])
def test_as_of_a_step_and_after_a_restart_the_same_sample_of_the_history_stays(keep, harness, tmp_path):
    sampled: dict[str, Any] = {
        "buffer": {"keep": keep, "max_trajectories": 12, "prompt_cap": 10},
        "train": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "search": {"samples_per_prompt": 2},
    }

    run, at_steps = harness(tmp_path / "sampled/buffer.sqlite", **sampled, fill=(PROMPTS, 0)), []
    for step in range(2 * STEPS):
        continue_run(run, step)
        at_steps.append(run.sampleable())
    run.store.close()
    assert [len(kept) for kept in at_steps] == [8] + [12] * (2 * STEPS - 1)
    assert at_steps[-1][0] <= 2 * STEPS * ROUND - 12, "older than the newest 12"
    assert harness(run.store.path, **sampled).sampleable() == at_steps[-1]
    for step, kept in enumerate(at_steps):
        recorded = read_recorded_run(run.store.path, run=None, as_of=step)
        with closing(OfflineBuffer(config_at(tmp_path / f"off{step}", **sampled), recorded, replay=False)) as buffer:
            assert kept_ids(buffer._service.state.index) == kept


def test_a_replay_has_the_recorded_batches_kept_tokens_and_reference_logprobs_at_each_step(offline, source):
    # Other tokens are not needed.
    compact_all_but(source, set.union(*(batch_of(source, step) for step in range(STEPS))))
    buffer, seen, kept = offline(replay=True), set[int](), set[int]()
    for step in range(STEPS):
        batch = train(buffer, step)
        recorded = source.sample(step, 2, 2).message
        assert (batch.trajectory_ids, batch.staleness) == (recorded.trajectory_ids, recorded.staleness)
        assert (batch.kept_count, batch.temperature) == (recorded.kept_count, [1.0] * 4)
        kept |= {*recorded.kept_count}
        known = {i for i, logprob in zip(batch.trajectory_ids, batch.reference_logprobs, strict=True) if logprob}
        assert known == seen & set(batch.trajectory_ids)
        seen |= set(batch.trajectory_ids)
    assert kept == {0, 6}
    # The recorded run reported no losses.
    assert buffer.compare_losses() == (0, 0.0)
    with closing(sqlite3.connect(buffer._store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        heartbeat = messages.Heartbeat(activity="training", reason="", weights_version=None, metrics={})
        assert ask(buffer, heartbeat, messages.Done) == messages.Done(), "it waits for no transaction"


def test_the_recorded_file_is_never_changed_and_the_own_one_passes_its_check(offline, source, caplog):
    source.store.database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = hashlib.sha256(source.store.path.read_bytes()).hexdigest()
    for buffer in (offline("a"), offline("b", replay=True)):
        for step in range(STEPS):
            train(buffer, step)
        # One of all databases would try to write the WAL of the recorded run.
        buffer._store.database.written = 9 << 20
        buffer._store.database.checkpoint()
        assert "checkpoint failed" not in caplog.text
        buffer.close()
        findings = check(buffer._store.path)
        assert {finding["result"] for finding in findings} == {"ok", "note"}
        assert f"they are in {source.store.path}" in next(f["detail"] for f in findings if f["result"] == "note")
    assert hashlib.sha256(source.store.path.read_bytes()).hexdigest() == before
    assert source.store.path.with_name("buffer.sqlite-wal").stat().st_size == 0


# ---------------------------------------------------------------- a second start


def test_a_second_start_repeats_its_batches_although_the_recorded_run_has_continued_or_moved(offline, source, tmp_path):
    first = offline(**EVERYTHING)
    made = [train(first, step).trajectory_ids for step in range(5)]
    first.close()
    continue_run(source, STEPS)
    again = offline(**EVERYTHING)
    assert ids(again, range(5)) == made
    batches = [sample(again, step) for step in range(5, 40)]
    assert max(id_ for batch in batches for id_ in batch.trajectory_ids) <= STEPS * ROUND
    assert {age for batch in batches for age in batch.staleness} == {1, 2, 3}
    again.close()
    source.store.close()
    moved = read_recorded_run(source.store.path.rename(tmp_path / "moved.sqlite"), run=None, as_of=None)
    with closing(OfflineBuffer(config_at(tmp_path / "offline", **EVERYTHING), moved, replay=False)) as elsewhere:
        assert ids(elsewhere, range(5)) == made


@pytest.mark.parametrize("other", [{"as_of": 1}, {"replay": True}, {}])
def test_an_offline_run_continues_only_with_the_same_options_and_the_same_recorded_run(offline, source, other):
    offline().close()
    if not other:
        change(source.store.path, "UPDATE runs SET uuid = 'another'")
    with pytest.raises(UsageError, match="pass the same options again"):
        offline(**other)


# ---------------------------------------------------------------- runs that must not be mixed


def test_runs_that_must_not_be_mixed_are_refused_and_nothing_is_recorded(offline, harness, source, tmp_path):
    served, record, starts = (
        tmp_path / "served/buffer.sqlite",
        tmp_path / "offline/buffer.sqlite",
        "SELECT * FROM starts",
    )
    harness(served)
    before = ask_file(served, starts)
    with pytest.raises(ConfigError, match="belongs to run test, which was not trained offline: set another run.dir"):
        offline("served", name="test")
    assert ask_file(served, starts) == before
    with pytest.raises(UsageError, match="is in run.dir"):
        offline("source", buffer={"database": tmp_path / "elsewhere.sqlite"})
    assert not (tmp_path / "elsewhere.sqlite").exists()
    for name in ("metrics.jsonl", "checkpoints"):
        (tmp_path / "offline" / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match="holds a run that was not trained offline"):
            offline()
        (tmp_path / "offline" / name).rmdir()
    offline().close()
    with pytest.raises(ConfigError, match="belongs to run off, and run.name is another"):
        offline(name="another")
    with pytest.raises(ConfigError, match="belongs to run off, which was trained offline from"):
        serve(config_at(tmp_path / "offline", buffer={"address": "tcp://127.0.0.1:*"}), stop=lambda: True)
    with pytest.raises(UsageError, match=re.escape(f"trained offline from {source.store.path}")):
        read_recorded_run(record, run=None, as_of=None)
    assert len(ask_file(record, starts)) == 1


# ---------------------------------------------------------------- refusals


def test_a_replay_needs_trained_steps_of_its_shape_and_too_little_data_is_an_error_instead_of_a_wait(offline, tmp_path):
    with pytest.raises(UsageError, match="no trained steps to replay"):
        offline(as_of=0, replay=True)
    other = offline("other", replay=True)
    with pytest.raises(ConfigError, match="has no batch of step 3"):
        sample(other, STEPS)
    with pytest.raises(ConfigError, match="train.prompts_per_step = 2 and train.samples_per_prompt = 2"):
        sample(other, 0, prompts=1, samples=4)
    assert ask_file(tmp_path / "other/buffer.sqlite", "SELECT * FROM batches") == []
    with pytest.raises(ConfigError, match="4 of 5 prompts .* there will be no more"):
        sample(offline("third"), 0, prompts=5)


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


def archive_all_but(source: ServiceHarness, kept: set[int], url: str) -> None:
    """Move tokens to a file, while the recorded run goes on."""
    reader = closing(sqlite3.connect(source.store.path))
    moved = sorted(set(range(1, STEPS * ROUND + 1)) - kept)
    with reader as connection:
        pa, parquet = data_files.pyarrow()
        schema = archive_schema(pa).with_metadata({NAME_KEY: url.rpartition("/")[2]})
        rows = [archive_record(connection, id_) for id_ in moved]
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), url.removeprefix("file://"))
    message = Archive(since_step=STEPS, url=url, trajectories=moved, complete=True)
    with source.store.transaction():
        source.store.trajectories.archive(source.run, message, moved, 1.0)


def test_archived_tokens_are_replayed_and_sampled_as_if_they_were_there(offline, source, tmp_path):
    def all_frames(at: str, **settings: Any) -> list[Any]:
        buffer = offline(at, **settings)
        replies = [buffer.client("trainer", "t").call(sample_of(step), messages.Batch) for step in range(STEPS)]
        return [(batch, [bytes(frame) for frame in frames]) for batch, frames in replies]

    before = all_frames("a", replay=True), all_frames("b", **EVERYTHING)
    url = (tmp_path / "000000000001-0123abcd.parquet").as_uri()
    archive_all_but(source, batch_of(source, 1), url)
    assert (all_frames("c", replay=True), all_frames("d", **EVERYTHING)) == before
    with pytest.raises(Refused, match="or moved by `tba buffer archive`, so it cannot be repeated"):
        source.sample(0, prompts=2, samples=2)
    (tmp_path / "000000000001-0123abcd.parquet").unlink()
    with pytest.raises(StorageError, match=f"the archive {url} is not there"):
        all_frames("e", replay=True)


def test_an_offline_run_logs_how_many_compacted_trajectories_it_leaves_out(offline, source, caplog):
    compact_all_but(source, batch_of(source, 2))
    buffer = offline(**EVERYTHING)
    assert buffer.sampleable_count == len(batch_of(source, 2))
    (warning,) = (record for record in caplog.records if "compacted" in record.message)
    assert warning.fields == {"trajectories": STEPS * ROUND - buffer.sampleable_count}


OPTIONS: dict[str, Any] = {"task": {"name": "tasks/own.py:Own", "options": {"digits": 2}}}


def config_of(directory, path, **sections) -> Config:
    defaults = {"run": {"dir": str(directory)}, "model": {"path": str(path)}, **OPTIONS}
    return Config.model_validate(defaults | sections)


def start(config: Config, *, lease: bool, **added) -> None:
    """Record a start, and lease a prompt to a searcher."""
    settings = {**record_of(config), MODEL_WEIGHTS: model_weights(config), **added}
    with closing(Store(config.database, durability="process")) as store:
        run = store.open_run(config.run.name, seed=0, config=settings, software={}, origins={"model.path": "tba.toml"})
        with store.transaction():
            if lease:
                store.prompts.add(run, 0, ["p0"], [None])
                (prompt,) = store.prompts.ids(run).values()
                sender = store.senders.number(run, "s.1", "searcher")
                store.visits.add(run, 0, 0, prompt, sender, time.time())


@pytest.fixture
def model(tmp_path, example_model):
    return shutil.copytree(example_model, tmp_path / "model")


@pytest.fixture
def run(tmp_path, model) -> Config:
    """A run whose searchers have begun."""
    config = config_of(tmp_path / "run", model)
    start(config, lease=True)
    return config


def test_without_a_file_a_run_is_read_with_its_recorded_configuration(run, tmp_path):
    secret = {"reward_model": {"url": "http://a", "api_key": "s3"}, "search": {"gpus": "cpu"}}
    start(config_of(run.run.dir, "here", **secret), lease=False)
    moved = run.run.dir.rename(tmp_path / "moved")
    sets = [f"run.dir={moved}", "search.max_tokens=7"]
    found = as_recorded(resolve(None, environment={}, assignments=sets)).config
    assert (found.run.dir, found.database, found.search.max_tokens) == (moved, moved / "buffer.sqlite", 7)
    assert (found.model.path, found.search.gpus, found.task.options) == ("here", "cpu", {"digits": 2})
    assert (found.reward_model.url, found.reward_model.api_key.get_secret_value()) == ("http://a", "")
    same = resolve_start(ConfigOptions(moved, ["search.max_tokens=7"])).config
    assert (same.database, same.model.path, same.search.max_tokens) == (moved / "buffer.sqlite", "here", 7)
    changes = {key: (was, now) for key, was, now in changes_since_last_start(same)}
    key = changes.pop("reward_model.api_key")
    assert (changes, key[1]) == ({"search.max_tokens": (Config().search.max_tokens, 7)}, "")
    file = tmp_path / "own.toml"
    file.write_text("[search]\nmax_tokens = 9\n")
    assert as_recorded(resolve(file, environment={}, assignments=sets)).config.model.path == ""


def test_the_settings_of_a_run_mean_in_every_directory_what_they_meant_in_that_of_its_start(
    tmp_path, monkeypatch, example_model
):
    shutil.copytree(example_model, tmp_path / "base")
    for name in ("own.py", "rows.jsonl", "easy.txt"):
        (tmp_path / name).touch()
    # A word, not this folder.
    (tmp_path / "easy").mkdir()
    task = {"name": "own.py:Own", "train": "rows.jsonl", "options": {"words": "easy.txt", "level": "easy"}}
    monkeypatch.chdir(tmp_path)
    start(config_of("run", "base", task=task, search={"spool_dir": "spool"}), lease=True)
    monkeypatch.chdir(tmp_path.parent)
    resolved = resolve_start(ConfigOptions(tmp_path / "run", []))
    found = resolved.config
    assert [resolved.origin(key) for key in ("model.path", "task.limit")] == ["tba.toml", "default"]
    assert (found.task.name, found.task.train) == (f"{tmp_path}/own.py:Own", f"{tmp_path}/rows.jsonl")
    assert found.task.options == {"words": f"{tmp_path}/easy.txt", "level": "easy"}
    assert (found.model.path, found.spool) == (f"{tmp_path}/base", tmp_path / "spool")
    # Nothing has changed, for who is told of changes and for who refuses other work.
    assert changes_since_last_start(found) == []
    refuse_other_work(found)


def test_a_secret_that_was_replaced_is_a_change_and_is_not_recorded(tmp_path):
    def with_key(key: str) -> Config:
        return config_of(tmp_path / "run", "here", reward_model={"url": "http://a", "api_key": key})

    start(with_key("s3cret"), lease=False)
    assert changes_since_last_start(with_key("s3cret")) == []
    ((key, was, now),) = changes = changes_since_last_start(with_key("other"))
    # Too short to be guessed by.
    assert (key, [len(shown) for shown in (was, now)]) == ("reward_model.api_key", [len("********** 3f2a")] * 2)
    start(with_key("other"), lease=False)
    (run,) = find_runs([tmp_path / "run"], pytest.fail)
    with run.rows() as rows:
        assert run.starts(rows)[1].changes == changes
    assert b"s3cret" not in (tmp_path / "run/buffer.sqlite").read_bytes()


CHANGES: dict[str, dict[str, Any]] = {
    "task.name": {"task": {"name": "tasks/own.py:Other", "options": {"digits": 2}}},
    "task.options": {"task": {"name": "tasks/own.py:Own", "options": {"digits": 3}}},
    "task.system": {"task": {**OPTIONS["task"], "system": "be short"}},
    "task.limit": {"task": {**OPTIONS["task"], "limit": 5}},
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_task_is_refused_but_an_evaluation_may_use_other_prompts_of_it(run, model, key):
    other = config_of(run.run.dir, model, **CHANGES[key])
    refused = rf"run run with .* {key} was .* and is .*\. Set another run.dir"
    with pytest.raises(ConfigError, match=refused):
        refuse_other_work(other)
    if key in ("task.system", "task.limit"):
        return refuse_other_work(other, evaluates=True)
    with pytest.raises(ConfigError, match=refused):
        refuse_other_work(other, evaluates=True)
    return None


def test_what_does_not_change_the_rows_may_change(run, model, tmp_path):
    moved = model.rename(tmp_path / "moved")
    for sections in (
        {"train": {"steps": 9000, "learning_rate": 1e-5, "gpu": "3"}, "search": {"engine": "transformers"}},
        {"task": {**OPTIONS["task"], "name": "elsewhere/own.py:Own", "held_out_limit": 3, "reward_seconds": 99}},
        {"model": {"path": str(moved), "dtype": "float32"}},
        {"model": {"path": ""}},
    ):
        refuse_other_work(config_of(run.run.dir, moved, **sections))


@pytest.mark.parametrize("mixed", [False, True])
def test_the_servers_of_a_task_and_the_weights_of_a_mixture_may_change_and_its_options_not(tmp_path, model, mixed):
    def of(url: str, seconds: float, replies: int, weight: float = 1.0) -> Config:
        part = {
            "name": "own.py:Own",
            "options": {"victim": {"url": url, "replies": replies}, "request_seconds": seconds},
        }
        task = {"name": "mixture", "mixture": [part | {"weight": weight}]} if mixed else part
        return config_of(tmp_path / "run", model, task=task)

    start(of("http://node0:8001", 30, 5), lease=True)
    refuse_other_work(of("http://node7:9001", 60, 5, weight=3.0))
    with pytest.raises(
        ConfigError, match=f'task.{"mixture" if mixed else "options"} was .*"replies": 5.* and is .*"replies": 6'
    ):
        refuse_other_work(of("http://node0:8001", 30, 6))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_model_with_other_weights_is_refused_also_at_the_same_path(run, model, tmp_path, elsewhere):
    other = shutil.copytree(model, tmp_path / "other") if elsewhere else model
    weights = bytearray((other / "model.safetensors").read_bytes())
    # As if the tensors of the last layers had been trained.
    weights[-1000:] = (byte ^ 1 for byte in weights[-1000:])
    (other / "model.safetensors").write_bytes(weights)
    found = "model.path was .* and is .*/other" if elsewhere else 'model.path ".*/model" had other weights'
    with pytest.raises(ConfigError, match=found):
        refuse_other_work(config_of(run.run.dir, other))


def test_models_that_are_not_here_are_compared_by_name(tmp_path):
    start(config_of(tmp_path / "run", "hub/one"), lease=True)
    refuse_other_work(config_of(tmp_path / "run", "hub/one"))
    with pytest.raises(ConfigError, match='model.path was "hub/one" and is "hub/two"'):
        refuse_other_work(config_of(tmp_path / "run", "hub/two"))


def test_a_start_without_searchers_and_an_import_bind_the_run_to_nothing(tmp_path, model):
    wrong = config_of(tmp_path / "run", model, **CHANGES["task.options"])
    start(wrong, lease=False)
    right = config_of(tmp_path / "run", model)
    refuse_other_work(right)
    start(right, lease=False)
    start(wrong, lease=True, **{IMPORT: True})
    # As an earlier release recorded a start whose searchers were refused.
    start(wrong, lease=False)
    refuse_other_work(right)
    with pytest.raises(ConfigError, match="task.options was"):
        refuse_other_work(wrong)


def test_a_setting_that_a_start_changed_is_told_with_the_step_of_the_change(filled):
    recorded = '{"train": {"learning_rate": 1e-6, "steps": 9}}'
    again = """INSERT INTO starts (run, started_at, config, software)
        SELECT run, ?, json_set(config, '$.train.learning_rate', ?), software FROM starts LIMIT 1"""
    change(filled, "UPDATE batches SET trained_at = 5e9", ("UPDATE starts SET config = ?", [recorded]))
    change(filled, (again, [1e10, 3e-5]), (again, [2e10, 3e-5]))
    (run,) = find_runs([filled], pytest.fail)
    with run.rows() as rows:
        starts = run.starts(rows)
    assert [(start.step, start.changes) for start in starts] == [
        (0, []),
        (1, [("train.learning_rate", 1e-6, 3e-5)]),
        (1, []),
    ]
    assert value_over_steps(starts, "train.learning_rate") == "1e-06 until step 1, then 3e-05"
    # An import before it, with settings of its own, says nothing of the first start.
    imported = "UPDATE starts SET config = json_set(config, '$.import', 'rows.jsonl', '$.train.steps', 4)"
    change(filled, (again, [1.0, 5e-5]), (f"{imported} WHERE started_at = ?", [1.0]))
    with run.rows() as rows:
        assert run.starts(rows)[0].changes == []
    assert value_over_steps(starts, "train.steps") == "9"
