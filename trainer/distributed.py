"""The processes that train one model together: their commands, and FSDP2's sharding of the model over them.

Only rank 0 talks to the buffer and writes files; the others execute its commands (`tba.trainer.loop.run_other_rank`):

    STEP and the batch                 make the same step
    PUBLISH and the kinds of tensors   take part in gathering weights or adapters, tensor by tensor
    SAVE                               take part in gathering weights and optimiser state
    END                                return

Commands go over gloo and the CPU, even where gradients and weights go over NCCL. They are msgpack, never pickle.

Weights, gradients and optimiser state are sharded over the ranks. Each decoder layer is gathered when it is needed;
embeddings, last norm and head (the root) are gathered together, around all layers. Rank 0 alone loads the weights; the
others receive each layer when it is sharded. Sharded weights are float32. In bfloat16 runs all of them are gathered in
bfloat16, to which autocast would convert the matrices anyway. Each rank's gradient of a gathered weight is in bfloat16;
it is added over micro-batches and over the ranks in float32.
"""

import contextlib
import os
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tba.common.errors import ConfigError, RankLost
from tba.common.system.process import RENDEZVOUS_VARIABLE

# The others wait for rank 0 for as long as it waits for data. A rank that dies closes its sockets, which is noticed
# immediately.
_TIMEOUT = timedelta(days=365)
# What `shard` calls on each FSDPModule.
_FSDP_METHODS = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
STEP, PUBLISH, SAVE, END = "step", "publish", "save", "end"
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


def shard(scorer: nn.Module, layer_types: Collection[str], ranks: Ranks, *, autocast: bool) -> None:
    """Shard a scorer's model over the ranks, in place: its parameters become DTensors, of rank 0's weights.

    `layer_types` are the class names of the layers that are gathered one at a time. On ranks other than 0 the model may
    be on the meta device. Raises ConfigError, on every rank, if it has other tensors there.
    """
    _check_same(scorer, ranks)
    half = torch.bfloat16 if autocast else None
    policy = MixedPrecisionPolicy(half, torch.float32 if autocast else None, cast_forward_inputs=False)
    for module in list(scorer.modules()):
        if type(module).__name__ in layer_types:
            _receive(module, ranks)
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    _receive(scorer, ranks)
    fully_shard(scorer, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The ranks' parts of the loss add up, so gradients are summed and not averaged. With the factor alone,
            # FSDP would use a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check_same(scorer: nn.Module, ranks: Ranks) -> None:
    """Raise ConfigError if the ranks do not have the same tensors: they would wait for each other's broadcasts.

    Rank 0 has them from the files, where two weights may differ that are one by config.json, from which the others are.
    """
    tensors = [*scorer.parameters(), *scorer.buffers()]
    own = torch.tensor([len(tensors), sum(tensor.numel() for tensor in tensors)])
    if not torch.equal(ranks.sum(own), ranks.size * own):
        raise ConfigError(
            "the model's files have other weights than its config.json describes, which several processes need: if "
            "they have an output head of its own, set tie_word_embeddings = false in config.json"
        )


def _receive(module: nn.Module, ranks: Ranks) -> None:
    """Give rank 0's weights and buffers to a module on all ranks, on the device. Weights that are sharded stay."""
    assert ranks.mesh is not None
    # By the identity of the old tensor, which is kept, so that tied weights stay one.
    new: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in module.modules():
        for name, old in (*owner._parameters.items(), *owner._buffers.items()):
            if old is None or isinstance(old, DTensor):
                continue
            if id(old) not in new:
                new[id(old)] = old, _from_rank_0(old, ranks)
            tensors: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            tensors[name] = new[id(old)][1]


def _from_rank_0(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return rank 0's values of a tensor, on the device. On rank 0 the tensor itself moves, which frees the host's."""
    assert ranks.mesh is not None
    device = ranks.mesh.device_type
    if ranks.rank == 0:
        tensor.data = tensor.data.to(device).contiguous()
    else:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        tensor = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    # As bytes: gloo does not have all dtypes.
    dist.broadcast(tensor.data.view(-1).view(torch.uint8), src=0)
    return tensor


def keep_gathered(scorer: nn.Module, *, last: bool) -> None:
    """Keep gathered weights and unreduced gradients on each rank between the micro-batches of a step.

    The first micro-batch gathers the weights; the `last` one frees them and reduces the gradients.
    """
    assert isinstance(scorer, FSDPModule)
    scorer.set_reshard_after_forward(False)
    scorer.set_reshard_after_backward(last)
    scorer.set_requires_gradient_sync(last)


def release_gathered(scorer: nn.Module) -> None:
    """Free gathered weights that a forward pass without a backward pass has left. Does nothing to other modules."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Gather a sharded tensor from all ranks, each of which must call this; return any other tensor as it is.

    With a sharded `like`, `tensor` is this rank's shard on the host, of a tensor that is sharded like it.
    """
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        device, shape, stride = like.to_local().device, like.shape, like.stride()
        tensor = DTensor.from_local(
            tensor.to(device), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of_rank_0(tensor: Tensor, value: Tensor) -> Tensor:
    """Shard rank 0's full `value` as `tensor` is sharded. On the other ranks it may be on the meta device."""
    if not isinstance(tensor, DTensor):
        return value
    device = tensor.device_mesh.device_type
    whole = torch.empty_like(value, device=device) if value.is_meta else value.to(device)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=0)


def shard_like(tensor: Tensor, value: Tensor) -> Tensor:
    """Shard a full `value` as `tensor` is sharded. Every rank has the value, so there is no communication."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
