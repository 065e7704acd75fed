"""A run continues with its task and its model; what does not change its rows may change."""

import shutil
import time
from contextlib import closing
from typing import Any

import pytest

from tba.buffer.store.recorded_work import MODEL_WEIGHTS, model_weights, refuse_other_work
from tba.buffer.store.starts import IMPORT, as_recorded
from tba.buffer.store.store import Store
from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError

OPTIONS: dict[str, Any] = {"task": {"name": "tasks/own.py:Own", "options": {"digits": 2}}}


def config_of(directory, path, **sections) -> Config:
    defaults = {"run": {"dir": str(directory)}, "model": {"path": str(path)}, **OPTIONS}
    return Config.model_validate(defaults | sections)


def start(config: Config, *, lease: bool, **added) -> None:
    """Record a start, and lease a prompt to a searcher."""
    settings = {**config.model_dump(mode="json"), MODEL_WEIGHTS: model_weights(config), **added}
    with closing(Store(config.database, durability="process")) as store:
        run = store.open_run(config.run.name, seed=0, config=settings, software={})
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
    found = as_recorded(resolve(None, environment={}, assignments=sets))
    assert (found.run.dir, found.database, found.search.max_tokens) == (moved, moved / "buffer.sqlite", 7)
    assert (found.model.path, found.search.gpus, found.task.options) == ("here", "cpu", {"digits": 2})
    assert (found.reward_model.url, found.reward_model.api_key.get_secret_value()) == ("http://a", "")
    file = tmp_path / "own.toml"
    file.write_text("[search]\nmax_tokens = 9\n")
    assert as_recorded(resolve(file, environment={}, assignments=sets)).model.path == ""


CHANGES: dict[str, dict[str, Any]] = {
    "task.name": {"task": {"name": "tasks/own.py:Other", "options": {"digits": 2}}},
    "task.options": {"task": {"name": "tasks/own.py:Own", "options": {"digits": 3}}},
    "task.system": {"task": {**OPTIONS["task"], "system": "be short"}},
    "task.limit": {"task": {**OPTIONS["task"], "limit": 5}},
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_task_is_refused(run, model, key):
    with pytest.raises(ConfigError, match=rf"run run with .* {key} was .* and is .*\. Set another run.dir"):
        refuse_other_work(config_of(run.run.dir, model, **CHANGES[key]))


def test_an_evaluation_may_use_other_prompts_of_the_task(run, model):
    for key in ("task.system", "task.limit"):
        refuse_other_work(config_of(run.run.dir, model, **CHANGES[key]), evaluates=True)
    with pytest.raises(ConfigError, match="task.options was"):
        refuse_other_work(config_of(run.run.dir, model, **CHANGES["task.options"]), evaluates=True)


def test_another_part_of_a_mixture_is_refused_and_another_weight_is_not(tmp_path, model):
    def of(digits: int, weight: float) -> Config:
        parts = [{"name": "arithmetic", "options": {"digits": digits}, "weight": weight}]
        return config_of(tmp_path / "mixed", model, task={"name": "mixture", "mixture": parts})

    start(of(2, 1.0), lease=True)
    refuse_other_work(of(2, 3.0))
    with pytest.raises(ConfigError, match="task.mixture was"):
        refuse_other_work(of(3, 1.0))


def test_what_does_not_change_the_rows_may_change(run, model, tmp_path):
    moved = model.rename(tmp_path / "moved")
    for sections in (
        {"train": {"steps": 9000, "learning_rate": 1e-5, "gpu": "3"}, "search": {"engine": "transformers"}},
        {"task": {**OPTIONS["task"], "name": "elsewhere/own.py:Own", "held_out_limit": 3, "reward_seconds": 99}},
        {"model": {"path": str(moved), "dtype": "float32"}},
        {"model": {"path": ""}},
    ):
        refuse_other_work(config_of(run.run.dir, moved, **sections))


def test_the_servers_of_a_task_may_move_and_not_change(tmp_path, model):
    def of(url: str, seconds: float, replies: int, **more) -> Config:
        options = {"victim": {"url": url, "replies": replies}, "request_seconds": seconds}
        part = {"name": "own.py:Own", "options": options}
        return config_of(tmp_path / "run", model, task={"name": "mixture", "mixture": [part]} if more else part)

    for mixture in ({}, {"mixture": True}):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        start(of("http://node0:8001", 30, 5, **mixture), lease=True)
        refuse_other_work(of("http://node7:9001", 60, 5, **mixture))
        with pytest.raises(ConfigError, match='"replies": 5.* and is .*"replies": 6'):
            refuse_other_work(of("http://node0:8001", 30, 6, **mixture))


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
