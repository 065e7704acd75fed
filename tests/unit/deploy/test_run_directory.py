"""A directory belongs to one `tba run`. Two locks in one process exclude each other like those of two processes."""

import pytest

from tba.common.config import Config
from tba.common.errors import RunTaken
from tba.deploy import run_directory
from tba.deploy.launcher import evaluate_in_child
from tba.deploy.run_directory import await_previous, mark_ending, sole_launcher


@pytest.fixture
def config(tmp_path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "buffer": {"address": f"ipc://{tmp_path}/buffer.socket"},
            "launch": {"drain_seconds": 0.1},
        }
    )


def never() -> bool:
    return False


def test_an_unused_directory_causes_no_wait_and_is_not_created(config):
    await_previous(config, never, pytest.fail)
    assert not config.run.dir.exists()
    with sole_launcher(config):
        pass
    await_previous(config, never, pytest.fail)


@pytest.mark.slow
def test_the_wait_for_the_previous_run_ends_after_a_deadline_and_is_reported_once(config, monkeypatch):
    monkeypatch.setattr(run_directory, "_MARGIN_SECONDS", 1.7)
    reports: list[str] = []
    with sole_launcher(config):
        mark_ending(config)
        with pytest.raises(RunTaken, match="has not ended within 2 s: "):
            await_previous(config, never, reports.append)
    assert len(reports) == 1
    assert "is still ending: waiting for it, 2 s at most" in reports[0]


def test_a_stop_signal_ends_the_wait(config):
    reports: list[str] = []
    with sole_launcher(config):
        mark_ending(config)
        await_previous(config, lambda: bool(reports), reports.append)
    assert len(reports) == 1


@pytest.mark.slow
def test_the_next_holder_is_not_marked_as_ending(config):
    with sole_launcher(config):
        mark_ending(config)
    with sole_launcher(config), pytest.raises(RunTaken, match="is in use by another"):
        await_previous(config, never, pytest.fail)


def test_a_run_that_is_stopped_before_its_evaluation_is_marked_as_ending(config):
    lock_file = config.run.dir / "launcher.lock"
    with sole_launcher(config):
        assert "ending" not in lock_file.read_text()
        assert not evaluate_in_child(config, [], stop=lambda: True)
        assert "ending" in lock_file.read_text()
