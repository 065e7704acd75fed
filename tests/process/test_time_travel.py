"""Offline training from the file of a recorded run: replays of its batches, and new draws from its data."""

import dataclasses
from pathlib import Path

import pytest

from tba.tests.helpers.buffer import ask
from tba.tests.process.conftest import arithmetic, changed

STEPS = 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("time-travel")


@pytest.fixture
def recorded(workplace, make_config_in, tba):
    """A run recorded by real processes, once for all tests of this module."""
    sections = arithmetic(
        task={"limit": 64},
        # More than an archive leaves, also where the searcher is slower than the trainer.
        buffer={"recency_window": 4, "recency_fraction": 0.5, "min_fill": 64},
        search={"cpu_searchers": 1},
        train={"steps": STEPS, "checkpoint_every": 100},
    )
    run = make_config_in(workplace, **sections)
    if not run.directory.exists():
        result = tba("run", run.file, timeout=300)
        assert result.returncode == 0, result.stderr
    return run


@pytest.fixture
def offline(recorded, tba_here, tmp_path):
    """Return a function that trains offline on the recorded run, in this process. Returns the run and the output."""

    def train(name: str, *flags: str, **settings: object):
        run = dataclasses.replace(recorded, directory=tmp_path / name)
        sets = changed(*(f"{key.replace('__', '.')}={value}" for key, value in settings.items()))
        where = ("--config", run.file, "--set", f"run.dir={run.directory}", *sets)
        done = tba_here("train", "--cpu", *where, "--offline", "--buffer", recorded.database, *flags)
        assert done.exit_code == 0, done.message
        return run, done.output

    return train


def losses(run) -> list[float]:
    return [line["loss"] for line in run.lines()]


BATCHES = "SELECT step, slot, trajectory, staleness FROM consumption ORDER BY step, slot"


def test_a_replay_reproduces_the_recorded_losses_bit_for_bit(recorded, offline):
    again, output = offline("again", "--replay")
    assert f"replayed {STEPS} steps; losses: bit for bit the same" in output
    assert losses(again) == losses(recorded)
    assert again.query(BATCHES) == recorded.query(BATCHES)


def test_a_replay_of_archived_tokens_reproduces_the_losses_bit_for_bit(recorded, tba_here, tmp_path):
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy/buffer.sqlite"
    assert tba_here("buffer", "backup", copy, "-b", recorded.database).exit_code == 0
    sets = changed("search.samples_per_prompt=4", "buffer.max_trajectories=32", "buffer.min_fill=0")
    moved = tba_here("buffer", "archive", "old", "-b", copy, *sets, "--keep-steps", 0)
    assert moved.exit_code == 0, moved.message
    used = "SELECT COUNT(*) FROM consumption c JOIN trajectories t ON t.id = c.trajectory WHERE t.archive IS NOT NULL"
    assert ask(copy, used)[0][0] > 0
    where = ("--config", recorded.file, "--set", f"run.dir={tmp_path / 'replay'}")
    done = tba_here("train", "--cpu", *where, "--offline", "--buffer", copy, "--replay")
    assert f"replayed {STEPS} steps; losses: bit for bit the same" in done.output


def test_a_replay_with_another_learning_rate_reports_the_largest_difference(offline):
    assert "largest difference" in offline("again", "--replay", train__learning_rate=1e-3)[1]


def test_a_resumed_replay_has_the_same_losses(recorded, offline):
    assert losses(offline("again", "--replay", "--as-of", "3")[0]) == losses(recorded)[:3]
    assert losses(offline("again", "--replay", "--resume")[0]) == losses(recorded)


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


def test_an_offline_run_can_be_evaluated_and_plotted(recorded, offline, tba_here):
    run, _ = offline("early", "--as-of", "3", train__steps=2)
    where = ("--config", run.file, "--set", f"run.dir={run.directory}")
    result = tba_here("eval", "--cpu", "--json", *where)
    assert [row["step"] for row in result.json] == [2], result.message
    assert "is evaluated, in" in result.message, "without a terminal there is a line for each snapshot"
    assert tba_here("report", "--out", run.directory / "run.png", *where).exit_code == 0
    assert (run.directory / "run.png").stat().st_size > 10_000
    status = tba_here("status", *where).output
    assert f"`tba train --offline --buffer {recorded.database} --resume` with more train.steps extends it" in status
    refused = tba_here("run", *where, "--resume")
    assert (refused.exit_code, "`tba train --offline` continues it" in refused.message) == (78, True), refused.message
