"""What the ranks other than 0 do: they take part in what rank 0 begins, and know nothing of buffer, files and signals.

rank 0, in tba.trainer.loop        the others, here
STEP and its batch           ──►   the same step
PUBLISH and what             ──►   weights or adapters put together, tensor by tensor
SAVE                         ──►   weights and optimiser states put together
END                          ──►   leave
"""

import numpy as np
import torch

from tba.common.errors import MemoryShort, TbaError, first_line
from tba.common.log import get_logger
from tba.common.memory import out_of_memory
from tba.trainer import checkpoint
from tba.trainer.adapters import gathered
from tba.trainer.batch import Row, TrainBatch
from tba.trainer.ranks import Ranks, pack_arrays, unpack_arrays
from tba.trainer.step import Learner, StepResult

log = get_logger(__name__)

STEP, PUBLISH, SAVE, END = "step", "publish", "save", "end"
_ARRAYS = ("prompt_ids", "response_ids", "sampling_logprobs", "loss_mask")
_TENSORS = ("reward_BK", "reference_BK", "staleness_BK")


def follow(learner: Learner, ranks: Ranks, *, micro_batch_tokens: int) -> None:
    """Do what rank 0 says until it says END. Raises RuntimeError when it is gone, MemoryShort as `step_in_memory`."""
    while (heard := ranks.receive())[0] != END:
        command, payload = heard
        if command == STEP:
            try:
                step_in_memory(learner, unpack_batch(payload), micro_batch_tokens=micro_batch_tokens)
            except MemoryShort:  # of this rank alone: the others wait for it, until it ends
                raise
            except TbaError as error:  # rank 0 has raised the same, and decides what is to come of it
                log.debug("step failed", reason=str(error))
        elif command == PUBLISH:
            with torch.no_grad():
                for what in payload.decode().split():
                    for _ in gathered(learner.policy, what):
                        pass
        elif command == SAVE:
            for _ in checkpoint.tensors_of(learner):
                pass


def step_in_memory(learner: Learner, batch: TrainBatch, *, micro_batch_tokens: int) -> StepResult:
    """A step, of any rank.

    Raises MemoryShort: a start that repeats the step would lack the same memory, so it says what to change.
    """
    try:
        return learner.step(batch)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        longest = max(row.tokens for row in batch.rows)
        raise MemoryShort(
            f"out of memory in step {batch.step} ({first_line(error)}): lower train.micro_batch_tokens, which is "
            f"{micro_batch_tokens} (the longest trajectory here has {longest} tokens, and that is the least), or set "
            "train.gradient_checkpointing = true; then pass --resume"
        ) from error


def pack_batch(batch: TrainBatch) -> bytes:
    """A batch as bytes, for `Ranks.send`."""
    columns = {name: np.concatenate([getattr(row, name) for row in batch.rows]) for name in _ARRAYS}
    counts = {f"{name}_count": np.array([len(getattr(row, name)) for row in batch.rows]) for name in _ARRAYS}
    return pack_arrays(
        {
            **columns,
            **counts,
            **{name: getattr(batch, name).numpy() for name in _TENSORS},
            "step": np.array(batch.step),
            "id": np.array([row.id for row in batch.rows]),
            "on_policy": np.array([row.on_policy for row in batch.rows]),
        }
    )


def unpack_batch(packed: bytes) -> TrainBatch:
    """The batch of `pack_batch`, equal in every bit; without the parts of rewards, which only rank 0 records."""
    arrays = unpack_arrays(packed)
    columns = {name: np.split(arrays[name], np.cumsum(arrays[f"{name}_count"])[:-1]) for name in _ARRAYS}
    rows = [
        Row(
            id=int(arrays["id"][n]),
            on_policy=bool(arrays["on_policy"][n]),
            **{name: columns[name][n] for name in _ARRAYS},
        )
        for n in range(len(arrays["id"]))
    ]
    reward_BK, reference_BK, staleness_BK = (torch.from_numpy(arrays[name].copy()) for name in _TENSORS)
    return TrainBatch(int(arrays["step"]), rows, reward_BK, reference_BK, staleness_BK)
