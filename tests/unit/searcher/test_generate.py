"""`tba generate`: what is refused before an engine starts, and the engine where vLLM is not installed."""

import importlib.util
import sys

import pytest

from tba.cli.models import _with_installed_engine
from tba.common.config.layers import resolve
from tba.common.errors import UsageError
from tba.common.run_snapshots import check_export, find_source
from tba.searcher.generate import Generator


def test_a_model_without_a_chat_template_is_refused_for_a_conversation(example_model):
    with pytest.raises(UsageError, match="has no chat template: leave out --chat"):
        Generator(resolve(None).config, example_model, device="cpu", chat=True)


@pytest.mark.parametrize(
    ("installed", "chosen", "engine"),
    [(True, (), "vllm"), (False, (), "transformers"), (False, ("search.engine=vllm",), "vllm")],
)
def test_transformers_generates_where_vllm_is_not_installed_and_was_not_asked_for(
    monkeypatch, capsys, installed, chosen, engine
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None if name == "vllm" else find(name))
    found = _with_installed_engine(resolve(None, environment={}, assignments=chosen).config, chosen=bool(chosen))
    assert found.search.engine == engine
    assert ("is not installed: generating with Transformers" in capsys.readouterr().err) == (engine == "transformers")


def test_what_cannot_be_a_model_is_named(tmp_path, example_model):
    config = resolve(None).config
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="nowhere does not exist: name a run directory"):
        find_source(config, tmp_path / "nowhere", None)
    with pytest.raises(UsageError, match="file is a file: name a run directory"):
        find_source(config, tmp_path / "file", None)
    assert find_source(config, example_model, None) == example_model
    with pytest.raises(UsageError, match="is a model directory already: copy it"):
        check_export(example_model, tmp_path / "out")


def test_an_empty_prompt_is_refused_before_torch_is_loaded(tba_here, monkeypatch, example_model):
    # An import of this module, which loads torch, would fail.
    monkeypatch.setitem(sys.modules, "tba.searcher.generate", None)
    done = tba_here("generate", "--model", example_model, "--cpu")
    assert (done.exit_code, "the prompt on standard input is empty" in done.message) == (2, True)


def test_wrong_arguments_of_an_export_are_refused_before_torch_is_loaded(tba_here, monkeypatch):
    # An import of this module, which loads torch, would fail.
    monkeypatch.setitem(sys.modules, "tba.trainer.export", None)
    done = tba_here("export-model", "nowhere", "out")
    assert (done.exit_code, "nowhere does not exist" in done.message) == (2, True)
