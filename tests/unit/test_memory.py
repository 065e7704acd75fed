"""What is said when a model does not load: a lack of memory may pass, wrong files do not."""

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from tba.common.errors import ConfigError, MemoryShort
from tba.common.memory import loading
from tba.searcher.engine_transformers import TransformersEngine
from tba.searcher.reference_model import ReferenceModel

from .tb_lab import save_tiny_model


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: out of memory\n\nmore")],
)
def test_a_lack_of_memory_says_of_what_and_where_and_what_to_do(error):
    said = r"^out of memory while the model in /m was loaded on cuda:1 \(.*\): end what else takes its memory, or take"
    with pytest.raises(MemoryShort, match=said), loading("the model in /m", torch.device("cuda:1")):
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
def test_files_that_do_not_load_are_a_configuration_error_that_says_what_to_see_to(error):
    said = r"^the model in /m cannot be loaded: .*: see that its files are complete, and that"
    with pytest.raises(ConfigError, match=said), loading("the model in /m"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: uncorrectable ECC error"), TypeError("a fault of ours")])
def test_what_says_nothing_of_the_files_is_not_blamed_on_them(error):
    with pytest.raises(type(error), match=str(error)), loading("the model in /m"):
        raise error


@pytest.mark.parametrize(
    "load",
    [
        lambda path: ReferenceModel(path, device="cpu", dtype="float32"),
        lambda path: TransformersEngine(
            path, dtype="float32", device="cpu", max_in_flight=1, seed=0, canary_tolerance=1e-3
        ),
    ],
    ids=["reference", "engine"],
)
def test_a_model_that_does_not_fit_where_it_is_moved_to_is_a_lack_of_memory(monkeypatch, tmp_path, load):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path))

    def no_room(_):
        raise MemoryError

    monkeypatch.setattr(model, "to", no_room)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    with pytest.raises(MemoryShort, match=f"in {tmp_path} was loaded on cpu"):
        load(str(tmp_path))
