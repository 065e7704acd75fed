"""Loading a model directory of someone else: its code never runs, and it does not build layers for hours."""

import json
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError
from tba.common.weights.pretrained import load_tokenizer
from tba.searcher.engines.transformers_engine import TransformersEngine
from tba.searcher.evaluation.models import ReferenceModel, SentenceEncoder
from tba.searcher.scoring.classifier import check_files
from tba.tests.helpers.classifiers import EXAMPLE_MODEL
from tba.tests.helpers.engines import end_tokens
from tba.trainer.model.scorer import load_model
from tba.trainer.preflight.shape import meta_model

EVIL = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig as Own, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Words
"""
LOADERS = {
    "trainer": lambda path: load_model(Path(path), torch.device("cpu")),
    "preflight": lambda path: meta_model(Path(path)),
    "tokenizer": lambda path: load_tokenizer(Path(path)),
    "engine": lambda path: TransformersEngine(
        path, dtype="float32", device="cpu", max_in_flight=1, seed=0, canary_tolerance=1e-3, stopping=end_tokens(path)
    ),
    "reference": partial(ReferenceModel, device="cpu", dtype="float32"),
    "encoder": partial(SentenceEncoder, device="cpu"),
    "classifier": lambda path: check_files(RewardModelSection(path=path)),
}


def changed_model(directory: Path, **config: object) -> Path:
    """A copy of the example model whose config.json has other values."""
    shutil.copytree(EXAMPLE_MODEL, directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | config))
    return directory


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_code_of_a_model_does_not_run_also_if_standard_input_says_yes(tmp_path, monkeypatch, load):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    classes = dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"), "evil.Model")
    model = changed_model(
        tmp_path / "m", model_type="own", num_labels=1, auto_map={"AutoConfig": "evil.Own", **classes}
    )
    mark = tmp_path / "ran"
    (model / "evil.py").write_text(EVIL.format(mark=str(mark)))
    words = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "evil.Words"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=rf"{model} needs Python code of its own .*, which tba does not run: use"):
        load(str(model))
    assert not mark.exists()


@pytest.mark.parametrize("layers", [-3, 0, 10**9])
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_model_without_layers_or_of_a_billion_is_refused_at_once(tmp_path, load, layers):
    model = changed_model(tmp_path / "m", num_hidden_layers=layers)
    with pytest.raises(
        ConfigError, match=rf"config.json: num_hidden_layers is {layers}, and a model has at least 1 and at most 2000"
    ):
        load(str(model))


def test_code_of_the_hub_that_a_configuration_names_is_refused(tmp_path):
    model = changed_model(tmp_path / "m", _attn_implementation="kernels-community/flash-attn")
    with pytest.raises(ConfigError, match=r"config.json: _attn_implementation names code of the hub, which tba does"):
        load_model(model, torch.device("cpu"))


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="the package is installed")
def test_a_model_whose_package_is_missing_is_refused_with_its_name(tmp_path):
    model = changed_model(tmp_path / "m", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: .*bitsandbytes"):
        load_model(model, torch.device("cpu"))
