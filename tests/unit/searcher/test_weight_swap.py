"""Swaps of vLLM's weights without vLLM: the copies, the mapped files, what a model computes with, and the fair lock."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tba.common.errors import EngineError
from tba.searcher.engines.vllm import weight_swap
from tba.searcher.engines.vllm.running import FairLock
from tba.searcher.engines.vllm.weight_state import ProcessingWatch, clear, differences, fingerprint, zeros
from tba.searcher.engines.vllm.weight_swap import MappedFiles, WeightSwap, differing, map_files, record
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
    slices = record(model.load_weights, dict(model.named_parameters()), map_files(files(tmp_path, 0)), set())
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


def test_transposed_and_computed_weights_are_not_recorded(model, tmp_path):
    tensors, parameters = map_files(files(tmp_path, 0)), dict(model.named_parameters())

    def transposed(weights):
        model.qk.data[:4, :4].copy_(dict(weights)["q"][:4, :4].T)

    with pytest.raises(EngineError, match="q is loaded transposed or reshaped"):
        record(transposed, parameters, tensors, set())
    with pytest.raises(EngineError, match="1 parameter was loaded in another way, for example norm"):
        record(
            lambda weights: model.load_weights(one for one in weights if one[0] != "norm"), parameters, tensors, set()
        )


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
    slices = record(model.load_weights, dict(model.named_parameters()), map_files(paths), set())
    swap = WeightSwap(model, slices, {name: (one.shape, one.dtype) for name, one in model.named_parameters()})
    with DeviceBytes() as prepared:
        swap.prepare(paths, seed=1)
    assert not prepared.sizes
    assert swap._prepared is not None
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    with torch.no_grad(), DeviceBytes() as copied:
        swap._copy(not_none(swap._prepared)[0])
    assert sum(copied.sizes) == tensors["columns"].nbytes + tensors["converted"].nbytes
    assert max(copied.sizes) == weight_swap._STAGING_BYTES


def test_staged_copies_give_what_the_model_itself_loads(tmp_path, monkeypatch):
    # The staging blocks of a device, here on the CPU, of three rows each.
    monkeypatch.setattr(weight_swap, "_STAGING_BYTES", 3 * 8 * 4)
    paths, model, expected = files(tmp_path, 1), Fused(), Fused()
    expected.load_weights(map_files(paths).items())
    tensors = map_files(paths)
    for one in record(model.load_weights, dict(model.named_parameters()), tensors, set()):
        weight_swap._copy_through_staging(one, tensors[one.name], model.get_parameter(one.parameter).data)
    assert torch.equal(model.qk, expected.qk)
    assert torch.equal(model.norm, expected.norm)


class Cudart:
    """Registers memory as CUDA's runtime does, up to what `allowed` says of the flags."""

    def __init__(self, allowed=lambda flags: True):
        self.allowed = allowed
        self.flags = []
        self.registered = {}

    def cudaHostRegister(self, address, size, flags):
        self.flags.append(flags)
        if address in self.registered or not self.allowed(flags):
            return 801
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch):
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(weight_swap, "_clear_last_error", lambda: None)
    return found


def write(path, value):
    """A new file with a new inode."""
    save_file({"a": torch.full((3, 5), value, dtype=torch.bfloat16), "none": torch.empty(0, 4)}, path)
    return str(path)


def test_tensors_of_every_type_equal_those_that_safetensors_reads(tmp_path):
    expected = {
        str(dtype): torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
        for dtype in weight_swap._DTYPES.values()
        if dtype != torch.float8_e8m0fnu
    }
    save_file(expected | {"scalar": torch.tensor(2.5)}, tmp_path / "all.safetensors")
    found, expected = map_files([str(tmp_path / "all.safetensors")]), load_file(tmp_path / "all.safetensors")
    assert dict(found.items()).keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_files_that_a_trainer_writes_to_by_turns_are_registered_once_and_outlived_by_their_tensors(tmp_path, cudart):
    files = [write(tmp_path / f"{turn}", float(turn)) for turn in range(3)]
    mapped = MappedFiles(pin=True)
    for version in range(30):
        path = tmp_path / f"v{version}"
        os.rename(files[version % 3], path)
        files[version % 3] = str(path)
        tensor = mapped.open([str(path)])["a"]
        assert tensor[0, 0] == version % 3
    # New content of an inode that is mapped.
    with open(write(tmp_path / "other", 5.0), "rb") as source, open(files[0], "r+b") as target:
        shutil.copyfileobj(source, target)
    assert mapped.open([files[0]])["a"][0, 0] == 5.0
    assert len(cudart.flags) == len(cudart.registered) == 3
    assert set(cudart.flags) == {1 | 8}
    mapped.close()
    assert not cudart.registered
    assert (tensor == 2.0).all()


def test_files_that_are_mapped_for_one_use_leave_no_descriptor(tmp_path):
    path = write(tmp_path / "a", 3.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert (map_files([path])["a"] == 3.0).all()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_are_deleted_or_pushed_out_are_unregistered(tmp_path, cudart):
    mapped = MappedFiles(pin=True)
    for version in range(20):
        mapped.open([write(tmp_path / f"{version}-{part}", float(version)) for part in range(2)])
        assert len(cudart.registered) <= 2 + weight_swap._OTHER_FILES
    assert len(cudart.registered) == 2 + weight_swap._OTHER_FILES
    for path in tmp_path.iterdir():
        path.unlink()
    mapped.open([write(tmp_path / "last", 0.0)])
    assert len(cudart.registered) == 1


def test_a_driver_without_read_only_registration_gets_a_writable_mapping_and_without_any_there_is_one_warning(
    tmp_path, cudart, caplog
):
    cudart.allowed = lambda flags: not flags & 8
    mapped = MappedFiles(pin=True)
    assert mapped.open([write(tmp_path / "a", 3.0)])["a"][0, 0] == 3.0
    assert cudart.flags == [1 | 8, 1]
    assert len(cudart.registered) == 1
    cudart.allowed = lambda flags: False
    mapped = MappedFiles(pin=True)
    for version in range(3):
        assert mapped.open([write(tmp_path / f"{version}", float(version))])["a"][0, 0] == version
    (warning,) = [one for one in caplog.records if "not pinned" in one.message]
    assert "locked memory has" in warning.fields["reason"]
    assert "search.weights_dir" in warning.fields["reason"]


def test_a_disk_that_refuses_registration_does_not_keep_weights_in_memory_from_it(tmp_path, cudart):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        on_disk, in_memory = write(tmp_path / "own", 1.0), write(Path(memory, "served"), 2.0)
        if os.stat(on_disk).st_dev == os.stat(in_memory).st_dev:
            pytest.skip("the temporary directory is in /dev/shm")
        mapped = MappedFiles(pin=True)
        cudart.allowed = lambda flags: False
        mapped.open([on_disk])
        cudart.allowed = lambda flags: True
        mapped.open([in_memory])
        assert len(cudart.registered) == 1
        tried = len(cudart.flags)
        mapped.open([write(tmp_path / "another", 3.0)])
        assert len(cudart.flags) == tried
        mapped.close()


class Layer(torch.nn.Module):
    """Keeps a transposed copy of its weight in a closure after `process`, and a constant that is no copy."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 7).view(2, 3), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))

    def process(self):
        copy = (self.weight * 1.0).T.contiguous()
        constant = torch.full((4,), 2.0)
        self.multiply = lambda: (copy, constant)


def processed():
    layer = Layer()
    with ProcessingWatch(layer) as watch:
        layer.process()
    return layer, watch.derived(layer)


def test_a_tensor_that_keeps_what_was_made_from_a_weight_is_found_and_a_constant_or_a_temporary_one_is_not():
    layer, derived = processed()
    assert [one.name for one in derived] == ["weight"]
    clear(derived)
    copy, constant = layer.multiply()
    assert not copy.any()
    assert constant.tolist() == [2.0] * 4
    layer.workspace = torch.zeros(3, 2)
    with ProcessingWatch(layer) as watch:
        assert (layer.weight + 1).sum() == 27
    assert watch.derived(layer) == []
    with ProcessingWatch(layer) as watch:
        layer.workspace.copy_(layer.weight.T)
    assert [one.name for one in watch.derived(layer)] == ["weight"]


def test_each_changed_or_moved_tensor_is_named_but_one_on_the_host_may_be_replaced():
    (layer, derived), (other, of_other) = processed(), processed()
    assert zeros(layer) == {"bias"}
    before = fingerprint(layer, derived)
    assert before.keys() == {"weight", "bias", "scale", "tensor 0, made from weight"}
    of_host = fingerprint(other, of_other)
    other.process()
    assert differences(of_host, fingerprint(other, of_other)) == []
    clear(derived)
    layer.scale += 1
    layer.bias.data = layer.bias.data.clone()
    assert differences(before, fingerprint(layer, derived)) == ["bias", "scale", "tensor 0, made from weight"]


def test_a_thread_that_reacquires_the_lock_comes_after_one_that_waited():
    lock, order = FairLock(), []

    def wait() -> None:
        with lock:
            order.append("waited")

    waiting = threading.Thread(target=wait)
    with lock:
        waiting.start()
        deadline = time.monotonic() + 60
        while not lock._next.locked():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with lock:
        order.append("again")
    waiting.join()
    assert order == ["waited", "again"]
