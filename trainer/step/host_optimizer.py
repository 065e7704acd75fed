"""`train.offload = "optimizer"`: AdamW on the host, for weights on a device in the dtype of the computation.

    device    backward: gradient of one weight ──► copied to the host, dropped            weights, rounded ◄──┐
    host                                 └──► added to float32 gradients ──► AdamW on float32 masters ────────┘

Gradients leave as soon as autograd has computed them, so that the device holds those of a layer or two. On a GPU the
copies are queued on a stream of their own, and a thread adds them up while the backward pass goes on. On a CPU the same
code copies from memory to memory. A sharded weight has a shard of its master on each rank. Checkpoints hold masters and
states in float32, as without `offload`, so a run can change the setting when it resumes.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.trainer.distributed import Ranks, local_part
from tba.trainer.model.host_buffers import host_tensor, own_stream
from tba.trainer.model.scorer import to_bfloat16

# Values that are converted and added at a time.
_CHUNK = 1 << 20
# The groups of an optimiser that have the policy's parameters come first.
POLICY_GROUPS = 2


def decays(parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: norms and biases do not, since it would pull a norm's scale to 0, not 1."""
    return parameter.ndim > 1


def policy_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the policy's parameters as groups of an optimiser: first those that have weight decay."""
    kept = [parameter for parameter in parameters if not decays(parameter)]
    return [{"params": list(filter(decays, parameters))}, {"params": kept, "weight_decay": 0.0}]


def take_masters(policy: PreTrainedModel, device: torch.device, *, half: bool) -> dict[str, Tensor]:
    """Move a policy on the host to its device, in bfloat16 if `half`, and return its float32 weights by name."""
    # Where nothing is rounded or moved, no copy is made.
    shared = not half and device.type == "cpu"
    masters = {name: one.detach().clone() if shared else one.detach() for name, one in policy.named_parameters()}
    if half:
        to_bfloat16(policy, frozen_only=False)
    policy.to(device)
    return masters


class HostAdamW(torch.optim.AdamW):
    """AdamW on the masters of `parameters`, which may be sharded. `masters` are their whole float32 values, on rank 0.

    Call `collect` after the last backward pass of a step, and `push` after a change of masters other than by `step`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor], ranks: Ranks, **settings: Any
    ) -> None:
        self._parameters = list(parameters)
        self.masters = [
            nn.Parameter(local_part(ranks.from_rank_0(master, parameter)).cpu())
            for parameter, master in zip(parameters, masters, strict=True)
        ]
        super().__init__(policy_groups(self.masters), fused=True, **settings)
        self._ranks = ranks
        device = self._parameters[0].device
        self._stream = own_stream(device)
        self._gradients = [torch.zeros(master.shape, dtype=master.dtype) for master in self.masters]
        shards = (local_part(parameter.detach()) for parameter in parameters)
        self._staged = [host_tensor(shard.shape, shard.dtype, pinned=device.type == "cuda") for shard in shards]
        # By the index of a weight: the gradient that is being added; absent before the first one of a step.
        self._pending: dict[int, Future[None]] = {}
        self._adder = ThreadPoolExecutor(1, "gradients")
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _take(self, index: int, parameter: Tensor) -> None:
        """Copy the gradient of a weight to the host, and free it. Called by autograd or FSDP."""
        assert parameter.grad is not None
        gradient, parameter.grad = local_part(parameter.grad), None
        before = self._pending.get(index)
        if before is not None:
            # The thread may still read the buffer of the previous backward pass.
            before.result()
        done = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
            with torch.cuda.stream(self._stream):
                self._staged[index].copy_(gradient, non_blocking=True)
            # The allocator must not reuse this memory before the stream has read it.
            gradient.record_stream(self._stream)
            done = self._stream.record_event()
        else:
            self._staged[index].copy_(gradient)
        self._pending[index] = self._adder.submit(self._add, index, done, first=before is None)

    @torch.no_grad()
    def _add(self, index: int, done: torch.cuda.Event | None, *, first: bool) -> None:
        if done is not None:
            done.synchronize()
        total, staged = self._gradients[index], self._staged[index]
        if first:
            total.copy_(staged)
            return
        # An addition of two dtypes takes four times as long as one in chunks that are converted within the cache.
        for part, more in zip(torch.split(total.view(-1), _CHUNK), torch.split(staged.view(-1), _CHUNK), strict=True):
            part.add_(more.to(part.dtype))

    def collect(self) -> None:
        """Wait for the gradients of all backward passes since the last step, and make them those of the masters."""
        for index, master in enumerate(self.masters):
            pending = self._pending.pop(index, None)
            if pending is not None:
                pending.result()
                master.grad = self._gradients[index]

    def clip(self, limit: float) -> float:
        """Clip the gradients of the masters together. Returns their norm before it, over all ranks."""
        norm = nn.utils.get_total_norm([master.grad for master in self.masters if master.grad is not None])
        if self._ranks.size > 1:
            # Each replica has every shard once.
            norm = (self._ranks.sum(norm.double().square()) / self._ranks.replicas).sqrt()
        nn.utils.clip_grads_with_norm_(self.masters, limit, norm)
        return float(norm)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.push()

    @torch.no_grad()
    def push(self) -> None:
        """Round the masters into the weights on the device."""
        if self._stream is not None:
            # The device may still read the buffers of the previous push.
            torch.cuda.synchronize(self._stream.device)
        for parameter, master, staged in zip(self._parameters, self.masters, self._staged, strict=True):
            staged.copy_(master)
            local_part(parameter).copy_(staged, non_blocking=True)
