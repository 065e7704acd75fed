"""Training again from the file of a run: the same losses from its own batches, other ways from the same data."""

import hashlib
import json
import sqlite3
from pathlib import Path

import pytest

from tba.buffer.offline import OfflineBuffer, read_past
from tba.common import wire
from tba.common.config import Config

STEPS = 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("time-travel")


@pytest.fixture
def recorded(workplace, make_config_in, example_model, tba):
    """A run that was made by real processes: once for all tests of this module."""
    run = make_config_in(
        workplace,
        model={"path": str(example_model), "dtype": "float32"},
        task={"name": "arithmetic", "limit": 64, "held_out_limit": 32},
        buffer={"recency_window": 4, "recency_fraction": 0.5},
        search={
            "engine": "transformers",
            "gpus": "cpu",
            "cpu_searchers": 1,
            "samples_per_prompt": 4,
            "max_in_flight": 32,
            "max_tokens": 6,
        },
        train={
            "gpu": "cpu",
            "steps": STEPS,
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "warmup_steps": 2,
            "publish_every": 1,
            "checkpoint_every": 100,
        },
    )
    if not run.directory.exists():
        result = tba("run", run.file, timeout=120)
        assert result.returncode == 0, result.stderr
    return run


def offline(tba, run, directory: Path, *flags: str, **settings: object):
    sets = [part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]
    return tba(
        "train", "--cpu", "--config", run.file, "--set", f"run.dir={directory}", *sets,
        "--offline", "--buffer", str(run.database), *flags, timeout=120,
    )  # fmt: skip


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_no_data_counts_as_sampled_from_the_weights_of_an_offline_trainer(recorded, tmp_path):
    config = Config.model_validate({"run": {"dir": tmp_path}, "buffer": {"recency_fraction": 0}})
    past = read_past(recorded.database, run=None, as_of=3)
    buffer = OfflineBuffer(config, past, replay=False)
    message = wire.SampleBatch(step=0, prompts=8, samples=4, reference="r", wait_seconds=0.0)
    batch, _ = buffer.client("trainer", "t").call(message, wire.Batch)
    buffer.close()
    assert batch.plain_sampling == [False] * 32


def rows(database: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return connection.execute(sql).fetchall()


BATCHES = "SELECT step, slot, trajectory, staleness FROM consumption_rows ORDER BY step, slot"


def test_a_replay_has_the_losses_of_the_recorded_run_bit_for_bit(recorded, tba, tmp_path):
    before = hashlib.sha256(recorded.database.read_bytes()).hexdigest()
    result = offline(tba, recorded, tmp_path / "again", "--replay")
    assert result.returncode == 0, result.stderr
    assert f"replayed {STEPS} steps; losses: bit for bit the same" in result.stdout
    assert losses(tmp_path / "again") == losses(recorded.directory)
    assert rows(tmp_path / "again/buffer.sqlite", BATCHES) == rows(recorded.database, BATCHES)
    assert hashlib.sha256(recorded.database.read_bytes()).hexdigest() == before


def test_several_processes_replay_a_run_together(recorded, tba, tmp_path):
    result = offline(tba, recorded, tmp_path / "two", "--replay", "--as-of", "2", "--processes", "2")
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(recorded.directory)[:2], abs=1e-5)


def test_a_replay_with_another_learning_rate_says_how_far_it_went_from_the_record(recorded, tba, tmp_path):
    result = offline(tba, recorded, tmp_path / "again", "--replay", train__learning_rate=1e-3)
    assert result.returncode == 0, result.stderr
    assert "largest difference" in result.stdout


def test_a_replay_that_was_interrupted_goes_on_to_the_same_losses(recorded, tba, tmp_path):
    directory = tmp_path / "again"
    assert offline(tba, recorded, directory, "--replay", "--as-of", "3").returncode == 0
    assert losses(directory) == losses(recorded.directory)[:3]
    result = offline(tba, recorded, directory, "--replay", "--resume")
    assert result.returncode == 0, result.stderr
    assert losses(directory) == losses(recorded.directory)


def test_another_sampler_takes_other_batches_of_the_same_data(recorded, tba, tmp_path):
    settings = {"buffer__recency_fraction": 0, "buffer__prompt_priority": "rank", "train__steps": 4}
    for name in ("one", "two"):
        result = offline(tba, recorded, tmp_path / name, **settings)
        assert result.returncode == 0, result.stderr
    one, two = (rows(tmp_path / name / "buffer.sqlite", BATCHES) for name in ("one", "two"))
    first = rows(recorded.database, BATCHES)
    assert one == two
    assert [row[2] for row in one] != [row[2] for row in first[: len(one)]]
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


def test_as_of_leaves_out_what_came_later(recorded, tba, tmp_path):
    result = offline(tba, recorded, tmp_path / "early", "--as-of", "3", train__steps=3, buffer__recency_fraction=0)
    assert result.returncode == 0, result.stderr
    ((newest,),) = rows(recorded.database, "SELECT newest_trajectory FROM batches WHERE step = 3")
    ((total,),) = rows(recorded.database, "SELECT COUNT(*) FROM trajectory_rows")
    ((largest,),) = rows(tmp_path / "early/buffer.sqlite", "SELECT MAX(trajectory) FROM consumption_rows")
    assert largest <= newest < total
    # Staleness counts from the step that was gone back to.
    ((oldest,),) = rows(tmp_path / "early/buffer.sqlite", "SELECT MAX(staleness) FROM consumption_rows")
    assert 0 <= oldest <= 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--offline"], "--offline needs --buffer FILE"),
        (["--as-of", "3"], "--as-of needs --offline"),
        (["--replay"], "--replay needs --offline"),
        (["--offline", "--buffer", "nothing.sqlite"], "nothing.sqlite does not exist"),
        (["--offline", "--buffer", "RECORDED", "--as-of", "99"], f"--as-of can be 0 to {STEPS - 1}"),
        (["--offline", "--buffer", "RECORDED", "--source-run", "other"], "holds the runs test: choose one"),
        (["--offline", "--buffer", "RECORDED"], "is this run's own database"),
    ],
)
def test_what_cannot_be_is_one_sentence(recorded, tba, flags, sentence):
    flags = [str(recorded.database) if flag == "RECORDED" else flag for flag in flags]
    result = tba("train", "--cpu", "--config", recorded.file, *flags, timeout=60)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_too_little_data_is_one_sentence_since_nobody_adds_to_it(recorded, tba, tmp_path):
    result = offline(tba, recorded, tmp_path / "short", train__prompts_per_step=65, buffer__recency_fraction=0)
    assert result.returncode != 0
    assert "offline there will be no more" in result.stderr


def test_an_offline_run_is_evaluated_and_drawn_as_any_other(recorded, tba, tmp_path):
    directory = tmp_path / "early"
    assert offline(tba, recorded, directory, "--as-of", "3", train__steps=2).returncode == 0
    where = ["--config", recorded.file, "--set", f"run.dir={directory}"]
    result = tba("eval", "--cpu", "--json", *where)
    assert [row["step"] for row in json.loads(result.stdout)] == [2], result.stderr
    assert tba("plot", *where).returncode == 0
    assert (directory / "run.png").stat().st_size > 10_000
