"""A model directory of someone else: its code never runs, and errors name whether files or memory are at fault."""

import json
import os
import re
import shutil
import stat
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tba.buffer.tools.tokenizer import decoder_of
from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError, OutOfMemory
from tba.common.system.load_errors import loading
from tba.common.weights.model_files import check_model, local_model, share_weights, weight_files
from tba.common.weights.pretrained import end_tokens, load_tokenizer
from tba.searcher.evaluation.models import ReferenceModel, SentenceEncoder
from tba.searcher.scoring.classifier import check_files
from tba.tests.helpers.chat_tokenizers import chat_tokenizer
from tba.tests.helpers.classifiers import EXAMPLE_MODEL
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.trainer import save_tiny_model
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
    "engine": cpu_engine,
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


REFUSED = [
    *(
        ({"num_hidden_layers": layers}, f"num_hidden_layers is {layers}, and a model has at least 1 and at most 2000")
        for layers in (-3, 0, 10**9)
    ),
    # It would return tuples.
    ({"return_dict": False}, "return_dict = False cannot be used: correct or remove it"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_model_that_no_program_could_use_is_refused_at_once(tmp_path, load, fields, words):
    model = changed_model(tmp_path / "m", **fields)
    with pytest.raises(ConfigError, match=rf"config.json: {words}"):
        load(str(model))


UNREAD = [
    ({"dtype": "auto"}, "dtype = 'auto'"),
    ({"torch_dtype": "auto"}, "torch_dtype = 'auto'"),
    ({"dtype": "bf16"}, "dtype = 'bf16'"),
    ({"dtype": "torch.bfloat16"}, "dtype = 'torch.bfloat16'"),
    ({"text_config": {"dtype": "auto"}}, "dtype = 'auto'"),
    ({"quantization_config": {}}, "quantization_config = {}"),
    ({"quantization_config": []}, r"quantization_config = \[\]"),
    ({"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
    ({"_attn_implementation": "kernels-community/flash-attn"}, "_attn_implementation names code of the hub"),
]


@pytest.mark.parametrize(("fields", "named"), UNREAD)
def test_a_value_of_a_configuration_that_cannot_be_used_is_named(tmp_path, fields, named):
    model = changed_model(tmp_path / "m", **fields)
    for load in (meta_model, partial(load_model, device=torch.device("cpu"))):
        with pytest.raises(
            ConfigError, match=rf"config.json: {named}.* (cannot be used: correct|which tba does not run)"
        ):
            load(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "half", "float64", None])
def test_every_type_that_transformers_reads_is_accepted(tmp_path, dtype):
    model = changed_model(tmp_path / "m", dtype=dtype, quantization_config=None)
    assert meta_model(model).dtype == load_model(model, torch.device("cpu")).dtype == torch.float32


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="the package is installed")
def test_a_model_whose_package_is_missing_is_refused_with_its_name(tmp_path):
    model = changed_model(tmp_path / "m", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: .*bitsandbytes"):
        cpu_engine(model)


SHORT = r"^out of memory while the model in /m was loaded on cuda:1 \(.*\): end other processes that"
FAULTY = r"^the model in /m cannot be loaded: .*: check that its files are complete and that"
ECC = "CUDA error: uncorrectable ECC error"
MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: out of memory\n\nmore"),
)
FAULTS = (OSError("no file"), ValueError("model"), KeyError("llama9"), SafetensorError("torn"), RuntimeError("size"))


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        *((lack, OutOfMemory, SHORT) for lack in MEMORY),
        *((fault, ConfigError, FAULTY) for fault in FAULTS),
        # Others are raised unchanged.
        *((other, type(other), f"^{other}$") for other in (RuntimeError(ECC), TypeError("a bug of ours"))),
    ],
)
def test_the_error_of_a_lack_of_memory_or_of_faulty_files_names_the_remedy(error, kind, sentence):
    with pytest.raises(kind, match=sentence), loading("the model in /m", torch.device("cuda:1")):
        raise error


@pytest.mark.parametrize("load", [LOADERS["reference"], cpu_engine], ids=["reference", "engine"])
def test_a_model_that_does_not_fit_on_its_device_raises_memory_short(monkeypatch, tmp_path, load):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path))

    def no_room(_):
        raise MemoryError

    monkeypatch.setattr(model, "to", no_room)

    def load_here(*_, output_loading_info=False, **__):
        return (model, {"missing_keys": []}) if output_loading_info else model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_here)
    with pytest.raises(OutOfMemory, match=re.escape(f"in {tmp_path} was loaded on cpu")):
        load(str(tmp_path))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_get_the_permissions_that_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        (tmp_path / "config.json").write_text("{}")
        for part in ("model-1", "model-2"):
            save_file({"w": np.zeros(3)}, tmp_path / f"{part}.safetensors")
    finally:
        os.umask(before)
    share_weights(tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.safetensors")] == [mode, mode]


def model_with(folder, *names):
    for name in ("config.json", "tokenizer.json", *names):
        (folder / name).write_text("{}")
    return folder


def test_the_weights_are_those_that_transformers_reads_one_file_before_those_that_an_index_names(tmp_path):
    # Stray ones are not among them.
    model = model_with(
        tmp_path, "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "a.safetensors"
    )
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors").unlink()
    assert [path.name for path in weight_files(model)] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["consolidated.safetensors"],
            r"neither model\.safetensors nor .*index\.json, .* but consolidated\.safetensors",
        ),
        (["model.safetensors", "adapter_config.json"], r"has an adapter_config\.json, .* merge it into its base model"),
    ],
)
def test_files_that_transformers_would_read_as_something_else_are_refused(tmp_path, names, words):
    with pytest.raises(ConfigError, match=words):
        check_model(str(model_with(tmp_path, *names)))


@pytest.mark.usefixtures("no_home")
def test_the_home_directory_of_a_user_without_one_has_no_model():
    with pytest.raises(ConfigError, match="model.path ~/model does not exist"):
        local_model("~/model")
    assert decoder_of("~/model") is None


@pytest.mark.parametrize("kind", ["GemmaTokenizer", "BertTokenizer"])
def test_a_class_that_cannot_encode_with_the_tokenizers_files_is_refused_with_what_to_do(kind, tmp_path):
    chat_tokenizer("qwen 2.5").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma", "vocab_size": 999}')
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    with pytest.raises(ConfigError, match=rf'as {kind}, which cannot encode a text .*"PreTrainedTokenizerFast" in'):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["mistral", "ministral", "mistral3"])
def test_mistrals_own_tokenizer_is_read_from_tokenizer_json_or_refused(tmp_path, kind):
    """The repositories of Mistral have both, and of transformers' class for the own one half the methods fail."""
    own = pytest.importorskip("mistral_common", reason="mistral_common is not installed")
    directory = changed_model(tmp_path / "model", model_type=kind)
    expected = end_tokens(directory, [])
    shutil.copy(next(Path(own.__file__).parent.glob("data/tekken_*.json")), directory / "tekken.json")
    assert end_tokens(directory, []) == expected
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(ConfigError, match=r"tokenizer in Mistral's own format alone \(tekken.json\): add"):
        load_tokenizer(directory)
