"""FSDP2: the policy's weights, gradients and optimiser state sharded over the ranks, and gathered again.

Each decoder layer is gathered when it is needed; embeddings, last norm and head (the root) are gathered together,
around all layers. Sharded weights are float32. In bfloat16 runs all of them are gathered in bfloat16, to which autocast
would convert the matrices anyway. Each rank's gradient of a gathered weight is in bfloat16; it is added over
micro-batches and over the ranks in float32.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tba.trainer.distributed.ranks import Ranks


def shard(scorer: nn.Module, layer_types: Collection[str], ranks: Ranks, *, autocast: bool) -> None:
    """Shard a scorer's model over the ranks, in place: its parameters become DTensors.

    `layer_types` are the class names of the layers that are gathered one at a time.
    """
    half = torch.bfloat16 if autocast else None
    policy = MixedPrecisionPolicy(half, torch.float32 if autocast else None, cast_forward_inputs=False)
    for module in list(scorer.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(scorer, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=policy)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The ranks' parts of the loss add up, so gradients are summed and not averaged. With the factor alone,
            # FSDP would use a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


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


def shard_like(tensor: Tensor, value: Tensor) -> Tensor:
    """Shard a full `value` as `tensor` is sharded. Every rank has the value, so there is no communication."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
