"""Copies of a model's tensors on the host, in buffers that are reused.

Copies of tensors on a GPU are queued on a stream of their own and go into pinned memory, so the training thread does
not wait for them; the next update does, on the device. A copy of a tensor on the host, such as a master of
`train.offload`, is one pass over memory that is not pinned: a reused buffer causes no page faults, which are more than
half of the cost of a first copy.

torch rounds the bytes of each tensor in its own pinned memory up to a power of two, and keeps them until the process
ends (torch 2.11, CachingHostAllocator.h): 174 GB for 91 GB of weights and moments of Qwen2.5-7B. Memory that is mapped
first and then registered with CUDA takes the bytes of its tensor, up to a page. Each tensor is registered by itself,
not all of a set in one arena: a tensor of another shape replaces its buffer alone, and no copy holds memory of others.
"""

import contextlib
import functools
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tba.common.log import get_logger

log = get_logger(__name__)

Tensors = dict[str, Tensor]
_MAX_UNREAD_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy in progress. Its owner hands it to `HostBuffers.release` when it is no longer needed."""

    tensors: Tensors
    done: torch.cuda.Event | None

    def wait(self) -> Tensors:
        """Wait until the copy is complete. Returns the tensors."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensors


class HostBuffers:
    """Copies tensors of one device, or of the host, to the host.

    There are as many sets of buffers as copies in use at the same time.
    `gathered` means that the source tensors are temporary, gathered from all ranks or merged with adapters.
    """

    def __init__(self, device: torch.device, *, gathered: bool = False) -> None:
        self._stream = own_stream(device)
        # When it has passed, the newest copy has read its sources.
        self._read: torch.cuda.Event | None = None
        self._gathered = gathered
        # Bytes of gathered tensors that the stream may not have read yet.
        self._unread = 0
        self._free: list[Tensors] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def copy(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None, *, into: Tensors | None = None
    ) -> HostCopy:
        """Copy the tensors as they are now, floating-point ones as `dtype` if it is given.

        `into` are the caller's buffers, which are not for `release`: one for each tensor, of its shape.

        The iterable is consumed one tensor at a time, so it may compute them. On a GPU the caller must call
        `before_update` before it writes to the sources.
        """
        used: Tensors = {}
        if into is None:
            with self._lock:
                used = self._free.pop() if self._free else used
        buffers: Tensors = {}
        for name, tensor in tensors:
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            buffers[name] = self._buffer(used.get(name), tensor, target) if into is None else into[name]
            self._copy_one(buffers[name], tensor, target)
        if self._stream is not None:
            self._read = self._stream.record_event()
        return HostCopy(buffers, self._read)

    def _copy_one(self, buffer: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._stream is None or tensor.device.type != "cuda":
            buffer.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            # Rounded on the device, so that half of the bytes cross the bus. The rounded tensor belongs to this
            # stream: torch's allocator does not reuse its memory before the stream has read it.
            buffer.copy_(tensor.to(dtype), non_blocking=True)
        if self._gathered:
            # A temporary source belongs to another stream. The allocator must know that this one reads it too.
            tensor.record_stream(self._stream)
            self._unread += tensor.nbytes
            # Gathering is faster than the bus. Without a limit the whole model would end up on the device.
            if self._unread > _MAX_UNREAD_BYTES:
                self._stream.synchronize()
                self._unread = 0

    def before_update(self) -> None:
        """Make work that is queued on the device from now on wait until all copies have read their sources."""
        if self._stream is not None and self._read is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._read)

    def release(self, copy: HostCopy) -> None:
        """Allow the next copy to reuse the buffers of this one. Thread-safe."""
        copy.wait()
        with self._lock:
            self._free.append(copy.tensors)

    def _buffer(self, used: Tensor | None, source: Tensor, dtype: torch.dtype) -> Tensor:
        if used is not None and used.shape == source.shape and used.dtype == dtype:
            return used
        return host_tensor(source.shape, dtype, pinned=source.device.type == "cuda")


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
    """Pin mapped memory. False, with a warning, if CUDA refuses: copies still work, more slowly."""
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
    """Take CUDA's error of the failed call, which the next kernel of this thread would report."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


# Once per error: a model has hundreds of tensors.
@functools.cache
def _warn(status: int) -> None:
    log.warning("memory of the host cannot be pinned, so copies from the GPU are waited for", cuda_error=status)
