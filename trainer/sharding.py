"""FSDP2: the policy's weights, gradients and optimiser states divided over the ranks, and put together again.

Each decoder layer is gathered as it is needed; embeddings, last norm and head together, around all of them. Weights
stay float32 where they are sharded. In bfloat16 runs layers are gathered in bfloat16, what autocast would make of them
anyway, and gradients are added up over the ranks in float32.
"""

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tba.trainer.model import Scorer
from tba.trainer.ranks import Ranks


def shard(scorer: Scorer, ranks: Ranks, *, autocast: bool) -> None:
    """Divide a model over the ranks, in place. Its parameters become DTensors."""
    single = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    layer_types = set(scorer.model._no_split_modules or ())
    for module in list(scorer.model.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=half if autocast else single)
    fully_shard(scorer, mesh=ranks.mesh, reshard_after_forward=True, mp_policy=single)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # The shares of the batch's loss add up. The factor alone would ask for a scaled sum, which gloo has not.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def keep_whole(scorer: Scorer, *, last: bool) -> None:
    """Between the micro-batches of a step, keep gathered weights and unreduced gradients on each rank.

    They are gathered by the first micro-batch, and reduced and given up by the `last`.
    """
    assert isinstance(scorer, FSDPModule)
    scorer.set_reshard_after_forward(False)
    scorer.set_reshard_after_backward(last)
    scorer.set_requires_gradient_sync(last)


def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from all ranks, each of which has to ask for it; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """This rank's part of a whole `value`, divided as `tensor` is; without communication."""
    if not isinstance(tensor, DTensor):
        return value
    # Every rank has the value already.
    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


def fits_whole(sharding: str, model: PreTrainedModel, *, autocast: bool) -> bool:
    """Whether ranks keep whole weights and gradients during a step: as `train.sharding` says, or if there is room."""
    if sharding != "auto":
        return sharding == "optimizer"
    if model.device.type == "cpu":
        return True
    weights = sum(parameter.numel() for parameter in model.parameters()) * (2 if autocast else 4)
    gradients = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) * 4
    return bool(weights + gradients <= torch.cuda.get_device_properties(model.device).total_memory // 2)
