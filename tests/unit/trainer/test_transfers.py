"""Pinned memory takes what its tensors take, and only tensors of a GPU are copied into it."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tba.trainer.model import host_buffers
from tba.trainer.model.host_buffers import HostBuffers, host_tensor

MAPS = Path("/proc/self/maps")
# Elements of a tensor that is far from a power of two.
ODD = 9_000_001


class Cudart:
    """Registers memory as CUDA's runtime does: each page once, and only what is mapped."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.mapped: list[bool] = []
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert address % 4096 == 0
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped.append(any(address in _addresses(line) for line in MAPS.read_text().splitlines()))
        del self.registered[address]
        return 0


def _addresses(line: str) -> range:
    first, end = line.partition(" ")[0].split("-")
    return range(int(first, 16), int(end, 16))


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_buffers, "_clear_last_error", lambda: None)
    host_buffers._warn.cache_clear()
    return found


class Stream:
    """A stream of a GPU that is not there: no tensor is on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        pass


def test_tensors_on_the_host_are_copied_to_memory_that_is_not_pinned(cudart, monkeypatch):
    """With `train.offload` masters and moments are there, although the trainer has a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    copies = HostBuffers(torch.device("cuda"))
    masters = {"a": torch.randn(3, 5), "step": torch.tensor(2.0)}
    copy = copies.copy(masters.items())
    assert all(torch.equal(copy.wait()[name], tensor) for name, tensor in masters.items())
    copies.release(copy)
    assert copies.copy(masters.items()).tensors["a"] is copy.tensors["a"]
    assert not cudart.registered


@pytest.mark.slow
def test_pinned_tensors_take_their_bytes_and_not_the_next_power_of_two(cudart):
    shapes = {(ODD,): torch.float32, (1000, 4097): torch.bfloat16, (): torch.float32}
    tensors = [host_tensor(shape, dtype, pinned=True) for shape, dtype in shapes.items()]
    assert sorted(cudart.registered.values()) == [4, 2 * 1000 * 4097, 4 * ODD]
    for tensor in tensors:
        values = torch.arange(tensor.numel()).to(tensor.dtype).view(tensor.shape)
        assert torch.equal(tensor.copy_(values), values)


@pytest.mark.slow
def test_pinned_memory_is_given_back_with_its_last_view_and_before_it_is_unmapped(cudart):
    whole = host_tensor((ODD,), torch.float32, pinned=True)
    view = whole[5:9]
    del whole
    gc.collect()
    assert len(cudart.registered) == 1
    del view
    gc.collect()
    assert not cudart.registered
    assert cudart.mapped == [True]


def test_memory_that_cuda_does_not_pin_is_used_all_the_same_with_one_warning(cudart, caplog):
    cudart.status = 801
    tensors = [host_tensor((10,), torch.float32, pinned=True).fill_(value) for value in (1.0, 2.0)]
    assert [float(tensor.sum()) for tensor in tensors] == [10.0, 20.0]
    assert len([one for one in caplog.records if "cannot be pinned" in one.message]) == 1
