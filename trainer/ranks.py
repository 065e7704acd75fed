"""The processes that train one model together, and what they say to each other beside FSDP's own collectives.

Rank 0 alone talks to the buffer and writes files; the others do what it tells them (`tba.trainer.follow`). What they
say goes over gloo and the CPU, also where gradients and weights go over NCCL, and is msgpack, never pickle.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tba.common.errors import RankLost
from tba.common.process import RENDEZVOUS_VARIABLE

# The others wait for rank 0 for as long as it waits for data. A rank that dies is noticed at once, by its sockets.
_PATIENCE = timedelta(days=365)
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class Ranks:
    """One of the processes: `rank` of `size`. `mesh` is what FSDP shards over, None for a process alone."""

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self._talk = dist.new_group(backend="gloo", timeout=_PATIENCE) if size > 1 else None

    def send(self, command: str, payload: bytes = b"") -> None:
        """Tell all others; only rank 0 does. Nothing happens for a process alone."""
        if self.size == 1:
            return
        data = torch.frombuffer(bytearray(msgpack.packb([command, payload])), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._talk)
        dist.broadcast(data, src=0, group=self._talk)

    def receive(self) -> tuple[str, bytes]:
        """What rank 0 sent next; waits for it."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._talk)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._talk)
        command, payload = msgpack.unpackb(data.numpy().tobytes(), max_bin_len=len(data))
        return command, payload

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, on the value's device; every rank has to ask for it."""
        if self.size == 1:
            return value
        total = value.detach().cpu().clone()
        dist.all_reduce(total, group=self._talk)
        return total.to(value.device)

    def concat(self, value_n: Tensor) -> Tensor:
        """The values of all ranks one after another, however many each has; on the CPU."""
        if self.size == 1:
            return value_n
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(value_n)
        counts = self.sum(counts)
        start = int(counts[: self.rank].sum())
        joined = torch.zeros(int(counts.sum()), dtype=value_n.dtype)
        joined[start : start + len(value_n)] = value_n
        return self.sum(joined)

    def close(self) -> None:
        """Leave the group. Whoever ends by an error just ends: the others notice."""
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def join(device: torch.device) -> Ranks:
    """Meet the other ranks that the launcher has started, or `torchrun`; ALONE where there is neither.

    torchrun says by RANK, WORLD_SIZE and MASTER_ADDR who is who; `tba train` names a file to meet by instead.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    file = os.environ.get(RENDEZVOUS_VARIABLE)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    meeting = f"file://{file}" if file else "env://"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    return Ranks(rank, size, init_device_mesh(device.type, (size,)))


@contextlib.contextmanager
def until_lost() -> Iterator[None]:
    """Raise RankLost in place of what the transports say when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
            reason = str(error).splitlines()[0][:300]
            raise RankLost(f"another process of this trainer has ended, or cannot be reached: {reason}") from error
        raise


def pack_arrays(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Named arrays as bytes, for `send`."""
    fields = {name: [array.dtype.str, list(array.shape), array.tobytes()] for name, array in arrays.items()}
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack_arrays(packed: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of `pack_arrays`, read-only."""
    fields = msgpack.unpackb(packed, max_bin_len=len(packed))
    return {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in fields.items()}
