"""The processes that train one model together, and their messages besides FSDP's own collectives.

Only rank 0 talks to the buffer and writes files; the others execute its commands (`trainer/other_ranks.py`). Commands
go over gloo and the CPU, even where gradients and weights go over NCCL. They are msgpack, never pickle.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tba.common.errors import ConfigError, RankLost
from tba.common.system.process import RENDEZVOUS_VARIABLE

# The others wait for rank 0 for as long as it waits for data. A rank that dies closes its sockets, which is noticed
# immediately.
_TIMEOUT = timedelta(days=365)
# What `tba.trainer.distributed.sharding` calls on each FSDPModule.
_FSDP_METHODS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")


class Ranks:
    """One of the processes: `rank` of `size`. `mesh` is the device mesh of FSDP, None for a single process."""

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self._commands = dist.new_group(backend="gloo", timeout=_TIMEOUT) if size > 1 else None

    def send(self, command: str, payload: bytes = b"") -> None:
        """Send a command to all other ranks. Called on rank 0; does nothing for a single process."""
        if self.size == 1:
            return
        data = torch.frombuffer(bytearray(msgpack.packb([command, payload])), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0, group=self._commands)
        dist.broadcast(data, src=0, group=self._commands)

    def receive(self) -> tuple[str, bytes]:
        """Wait for the next command of rank 0. Returns its name and payload."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._commands)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._commands)
        command, payload = msgpack.unpackb(data.numpy().tobytes())
        return command, payload

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks, on the value's device. Every rank must call it."""
        if self.size == 1:
            return value
        total = value.detach().cpu().clone()
        dist.all_reduce(total, group=self._commands)
        return total.to(value.device)

    def concat(self, value_n: Tensor) -> Tensor:
        """Concatenate the values of all ranks, of which each may have a different number, on the CPU."""
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
        """Leave the group. A rank that fails need not call it: the others notice when it ends."""
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()


def join(device: torch.device) -> Ranks:
    """Join the ranks that `tba train` or `torchrun` has started; ALONE if there is only this process.

    Both set RANK and WORLD_SIZE. The rendezvous is MASTER_ADDR for torchrun, a file for `tba train`. Raises ConfigError
    if this torch is too old to train in several processes.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    if missing := [name for name in _FSDP_METHODS if not hasattr(FSDPModule, name)]:
        raise ConfigError(
            f"several processes train together with torch 2.9 or newer, and torch {torch.__version__} is installed "
            f"(its FSDPModule has no {missing[0]}): install a newer one, or train in one process"
        )
    file = os.environ.get(RENDEZVOUS_VARIABLE)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    rendezvous = f"file://{file}" if file else "env://"
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
    return Ranks(rank, size, init_device_mesh(device.type, (size,)))


@contextlib.contextmanager
def until_lost() -> Iterator[None]:
    """Raise RankLost for the errors that gloo and NCCL raise when another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST):
            reason = str(error).splitlines()[0][:300]
            raise RankLost(f"another process of this trainer has ended, or cannot be reached: {reason}") from error
        raise
