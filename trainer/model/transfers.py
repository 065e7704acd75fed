"""Asynchronous copies between a GPU and the host: a stream of their own, and pinned memory on the host.

torch rounds the bytes of each tensor in its own pinned memory up to a power of two, and keeps them until the process
ends (torch 2.11, CachingHostAllocator.h): 174 GB for 91 GB of weights and moments of Qwen2.5-7B. Memory that is mapped
first and then registered with CUDA takes the bytes of its tensor, up to a page.
"""

import contextlib
import functools
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tba.common.log import get_logger

log = get_logger(__name__)


def own_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream on a GPU, so that training's kernels and this work do not wait for each other; else None.

    Make one per user, not one per use: torch's allocator keeps the memory that is freed on a stream for that stream.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return an uninitialized tensor on the host, in pinned memory if `pinned` and CUDA allows it.

    Pin only what a GPU reads or writes: pinning takes seconds for some GB, and swapping stops. The memory is given back
    with the last view of it.
    """
    size = math.prod(shape) * dtype.itemsize
    if not pinned or not size:
        return torch.empty(tuple(shape), dtype=dtype)
    # Shared, as mmap does by default: after a fork, the kernel would give a private mapping other pages than CUDA's.
    memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    address = memory.ctypes.data
    if register(address, size):
        # The array ends before its mapping. At the end of the process the driver gives everything back.
        weakref.finalize(memory, unregister, address).atexit = False
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def register(address: int, size: int) -> bool:
    """Pin mapped memory. False, with a warning, if CUDA refuses: copies are correct all the same, and slower."""
    status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
    if status:
        _clear_last_error()
        _warn(status)
    return not status


def unregister(address: int) -> None:
    """Undo `register`, once copies that no thread waits for are complete."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _clear_last_error() -> None:
    """Take CUDA's error of the failed call: else the next kernel that this thread launches would report it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


# Once per error: a model has hundreds of tensors.
@functools.cache
def _warn(status: int) -> None:
    log.warning("memory of the host cannot be pinned, so copies from the GPU are waited for", cuda_error=status)
