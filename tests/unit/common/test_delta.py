"""Deltas: applied to the old bits they give the new bits, for every kind of change."""

from pathlib import Path

import numpy as np
import pytest
import zstandard

from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.weights import delta
from tba.common.weights.snapshot import DELTA
from tba.common.weights.tensor_file import Tensor, map_tensors, read_layout
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.weights import write_tensor_file

BF16_NAN, BF16_OTHER_NAN, BF16_ZERO, BF16_MINUS_ZERO = 0x7FC0, 0x7FC1, 0x0000, 0x8000


def tensor(bits, dtype="BF16") -> Tensor:
    bits = np.asarray(bits)
    return Tensor(dtype, bits.shape, bits.reshape(-1))


def random_bits(elements: int, dtype=np.uint16, seed: int = 0):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, elements, dtype=dtype, endpoint=True)


def through_a_file(old: dict[str, Tensor], new: dict[str, Tensor], folder: Path) -> dict[str, np.ndarray]:
    """Build and write a delta, and apply it to a file of the old weights."""
    built = not_none(delta.build_delta(old, new, max_bytes=1e12))
    size = delta.write_delta(folder / DELTA, built)
    delta.unpack_delta(folder / DELTA, folder / "delta", size)
    write_tensor_file(folder / "weights", old)
    mapped = map_tensors(folder / "weights", writable=True)
    delta.apply_delta(folder / "delta", mapped)
    return {name: tensor.bits for name, tensor in map_tensors(folder / "weights").items()}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8"])
@pytest.mark.parametrize(
    ("fraction", "elements"),
    [(0.0, 300_001), (1e-5, 300_001), (0.01, 600_001), (0.3, 255), (0.3, 256), (1.0, 1), (1.0, 600_001)],
)
def test_the_result_has_the_new_bits(tmp_path, dtype, fraction, elements):
    width = {"BF16": np.uint16, "F32": np.uint32, "F64": np.uint64, "U8": np.uint8}[dtype]
    old = random_bits(elements, width)
    chosen = np.random.default_rng(1).random(elements) < fraction
    new = np.where(chosen, old ^ width(1), old)
    found = through_a_file({"x": tensor(old, dtype)}, {"x": tensor(new, dtype)}, tmp_path)
    assert np.array_equal(found["x"], new)


def test_bits_are_compared_rather_than_numbers(tmp_path):
    old = np.array([BF16_NAN, BF16_NAN, BF16_ZERO, BF16_ZERO] * 50, np.uint16)
    new = old.copy()
    new[1], new[3] = BF16_OTHER_NAN, BF16_MINUS_ZERO
    built = not_none(delta.build_delta({"x": tensor(old)}, {"x": tensor(new)}, max_bytes=1e12))
    assert built["difference/x"].bits.tolist() == [1, 0x8000]
    assert np.array_equal(through_a_file({"x": tensor(old)}, {"x": tensor(new)}, tmp_path)["x"], new)


def test_one_percent_of_small_steps_is_sent_in_a_hundredth_of_the_bytes(tmp_path):
    old = random_bits(4_000_000)
    rng = np.random.default_rng(1)
    step = np.where(rng.random(len(old)) < 0.5, np.uint16(1), np.uint16(0xFFFF))
    new = np.where(rng.random(len(old)) < 0.01, old + step, old)
    assert np.array_equal(through_a_file({"x": tensor(old)}, {"x": tensor(new)}, tmp_path)["x"], new)
    assert (tmp_path / DELTA).stat().st_size < old.nbytes / 100


def test_a_tensor_with_many_changes_is_replaced_within_the_limit_and_an_unchanged_one_is_absent():
    old = {"x": tensor(random_bits(1000)), "y": tensor(random_bits(1000))}
    new = {"x": tensor(old["x"].bits ^ np.uint16(1)), "y": old["y"]}
    assert not_none(delta.build_delta(old, new, max_bytes=2000)).keys() == {"whole/x"}
    assert delta.build_delta(old, new, max_bytes=1999) is None


@pytest.mark.parametrize("damage", [lambda one: one[:-5], lambda one: b"no frame", lambda _: b""])
def test_a_delta_that_is_damaged_or_of_another_size_than_stated_is_refused(tmp_path, damage):
    path, out = tmp_path / DELTA, tmp_path / "out"
    size = delta.write_delta(path, {"whole/x": tensor(np.zeros(1 << 20, np.uint16))})
    assert path.stat().st_size < size / 100
    for stated in (size - 1, size + 1):
        with pytest.raises(SnapshotCorrupt, match=f"declares {size} bytes, its manifest {stated}"):
            delta.unpack_delta(path, out, stated)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SnapshotCorrupt):
        delta.unpack_delta(path, out, size)


def test_a_frame_that_lies_about_its_size_is_stopped_at_the_stated_size(tmp_path):
    # The size of the content is in bytes 5 to 8 of a frame of this kind: RFC 8878, 3.1.1.1.
    content = bytearray(zstandard.ZstdCompressor(level=3).compress(bytes(1 << 20)))
    assert int.from_bytes(content[5:9], "little") == 1 << 20
    content[5:9] = (1000).to_bytes(4, "little")
    (tmp_path / DELTA).write_bytes(content)
    with pytest.raises(SnapshotCorrupt):
        delta.unpack_delta(tmp_path / DELTA, tmp_path / "out", 1000)
    assert (tmp_path / "out").stat().st_size <= 1000


def one_change(position: int, count: int) -> dict[str, Tensor]:
    return {
        "difference/x": tensor(random_bits(1)),
        "position/x": tensor(np.array([position], np.uint8), "U8"),
        "count/x": tensor(np.array([count], np.uint16), "U16"),
    }


BAD_DELTAS = {
    "of another model": {"whole/y": tensor(random_bits(10))},
    "of another type": {"whole/x": tensor(random_bits(10, np.uint32), "F32")},
    "of another size": {"whole/x": tensor(random_bits(11))},
    "without positions": {"difference/x": tensor(random_bits(1))},
    "with too many counts": one_change(3, 2),
    "beyond the end": one_change(10, 1),
}


@pytest.mark.parametrize("content", BAD_DELTAS.values(), ids=BAD_DELTAS)
def test_a_delta_that_does_not_fit_is_refused(tmp_path, content):
    write_tensor_file(tmp_path / "delta", content)
    with pytest.raises(SnapshotCorrupt):
        delta.apply_delta(tmp_path / "delta", {"x": tensor(random_bits(10))})


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"{}x", b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SnapshotError):
        read_layout(tmp_path / "x")


def test_the_safetensors_package_reads_written_files(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    content = {
        "odd": tensor(random_bits(3, np.uint8), "U8"),
        "x": tensor(random_bits(6).reshape(2, 3)),
        "none": tensor(random_bits(0)),
    }
    write_tensor_file(tmp_path / "x", content)
    loaded = torch_files.load_file(tmp_path / "x")
    assert {name: tuple(one.shape) for name, one in loaded.items()} == {"odd": (3,), "x": (2, 3), "none": (0,)}
    assert loaded["x"].view(torch_files.torch.int16).flatten().tolist() == content["x"].bits.view(np.int16).tolist()
