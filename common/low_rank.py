"""Merging low-rank factors into a weight with the same bits on every machine.

    merged = round(base + scaling x sum over k of high[:, k] low[k, :])

A matrix product would do, but its sum runs in an order of the library's and the machine's choice, and with fused
multiply-adds or without. Here the order is part of the definition: k ascending, each product and each sum an IEEE 754
float32 operation of its own, rounded to nearest even; then one multiplication by the scaling, one addition to the base,
and one rounding to the type of the base. Each element depends on its own row and column alone, so blocks and threads
are free. A NaN is the canonical quiet one: which operand's bits a NaN inherits differs between processors.

Not defined is a process that flushes subnormal numbers to zero, as libraries built with -ffast-math can make it.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.common.errors import SnapshotCorrupt
from tba.common.tensor_file import Bits, Tensor

Floats = npt.NDArray[np.float32]

# Types that a merged weight may have.
MERGED_DTYPES = ("BF16", "F32")

# A block's sum and product stay in a core's second-level cache. Smaller ones are no faster, and interpreter calls, for
# which the threads of a process take turns, would come more often.
_BLOCK_COLUMNS = 4096
_BLOCK_ELEMENTS = 1 << 16
# What one thread takes at a time.
_TASK_BLOCKS = 16
# More would crowd out the thread that trains or generates, whose interpreter calls take turns with theirs.
_MOST_THREADS = 4
_BF16_NAN = 0x7FC0
_F32_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of one weight [out, in]: `low` [rank, in], `high` [out, rank], float32 both, times `scaling`."""

    low: Floats
    high: Floats
    scaling: np.float32


@dataclass(frozen=True, slots=True)
class _Task:
    """Rows of one weight: their bits in the base and in the result, both [rows, in]."""

    base: Bits
    into: Bits
    low: Floats
    high: Floats  # of these rows
    scaling: np.float32


def merge(
    base: Mapping[str, Tensor], factors: Mapping[str, Factors], into: Mapping[str, Tensor], *, threads: int = 0
) -> None:
    """Write the merged weight of each of the `factors` to the bits of its tensor in `into`, which may be the base's.

    `threads` 0 takes a few of the cores that this process may use. Raises SnapshotCorrupt if factors do not fit.
    """
    for name, factor in factors.items():
        check(name, base.get(name), factor)
    count = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    tasks = (task for name, factor in factors.items() for task in _tasks(base[name], factor, into[name]))
    if count == 1:
        for task in tasks:
            _run(task)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="merge") as pool:
        for _ in pool.map(_run, tasks):
            pass


def check(name: str, base: Tensor | None, factor: Factors) -> None:
    """Raise SnapshotCorrupt if factors are not of this weight."""
    shape = (factor.high.shape[0], factor.low.shape[1])
    if base is None or base.dtype not in MERGED_DTYPES or base.shape != shape:
        found = "which is not there" if base is None else f"which is {base.dtype} {list(base.shape)}"
        raise SnapshotCorrupt(f"an adapter of shape {list(shape)} belongs to {name!r}, {found}")


def _tasks(base: Tensor, factor: Factors, into: Tensor) -> Iterator[_Task]:
    rows, columns = base.shape
    source, target = base.bits.reshape(rows, columns), into.bits.reshape(rows, columns)
    step = _TASK_BLOCKS * _rows_of_block(columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        yield _Task(source[part], target[part], factor.low, factor.high[part], factor.scaling)


def _rows_of_block(columns: int) -> int:
    return max(_BLOCK_ELEMENTS // max(min(columns, _BLOCK_COLUMNS), 1), 1)


def _run(task: _Task) -> None:
    rows, columns = task.base.shape
    height = _rows_of_block(columns)
    space = np.empty((2, height * min(columns, _BLOCK_COLUMNS)), np.float32)
    # Sums may overflow; infinities and NaN are results like others.
    with np.errstate(all="ignore"):
        for left in range(0, columns, _BLOCK_COLUMNS):
            across = slice(left, left + _BLOCK_COLUMNS)
            low = task.low[:, across]
            for top in range(0, rows, height):
                down = slice(top, top + height)
                base, into = task.base[down, across], task.into[down, across]
                sum_, other = (one[: base.size].reshape(base.shape) for one in space)
                _accumulate(low, task.high[down], sum_, other)
                np.multiply(sum_, task.scaling, out=sum_)
                np.add(_widened(base, other), sum_, out=sum_)
                _round(sum_, other, into)


def _accumulate(low: Floats, high: Floats, sum_: Floats, product: Floats) -> None:
    """`sum_` [rows, columns] becomes the sum of the outer products, in the order of k; `product` is space for one."""
    np.multiply(high[:, 0:1], low[0], out=sum_)
    for k in range(1, len(low)):
        np.multiply(high[:, k : k + 1], low[k], out=product)
        np.add(sum_, product, out=sum_)


def _widened(bits: Bits, space: Floats) -> Floats:
    """The numbers of bfloat16 or float32 bits; `space` is overwritten where they need any."""
    if bits.itemsize == 4:
        return bits.view(np.float32)
    words = space.view(np.uint32)
    np.copyto(words, bits)
    np.left_shift(words, 16, out=words)
    return space


def _round(numbers: Floats, space: Floats, into: Bits) -> None:
    """Write numbers as bits of their own type or of bfloat16, to nearest even; `space` is overwritten."""
    words, rounding = numbers.view(np.uint32), space.view(np.uint32)
    missing: npt.NDArray[Any] = np.isnan(numbers)
    if into.itemsize == 4:
        np.copyto(into, words)
    else:
        # Half of a bfloat16's last place, less one where that place is even; what overflows becomes infinite.
        np.right_shift(words, 16, out=rounding)
        np.bitwise_and(rounding, 1, out=rounding)
        np.add(rounding, 0x7FFF, out=rounding)
        np.add(rounding, words, out=rounding)
        np.right_shift(rounding, 16, out=rounding)
        np.copyto(into, rounding, casting="unsafe")
    if missing.any():
        into[missing] = _F32_NAN if into.itemsize == 4 else _BF16_NAN
