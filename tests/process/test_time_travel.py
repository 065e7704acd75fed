"""Offline training from the file of a recorded run: replays of its batches, and new draws from its data."""

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tba.tests.process.conftest import arithmetic

STEPS = 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("time-travel")


@pytest.fixture
def recorded(workplace, make_config_in, tba):
    """A run recorded by real processes, once for all tests of this module."""
    sections = arithmetic(
        task={"limit": 64},
        buffer={"recency_window": 4, "recency_fraction": 0.5},
        search={"cpu_searchers": 1},
        train={"steps": STEPS, "checkpoint_every": 100},
    )
    run = make_config_in(workplace, **sections)
    if not run.directory.exists():
        result = tba("run", run.file, timeout=300)
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


def rows(database: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection, connection:
        return connection.execute(sql).fetchall()


BATCHES = "SELECT step, slot, trajectory, staleness FROM consumption ORDER BY step, slot"


def test_a_replay_reproduces_the_recorded_losses_bit_for_bit(recorded, tba, tmp_path):
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


def test_a_replay_with_another_learning_rate_reports_the_largest_difference(recorded, tba, tmp_path):
    result = offline(tba, recorded, tmp_path / "again", "--replay", train__learning_rate=1e-3)
    assert result.returncode == 0, result.stderr
    assert "largest difference" in result.stdout


def test_a_resumed_replay_has_the_same_losses(recorded, tba, tmp_path):
    directory = tmp_path / "again"
    assert offline(tba, recorded, directory, "--replay", "--as-of", "3").returncode == 0
    assert losses(directory) == losses(recorded.directory)[:3]
    result = offline(tba, recorded, directory, "--replay", "--resume")
    assert result.returncode == 0, result.stderr
    assert losses(directory) == losses(recorded.directory)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--offline"], "--offline needs --buffer FILE"),
        (["--as-of", "3"], "--as-of needs --offline"),
        (["--replay"], "--replay needs --offline"),
        (["--offline", "--buffer", "nothing.sqlite"], "nothing.sqlite does not exist"),
        (["--offline", "--buffer", "RECORDED", "--as-of", "99"], f"--as-of can be 0 to {STEPS - 1}"),
        (["--offline", "--buffer", "RECORDED", "--source-run", "other"], "holds the runs test: name one with"),
        (["--offline", "--buffer", "RECORDED"], "is this run's own database"),
    ],
)
def test_invalid_options_give_one_sentence(recorded, tba_here, flags, sentence):
    flags = [str(recorded.database) if flag == "RECORDED" else flag for flag in flags]
    refused = tba_here("train", "--cpu", "--config", recorded.file, *flags)
    assert refused.exit_code == 2
    assert sentence in refused.message


def test_an_offline_run_can_be_evaluated_and_plotted(recorded, tba, tmp_path):
    directory = tmp_path / "early"
    assert offline(tba, recorded, directory, "--as-of", "3", train__steps=2).returncode == 0
    where = ["--config", recorded.file, "--set", f"run.dir={directory}"]
    result = tba("eval", "--cpu", "--json", *where)
    assert [row["step"] for row in json.loads(result.stdout)] == [2], result.stderr
    assert "is evaluated, in" in result.stderr, "without a terminal there is a line for each snapshot"
    assert tba("report", "--out", directory / "run.png", *where).returncode == 0
    assert (directory / "run.png").stat().st_size > 10_000
    status = tba("status", *where).stdout
    assert f"`tba train --offline --buffer {recorded.database} --resume` with more train.steps extends it" in status
    refused = tba("run", *where, "--resume")
    assert (refused.returncode, "`tba train --offline` continues it" in refused.stderr) == (2, True), refused.stderr
