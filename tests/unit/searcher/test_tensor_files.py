"""Mapped weights are registered as pinned memory once per inode, and given up when others take their place."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tba.searcher.engines.vllm import weight_swap
from tba.searcher.engines.vllm.weight_swap import MappedFiles, map_files


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


def test_files_that_a_trainer_writes_to_by_turns_are_registered_once(tmp_path, cudart):
    files = [write(tmp_path / f"{turn}", float(turn)) for turn in range(3)]
    mapped = MappedFiles(pin=True)
    for version in range(30):
        path = tmp_path / f"v{version}"
        os.rename(files[version % 3], path)
        files[version % 3] = str(path)
        tensor = mapped.open([str(path)])["a"]
        assert tensor[0, 0] == version % 3
    assert len(cudart.flags) == len(cudart.registered) == 3
    assert set(cudart.flags) == {1 | 8}
    mapped.close()
    assert not cudart.registered


def test_new_content_of_a_mapped_inode_is_seen(tmp_path, cudart):
    mapped = MappedFiles(pin=True)
    first, other = write(tmp_path / "first", 1.0), write(tmp_path / "other", 2.0)
    mapped.open([first])
    with open(other, "rb") as source, open(first, "r+b") as target:
        shutil.copyfileobj(source, target)
    assert mapped.open([first])["a"][0, 0] == 2.0
    assert len(cudart.flags) == 1


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


def test_tensors_in_use_outlive_their_registration(tmp_path, cudart):
    mapped = MappedFiles(pin=True)
    kept = mapped.open([write(tmp_path / "kept", 7.0)])["a"]
    mapped.close()
    assert (kept == 7.0).all()


def test_a_driver_without_read_only_registration_gets_a_writable_mapping(tmp_path, cudart):
    cudart.allowed = lambda flags: not flags & 8
    mapped = MappedFiles(pin=True)
    assert mapped.open([write(tmp_path / "a", 3.0)])["a"][0, 0] == 3.0
    assert cudart.flags == [1 | 8, 1]
    assert len(cudart.registered) == 1


def test_without_registration_the_files_are_only_mapped_and_one_warning_names_the_limits(tmp_path, cudart, caplog):
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
