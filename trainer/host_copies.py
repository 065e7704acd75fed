"""Copies of a model's tensors on the host, in buffers that are used again.

On a GPU the copies are queued on a stream of their own and go into pinned memory, so the training thread does not wait
for them; the next update does, on the device. On a CPU it is one pass over memory: a buffer that was used before costs
no page faults, which are more than half of a first copy.
"""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_HELD_BYTES = 1 << 30


class HostCopy:
    """A copy under way. Whoever is done with it gives it back to its HostCopies."""

    def __init__(self, tensors: Tensors, done: torch.cuda.Event | None) -> None:
        self.tensors = tensors
        self._done = done

    def wait(self) -> Tensors:
        """The tensors, once their content is there."""
        if self._done is not None:
            self._done.synchronize()
        return self.tensors


class HostCopies:
    """Makes copies of tensors of one device. As many sets of buffers are made as are in use at the same time.

    `gathered` says that the tensors are made on the way, from the parts of all ranks or from adapters.
    """

    def __init__(self, device: torch.device, *, gathered: bool = False) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None  # the newest copy has read its sources
        self._gathered = gathered
        self._held = 0  # bytes of gathered tensors that the copying may not have read yet
        self._free: list[Tensors] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> HostCopy:
        """Copy the tensors as they are now, floating-point ones as `dtype` if it is given.

        They are asked for one after the other, so they may be made on the way. On a GPU nothing may write to them
        until `before_update` was called.
        """
        with self._lock:
            used = self._free.pop() if self._free else {}
        buffers: Tensors = {}
        for name, tensor in tensors:
            wanted = _type(tensor, dtype)
            buffers[name] = self._buffer(used.get(name), tensor, wanted)
            self._copy_one(buffers[name], tensor, wanted)
        if self._stream is not None:
            self._read = self._stream.record_event()
        return HostCopy(buffers, self._read)

    def _copy_one(self, buffer: Tensor, tensor: Tensor, dtype: torch.dtype) -> None:
        if self._stream is None or tensor.device.type != "cuda":
            buffer.copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            # Rounded on the device: half of the bytes cross the bus. The rounded tensor belongs to this stream, so its
            # memory is not given to anybody else before it was read; one that was made on the way is kept until then.
            buffer.copy_(tensor.to(dtype), non_blocking=True)
        if self._gathered:
            tensor.record_stream(self._stream)
            self._held += tensor.nbytes
            if self._held > _HELD_BYTES:  # gathering is faster than the bus: else the whole model would be there
                self._stream.synchronize()
                self._held = 0

    def before_update(self) -> None:
        """Let what is queued on the device from now on wait until all copies have read their sources."""
        if self._stream is not None and self._read is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._read)

    def give_back(self, copy: HostCopy) -> None:
        """The buffers may be overwritten by the next copy. From any thread."""
        copy.wait()
        with self._lock:
            self._free.append(copy.tensors)

    def _buffer(self, used: Tensor | None, source: Tensor, dtype: torch.dtype) -> Tensor:
        if used is not None and used.shape == source.shape and used.dtype == dtype:
            return used
        return torch.empty(source.shape, dtype=dtype, pin_memory=self._stream is not None)


def _type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
