"""Swaps in place of a small model that fuses, shards and ties its weights, without vLLM."""

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tba.common.errors import EngineError
from tba.searcher.engines.vllm import weight_swap
from tba.searcher.engines.vllm.weight_swap import TensorSlice, WeightSwap, differing, map_files, record
from tba.tests.helpers.checks import not_none


class Fused(torch.nn.Module):
    """Stores rows 2 to 5 and columns 4 to 7 of `q`, and all of `k`, in one parameter."""

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(10, 4), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "q":
                self.qk.data[:4].copy_(tensor[2:6, 4:8])
            elif name == "k":
                self.qk.data[4:].copy_(tensor)
            else:
                self.norm.data.copy_(tensor)


def files(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in (("q", (6, 8)), ("k", (6, 4)), ("norm", (3,)))
    }
    save_file(tensors, folder / f"{seed}.safetensors")
    return [str(folder / f"{seed}.safetensors")]


@pytest.fixture
def model():
    return Fused()


@pytest.fixture
def layouts(model):
    """The parameters as they were loaded."""
    return {name: (one.shape, one.dtype) for name, one in model.named_parameters()}


@pytest.fixture
def swap(model, layouts, tmp_path):
    slices = record(model.load_weights, dict(model.named_parameters()), map_files(files(tmp_path, 0)))
    assert not model.qk.any(), "recording must not change a weight"
    return WeightSwap(model, slices, layouts)


def test_a_swap_copies_each_slice_to_the_place_that_the_model_itself_uses(model, swap, tmp_path):
    paths, expected = files(tmp_path, 1), Fused()
    expected.load_weights(map_files(paths).items())
    swap.prepare(paths, seed=1)
    assert not model.qk.any(), "preparing must not change a weight"
    swap.exchange()
    assert torch.equal(model.qk, expected.qk)
    assert torch.equal(model.norm, expected.norm)
    assert differing(swap._slices, dict(model.named_parameters()), map_files(paths)) == []


def test_a_tensor_that_was_not_copied_is_found_by_reading_back(model, swap, tmp_path):
    swap.prepare(files(tmp_path, 1), seed=1)
    swap._prepared.copies[:] = [copy for copy in swap._prepared.copies if copy[0].name != "k"]
    with pytest.raises(EngineError, match="1 tensor differs from the files after the swap, for example k"):
        swap.exchange()
    with pytest.raises(EngineError, match="no weights are prepared"):
        swap.exchange()


def test_files_that_would_leave_a_part_of_a_parameter_as_it_is_are_refused_before_the_exchange(swap, tmp_path):
    tensors = dict(map_files(files(tmp_path, 1)).items())
    del tensors["k"]
    save_file(tensors, tmp_path / "less.safetensors")
    with pytest.raises(EngineError, match="the files lack k and would leave a part of qk as it is"):
        swap.prepare([str(tmp_path / "less.safetensors")], seed=1)


@pytest.mark.parametrize("changed", [torch.zeros(4, 10), torch.zeros(10, 4, dtype=torch.bfloat16)])
def test_a_parameter_reshaped_or_converted_after_loading_rules_out_swaps_in_place(model, swap, layouts, changed):
    model.qk = torch.nn.Parameter(changed, requires_grad=False)
    with pytest.raises(EngineError, match="qk was reshaped or converted after loading"):
        WeightSwap(model, swap._slices, layouts)


def test_a_parameter_that_appears_after_loading_is_left_to_the_self_test(model, swap, layouts, tmp_path):
    model.derived = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    found = WeightSwap(model, swap._slices, layouts)
    found.prepare(files(tmp_path, 1), seed=1)
    found.exchange()
    assert model.norm.any()
    assert not model.derived.any()


def test_tensors_that_are_processed_after_loading_are_not_read_back(model, swap, tmp_path):
    paths = files(tmp_path, 1)

    def reload_and_flip(tensors):
        model.load_weights(tensors.items())
        model.norm.data.neg_()

    with pytest.raises(EngineError, match="for example norm"):
        swap.checked_reload(paths, 1, reload_and_flip)
    swap.skip_processed(paths)
    swap.checked_reload(paths, 2, reload_and_flip)
    with pytest.raises(EngineError, match="differ"):
        swap.checked_reload(files(tmp_path, 2), 3, lambda tensors: None)


def test_a_parameter_that_was_tied_to_another_after_loading_is_skipped(model, swap, layouts, tmp_path):
    head = TensorSlice("head", "head", (3,), (0,), (3,), 0, (1,))
    tied = WeightSwap(model, [*swap._slices, head], layouts)
    tied.prepare(files(tmp_path, 1), seed=1)
    tied.exchange()
    assert tied._slices == swap._slices
    assert torch.equal(model.norm, map_files(files(tmp_path, 1))["norm"])


def test_transposed_and_computed_weights_are_not_recorded(model, tmp_path):
    tensors, parameters = map_files(files(tmp_path, 0)), dict(model.named_parameters())

    def transposed(weights):
        model.qk.data[:4, :4].copy_(dict(weights)["q"][:4, :4].T)

    with pytest.raises(EngineError, match="q is loaded transposed or reshaped"):
        record(transposed, parameters, tensors)
    with pytest.raises(EngineError, match="1 parameter was loaded in another way, for example norm"):
        record(lambda weights: model.load_weights(one for one in weights if one[0] != "norm"), parameters, tensors)


class DeviceBytes(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation creates on the meta device, which stands for a GPU."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.is_meta and one.untyped_storage()._cdata not in before:
                self.sizes.append(one.untyped_storage().nbytes())
        return result


class Large(torch.nn.Module):
    """On a device: two fused tensors as they are in the file, half the columns of another, and a converted one."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.empty(2 * 8192, 4096, dtype=torch.bfloat16, device="meta"))
        self.columns = torch.nn.Parameter(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"))
        self.converted = torch.nn.Parameter(torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta"))

    def load_weights(self, weights):
        weights = dict(weights)
        self.fused.data[:8192].copy_(weights["gate"])
        self.fused.data[8192:].copy_(weights["up"])
        self.columns.data.copy_(weights["columns"][:, 4096:])
        self.converted.data.copy_(weights["converted"])


@pytest.mark.slow
def test_a_swap_takes_no_device_memory_before_the_pause_and_one_staging_block_in_it(tmp_path, monkeypatch):
    shapes = {"gate": (8192, 4096), "up": (8192, 4096), "columns": (4096, 8192), "converted": (8192, 1024)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    tensors["converted"] = tensors["converted"].float()
    save_file(tensors, tmp_path / "large.safetensors")
    paths, model = [str(tmp_path / "large.safetensors")], Large()
    slices = record(model.load_weights, dict(model.named_parameters()), map_files(paths))
    swap = WeightSwap(model, slices, {name: (one.shape, one.dtype) for name, one in model.named_parameters()})
    with DeviceBytes() as prepared:
        swap.prepare(paths, seed=1)
    assert not prepared.sizes
    assert swap._prepared is not None
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with torch.no_grad(), DeviceBytes() as copied:
        swap._copy(not_none(swap._prepared))
    assert sum(copied.sizes) == tensors["columns"].nbytes + tensors["converted"].nbytes
    assert max(copied.sizes) == weight_swap._STAGING_BYTES


def test_staged_copies_give_what_the_model_itself_loads(tmp_path, monkeypatch):
    # The staging blocks of a device, here on the CPU, of three rows each.
    monkeypatch.setattr(weight_swap, "_STAGING_BYTES", 3 * 8 * 4)
    paths, model, expected = files(tmp_path, 1), Fused(), Fused()
    expected.load_weights(map_files(paths).items())
    tensors = map_files(paths)
    for one in record(model.load_weights, dict(model.named_parameters()), tensors):
        weight_swap._copy_through_staging(one, tensors[one.name], model.get_parameter(one.parameter).data)
    assert torch.equal(model.qk, expected.qk)
    assert torch.equal(model.norm, expected.norm)
