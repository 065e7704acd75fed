"""Where a configuration names what this user may not see."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.common.model_files import check_model
from tba.common.paths import check_data, check_places, nearest_existing


@pytest.fixture
def closed_folder():
    """A directory that its user may not enter: root may enter all, so another user then."""
    user = os.getuid()
    if user == 0:
        os.setresuid(65534, 65534, 0)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o000)
    yield folder
    if user == 0:
        os.setresuid(0, 0, 0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_place_in_a_directory_that_cannot_be_entered_cannot_be_written_to(closed_folder):
    config = Config.model_validate({"run": {"dir": closed_folder / "runs/one"}})
    with pytest.raises(PermissionError):
        (closed_folder / "runs").exists()
    with pytest.raises(ConfigError, match=f"run.dir .*/one cannot be written to: {closed_folder} belongs to another"):
        check_places(config)
    assert nearest_existing(config.run.dir) == closed_folder


def test_nor_is_a_model_or_a_file_of_prompts_there(closed_folder):
    with pytest.raises(ConfigError, match="model.path .* does not exist"):
        check_model(str(closed_folder / "model"))
    task = Config.model_validate({"task": {"name": "gsm8k", "train": str(closed_folder / "train.jsonl")}}).task
    with pytest.raises(ConfigError, match=r"task.train .*/train.jsonl does not exist"):
        check_data(task)


def test_files_of_prompts_are_looked_for_only_where_the_task_reads_them():
    keys = {"train": "missing.jsonl", "test": "missing.json"}
    check_data(Config.model_validate({"task": keys}).task)
    check_data(Config.model_validate({"task": keys | {"name": "my.own:task"}}).task)
    with pytest.raises(ConfigError, match=r"task.train missing.jsonl does not exist"):
        check_data(Config.model_validate({"task": keys | {"name": "gsm8k"}}).task)
