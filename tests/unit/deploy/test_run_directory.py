"""A directory belongs to one `tba run`. Two locks in one process exclude each other like those of two processes."""

from contextlib import closing
from typing import Any

import pytest

from tba.buffer.server.start import serve
from tba.buffer.store.store import Store
from tba.buffer.tools.stats import read_results
from tba.cli.checks import Plan, check_start
from tba.common.config import Config
from tba.common.errors import ConfigError, RunTaken, UsageError
from tba.deploy import run_directory
from tba.deploy.launcher import evaluate_in_child
from tba.deploy.run_directory import ENDING, await_previous, last_launch, mark, refuse_start, sole_launcher
from tba.tests.helpers.checks import not_none


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
        mark(config, ENDING)
        with pytest.raises(RunTaken, match="has not ended within 2 s: "):
            await_previous(config, never, reports.append)
    assert len(reports) == 1
    assert "is still ending: waiting for it, 2 s at most" in reports[0]


@pytest.mark.slow
def test_a_stop_signal_ends_the_wait_and_the_next_holder_is_not_marked_as_ending(config):
    reports: list[str] = []
    with sole_launcher(config):
        mark(config, ENDING)
        await_previous(config, lambda: bool(reports), reports.append)
    assert len(reports) == 1
    assert not_none(last_launch(config.run.dir)).ending
    with sole_launcher(config), pytest.raises(RunTaken, match="is in use by another"):
        await_previous(config, never, pytest.fail)


def test_a_run_that_is_stopped_before_its_evaluation_is_marked_as_ending(config):
    lock_file = config.run.dir / "launcher.lock"
    with sole_launcher(config):
        assert "ending" not in lock_file.read_text()
        assert not evaluate_in_child(config, [], stop=lambda: True, tell=pytest.fail)
        assert "ending" in lock_file.read_text()


def refusal(config: Config, *, resume: bool, **changes: Any) -> str:
    """Return why a run does not start, after `changes` of what its database says of the run."""
    results = [result | changes for result in read_results(config.database)]
    with pytest.raises((UsageError, ConfigError)) as refused:
        refuse_start(config, results, resume=resume)
    return str(refused.value)


@pytest.fixture
def own(tmp_path, example_model) -> Config:
    """The run `own`, with a database and metrics."""
    config = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "name": "own"},
            "model": {"path": str(example_model)},
            "task": {"name": "arithmetic"},
            "search": {"engine": "transformers", "gpus": "cpu"},
            "train": {"gpu": "cpu", "steps": 30},
        }
    )
    config.run.dir.mkdir()
    with closing(Store(config.database, durability="process")) as store:
        store.open_run("own", seed=0, config={"train": {"steps": 30}}, software={})
    (config.run.dir / "metrics.jsonl").write_text('{"step": 0}\n')
    return config


@pytest.mark.parametrize("resume", [True, False])
def test_a_start_under_another_name_is_refused_and_writes_nothing(own, resume):
    renamed = own.model_copy(update={"run": own.run.model_copy(update={"name": "doubling"})})
    before = own.database.read_bytes()
    sentence = refusal(renamed, resume=resume)
    assert 'belongs to run own, and run.name is doubling: set run.name = "own"' in sentence
    assert own.database.read_bytes() == before
    with pytest.raises(ConfigError, match='belongs to run own, and run.name is doubling: set run.name = "own"'):
        serve(renamed, lambda: True)
    assert [row["run"] for row in read_results(own.database)] == ["own"]
    check_start(Plan(own, resume=True))


def test_a_fresh_start_in_the_database_of_an_offline_run_is_refused_wherever_that_is(own, tmp_path):
    elsewhere = own.model_copy(update={"run": own.run.model_copy(update={"dir": tmp_path / "new"}),
                                       "buffer": own.buffer.model_copy(update={"database": own.database})})  # fmt: skip
    refuse_start(elsewhere, read_results(own.database), resume=False)
    assert "was trained offline from /old.sqlite" in refusal(elsewhere, resume=False, source="/old.sqlite")


def test_a_run_is_resumed_until_it_is_finished_and_then_only_extended(own):
    assert "already holds a run: add --resume" in refusal(own, resume=False)
    check_start(Plan(own, resume=True))
    sentence = refusal(own, resume=True, steps=31)
    assert "holds run own, which has made 31 steps, and train.steps is 30: set a larger one" in sentence
    finished = {"steps": 30, "finished": True}
    for resume in (True, False):
        sentence = refusal(own, resume=resume, **finished)
        assert "run own, which is finished (30 of 30 steps): extend it with --resume" in sentence
    longer = own.model_copy(update={"train": own.train.model_copy(update={"steps": 31})})
    refuse_start(longer, [result | finished for result in read_results(own.database)], resume=True)
    assert "finished (30 of 30 steps)" in refusal(longer, resume=False, **finished)


def test_a_run_on_the_cpu_does_not_ask_a_broken_driver(own, tmp_path, monkeypatch):
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_start(Plan(own, resume=True))
    on_gpus = own.model_copy(update={"train": own.train.model_copy(update={"gpu": "0"})})
    with pytest.raises(UsageError, match="nvidia-smi"):
        check_start(Plan(on_gpus, resume=True))
