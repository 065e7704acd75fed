"""Merging low-rank factors: the same bits for any blocks, threads and machine, which a definition written out gives."""

import hashlib

import numpy as np
import pytest
import torch

from tba.common import adapter, low_rank
from tba.common.errors import SnapshotCorrupt
from tba.common.low_rank import Factors, merge
from tba.common.tensor_file import Tensor, write_tensor_file

DTYPES = ("BF16", "F32")


def exact(rng, shape) -> np.ndarray:
    """Numbers that any machine makes the same of a seed: integers over a power of two, over a range of exponents."""
    numbers = rng.integers(-(1 << 15), 1 << 15, shape).astype(np.float32)
    return np.ldexp(numbers, rng.integers(-24, -12, shape))


def as_tensor(numbers: np.ndarray, dtype: str) -> Tensor:
    """The numbers in float32, or cut to bfloat16."""
    words = np.ascontiguousarray(numbers, np.float32).reshape(-1).view(np.uint32)
    return Tensor(dtype, numbers.shape, (words >> 16).astype(np.uint16) if dtype == "BF16" else words.copy())


def numbers_of(tensor: Tensor) -> np.ndarray:
    words = tensor.bits.astype(np.uint32) << 16 if tensor.dtype == "BF16" else tensor.bits
    return words.view(np.float32).reshape(tensor.shape)


def factors(rng, rows: int, columns: int, rank: int, scaling: float = 1.7) -> Factors:
    return Factors(exact(rng, (rank, columns)), exact(rng, (rows, rank)), np.float32(scaling))


def merged(base: Tensor, factor: Factors, *, threads: int = 1) -> np.ndarray:
    """The bits of the merged weight; those of the base stay."""
    into = Tensor(base.dtype, base.shape, np.empty_like(base.bits))
    merge({"w": base}, {"w": factor}, {"w": into}, threads=threads)
    return into.bits


def written_out(base: Tensor, factor: Factors) -> np.ndarray:
    """The definition, one element and one float32 operation at a time; torch rounds to bfloat16."""
    numbers, result = numbers_of(base), np.empty(base.shape, np.float32)
    for row, column in np.ndindex(*base.shape):
        total = factor.high[row, 0] * factor.low[0, column]
        for k in range(1, len(factor.low)):
            product = factor.high[row, k] * factor.low[k, column]
            total = total + product
        result[row, column] = numbers[row, column] + total * factor.scaling
    if base.dtype == "F32":
        return result.reshape(-1).view(np.uint32)
    return torch.from_numpy(result).bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 16])
def test_a_merge_is_its_definition_bit_for_bit(dtype, rank):
    rng = np.random.default_rng(rank)
    base, factor = as_tensor(exact(rng, (23, 41)), dtype), factors(rng, 23, 41, rank)
    assert np.array_equal(merged(base, factor), written_out(base, factor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_infinities_subnormals_and_what_rounds_up_to_infinity_follow_the_definition(dtype):
    largest, tiny = np.finfo(np.float32).max, np.float32(1e-40)
    values = np.array([0.0, -0.0, np.inf, -np.inf, largest, -largest, tiny, -tiny, 1.0], np.float32)
    base = as_tensor(np.tile(values, (len(values), 1)), dtype)
    factor = Factors(np.array([values[::-1], values], np.float32), np.stack([values, values[::-1]], 1), np.float32(1.0))
    with np.errstate(all="ignore"):
        expected = written_out(base, factor)
    numbers = numbers_of(Tensor(dtype, base.shape, expected))
    found = merged(base, factor)
    assert np.array_equal(found[~np.isnan(numbers).reshape(-1)], expected[~np.isnan(numbers).reshape(-1)])
    assert np.isnan(numbers).sum() > 10
    assert set(found[np.isnan(numbers).reshape(-1)]) == {0x7FC0 if dtype == "BF16" else 0x7FC00000}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(130, 1000), (1, 3), (300, 1), (7, 20_000)])
def test_blocks_and_threads_change_no_bit(dtype, shape, monkeypatch):
    rng = np.random.default_rng(5)
    base, factor = as_tensor(exact(rng, shape), dtype), factors(rng, *shape, 3)
    expected = merged(base, factor)
    for columns, elements, blocks in [(64, 64, 1), (1000, 777, 2), (1 << 20, 1 << 20, 1), (3, 50_000, 3)]:
        monkeypatch.setattr(low_rank, "_BLOCK_COLUMNS", columns)
        monkeypatch.setattr(low_rank, "_BLOCK_ELEMENTS", elements)
        monkeypatch.setattr(low_rank, "_TASK_BLOCKS", blocks)
        for threads in (1, 2, 7):
            assert np.array_equal(merged(base, factor, threads=threads), expected)


def test_a_merge_in_place_is_the_same():
    rng = np.random.default_rng(6)
    base, factor = as_tensor(exact(rng, (50, 60)), "BF16"), factors(rng, 50, 60, 4)
    expected = merged(base, factor)
    merge({"w": base}, {"w": factor}, {"w": base}, threads=2)
    assert np.array_equal(base.bits, expected)


@pytest.mark.parametrize(
    ("dtype", "sha256"),
    [
        ("BF16", "e5e47180d713872d1c2723aeb4642e46b4fb035092df035d8df20df1c921f428"),
        ("F32", "2b948f1698d0b2a85c29681720634351b95f85d97a5831f2ddaf6b72c9bfbe9a"),
    ],
)
def test_every_machine_gets_these_bytes(dtype, sha256):
    rng = np.random.default_rng(7)
    base, factor = as_tensor(exact(rng, (257, 515)), dtype), factors(rng, 257, 515, 16, scaling=2.0)
    assert hashlib.sha256(merged(base, factor, threads=2).tobytes()).hexdigest() == sha256


def test_a_file_gives_back_the_factors_that_were_written(tmp_path):
    rng = np.random.default_rng(8)
    given = {"layers.0.q": factors(rng, 8, 6, 3), "layers.1.q": factors(rng, 2, 9, 3, scaling=0.25)}
    write_tensor_file(tmp_path / adapter.FILE, adapter.tensors_of(given))
    found = adapter.read_factors(tmp_path / adapter.FILE)
    assert found.keys() == given.keys()
    for name, factor in given.items():
        assert np.array_equal(found[name].low, factor.low)
        assert np.array_equal(found[name].high, factor.high)
        assert found[name].scaling == factor.scaling


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("high/w"), "2 tensors for 1 adapter: three belong to each"),
        (lambda tensors: tensors.update({"high/v": tensors.pop("high/w")}), "and no 'high/w'"),
        (lambda tensors: tensors.update({"low/w": as_tensor(np.zeros((3, 6)), "BF16")}), r"shapes \[3, 6\]"),
        (lambda tensors: tensors.update({"low/w": as_tensor(np.zeros((2, 6)), "F32")}), r"\[2, 6\] and \[8, 3\]"),
        (lambda tensors: tensors.update({"scaling/w": as_tensor(np.zeros(2), "F32")}), "shapes"),
    ],
)
def test_a_malformed_adapter_file_is_refused(tmp_path, change, said):
    tensors = adapter.tensors_of({"w": factors(np.random.default_rng(0), 8, 6, 3)})
    change(tensors)
    write_tensor_file(tmp_path / adapter.FILE, tensors)
    with pytest.raises(SnapshotCorrupt, match=said):
        adapter.read_factors(tmp_path / adapter.FILE)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({}, "not there"),
        ({"w": as_tensor(np.zeros((6, 8)), "BF16")}, r"BF16 \[6, 8\]"),
        ({"w": Tensor("F16", (8, 6), np.zeros(48, np.uint16))}, "F16"),
    ],
)
def test_an_adapter_of_another_model_is_refused_before_a_weight_changes(base, said):
    good = as_tensor(np.zeros((8, 6)), "BF16")
    factor = factors(np.random.default_rng(0), 8, 6, 3)
    weights = {"v": good, **base}
    with pytest.raises(SnapshotCorrupt, match=said):
        merge(weights, {"v": factor, "w": factor}, weights)
    assert not good.bits.any()
