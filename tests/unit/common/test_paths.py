"""Paths of a configuration, also those that this user may not access."""

import re

import pytest

from tba.common.config import Config
from tba.common.config.paths import check_data, check_directories, nearest_existing
from tba.common.errors import ConfigError
from tba.common.weights.model_files import check_model
from tba.tests.helpers.users import closed_directory


@pytest.fixture
def closed_folder():
    """A directory that the user of the test may not enter."""
    with closed_directory(0o000) as folder:
        yield folder


def test_a_path_in_a_directory_without_access_is_not_writable(closed_folder):
    config = Config.model_validate({"run": {"dir": closed_folder / "runs/one"}})
    with pytest.raises(PermissionError):
        (closed_folder / "runs").exists()
    with pytest.raises(ConfigError, match=f"run.dir .*/one is not writable: {re.escape(str(closed_folder))} belongs"):
        check_directories(config)
    assert nearest_existing(config.run.dir) == closed_folder


def test_a_model_or_prompt_file_in_a_directory_without_access_does_not_exist(closed_folder):
    with pytest.raises(ConfigError, match="model.path .* does not exist"):
        check_model(str(closed_folder / "model"))
    task = Config.model_validate({"task": {"name": "gsm8k", "train": str(closed_folder / "train.jsonl")}}).task
    with pytest.raises(ConfigError, match=r"task.train .*/train.jsonl does not exist"):
        check_data(task)


def test_prompt_files_are_checked_only_for_a_task_that_reads_them():
    keys = {"train": "missing.jsonl", "test": "missing.json"}
    check_data(Config.model_validate({"task": keys}).task)
    check_data(Config.model_validate({"task": keys | {"name": "my.own:task"}}).task)
    with pytest.raises(ConfigError, match=r"task.train missing.jsonl does not exist"):
        check_data(Config.model_validate({"task": keys | {"name": "gsm8k"}}).task)
