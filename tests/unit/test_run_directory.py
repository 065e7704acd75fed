"""One `tba run` for a directory; locks of one process exclude each other as those of two do."""

import pytest

from tba.common.config import Config
from tba.common.errors import EXIT_FAILED, RunTaken
from tba.deploy import run_directory
from tba.deploy.launcher import evaluate_in_child
from tba.deploy.run_directory import await_former, sole_launcher, tell_ending


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


def test_a_directory_that_nobody_runs_is_not_waited_for_and_none_is_made(config):
    await_former(config, never, pytest.fail)
    assert not config.run.dir.exists()
    with sole_launcher(config):
        pass
    await_former(config, never, pytest.fail)


def test_one_that_goes_on_is_refused_with_a_code_on_which_systemd_tries_again(config):
    with sole_launcher(config), pytest.raises(RunTaken, match=r"another `tba run` \(pid \d+ on .+\)") as refused:
        await_former(config, never, pytest.fail)
    assert refused.value.exit_code == EXIT_FAILED


def test_one_that_does_not_end_is_given_up_after_the_time_of_its_children_and_was_told_once(config, monkeypatch):
    monkeypatch.setattr(run_directory, "_MARGIN_SECONDS", 1.7)
    said = []
    with sole_launcher(config):
        tell_ending(config)
        with pytest.raises(RunTaken, match="has not ended within 2 s: "):
            await_former(config, never, said.append)
    assert len(said) == 1
    assert "is still ending: waiting for it, 2 s at most" in said[0]


def test_who_is_stopped_waits_no_longer(config):
    said = []
    with sole_launcher(config):
        tell_ending(config)
        await_former(config, lambda: bool(said), said.append)
    assert len(said) == 1


def test_the_next_holder_is_not_taken_for_one_that_ends(config):
    with sole_launcher(config):
        tell_ending(config)
    with sole_launcher(config), pytest.raises(RunTaken, match="is being run already"):
        await_former(config, never, pytest.fail)


def test_one_that_is_stopped_before_its_last_evaluation_says_that_it_ends(config):
    lock_file = config.run.dir / "launcher.lock"
    with sole_launcher(config):
        assert "ending" not in lock_file.read_text()
        assert not evaluate_in_child(config, [], stop=lambda: True)
        assert "ending" in lock_file.read_text()
