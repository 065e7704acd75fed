"""Errors of loading a model: a lack of memory may pass, faulty files stay faulty."""

import re

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from tba.common.errors import ConfigError, OutOfMemory
from tba.common.system.load_errors import loading
from tba.searcher.engines.transformers_engine import TransformersEngine
from tba.searcher.evaluation.models import ReferenceModel
from tba.tests.helpers.engines import end_tokens
from tba.tests.helpers.trainer import save_tiny_model


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory\n\nmore")],
)
def test_the_error_of_a_lack_of_memory_names_model_device_and_remedy(error):
    sentence = r"^out of memory while the model in /m was loaded on cuda:1 \(.*\): end other processes that"
    with pytest.raises(OutOfMemory, match=sentence), loading("the model in /m", torch.device("cuda:1")):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OSError("no such file"),
        ValueError("unknown model"),
        KeyError("llama9"),
        SafetensorError("torn"),
        RuntimeError("size"),
    ],
)
def test_faulty_files_are_a_configuration_error_with_a_remedy(error):
    sentence = r"^the model in /m cannot be loaded: .*: check that its files are complete and that"
    with pytest.raises(ConfigError, match=sentence), loading("the model in /m"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: uncorrectable ECC error"), TypeError("a bug of ours")])
def test_other_errors_are_raised_unchanged(error):
    with pytest.raises(type(error), match=str(error)), loading("the model in /m"):
        raise error


@pytest.mark.parametrize(
    "load",
    [
        lambda path: ReferenceModel(path, device="cpu", dtype="float32"),
        lambda path: TransformersEngine(
            path,
            dtype="float32",
            device="cpu",
            max_in_flight=1,
            seed=0,
            canary_tolerance=1e-3,
            stopping=end_tokens(path),
        ),
    ],
    ids=["reference", "engine"],
)
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
