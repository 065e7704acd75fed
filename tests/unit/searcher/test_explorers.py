"""What `search.policy` may name, and what it refuses before an engine starts."""

import json
import shutil

import pytest

from tba.common.config import Config
from tba.common.errors import ConfigError, TbaError
from tba.common.weights.snapshot import MANIFEST
from tba.searcher.build import find_policy
from tba.tests.conftest import EXAMPLE_MODEL


def config_of(policy, **run):
    return Config.model_validate({"model": {"path": str(EXAMPLE_MODEL)}, "search": {"policy": str(policy)}, "run": run})


@pytest.fixture
def other(tmp_path):
    """A copy of the example's model."""
    return shutil.copytree(EXAMPLE_MODEL, tmp_path / "other")


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_an_explorer_is_a_model_of_the_same_tokenizer_or_a_kept_snapshot(other, tmp_path):
    assert find_policy(config_of("")) is None
    assert find_policy(config_of(other)) == other
    kept = shutil.copytree(other, tmp_path / "run/snapshots/v00000004")
    (kept / MANIFEST).write_text("{}")
    assert find_policy(config_of("v4", dir=str(tmp_path / "run"))) == kept
    with pytest.raises(TbaError, match="has no version 5; the newest that it has: 4"):
        find_policy(config_of("v5", dir=str(tmp_path / "run")))


def test_a_model_of_another_tokenizer_or_with_more_token_ids_is_refused(other):
    def swap(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]

    change(other / "config.json", lambda content: content.update(vocab_size=content["vocab_size"] + 1))
    with pytest.raises(
        ConfigError, match=r"search.policy .* could sample what model.path has no embedding of: use an explorer with as"
    ):
        find_policy(config_of(other))
    change(other / "config.json", lambda content: content.update(vocab_size=content["vocab_size"] - 1))
    plain = (other / "tokenizer.json").read_text()
    change(other / "tokenizer.json", lambda content: content["model"]["vocab"].pop("7"))
    with pytest.raises(ConfigError, match="such as '7', which is None in search.policy"):
        find_policy(config_of(other))
    (other / "tokenizer.json").write_text(plain)
    change(other / "tokenizer.json", swap)
    with pytest.raises(
        ConfigError, match=r"model.path .* has another tokenizer than search.policy .*: 2 of .* such as '[78]'"
    ):
        find_policy(config_of(other))


def test_what_is_no_directory_here_and_an_explorer_with_an_endpoint_are_refused(other):
    with pytest.raises(ConfigError, match="`hf download someone/strong`"):
        find_policy(config_of("someone/strong"))
    with pytest.raises(ConfigError, match="has no config.json"):
        find_policy(config_of(other.parent))
    with pytest.raises(ValueError, match="leave out search.policy, or search.serve"):
        Config.model_validate({"search": {"policy": str(other), "serve": "8000"}})
