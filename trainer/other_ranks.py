"""The loop of the ranks other than 0. They have no connection to the buffer, write no files and handle no signals.

rank 0, in tba.trainer.loop            the others, here
STEP and the batch                ──►  make the same step
PUBLISH and the kinds of tensors  ──►  take part in gathering weights or adapters, tensor by tensor
SAVE                              ──►  take part in gathering weights and optimiser state
END                               ──►  return
"""

import torch

from tba.common.errors import MemoryShort, TbaError
from tba.common.log import get_logger
from tba.trainer.checkpoints import checkpoint
from tba.trainer.distributed.ranks import Ranks
from tba.trainer.model.adapters import gathered
from tba.trainer.step.broadcast import unpack_batch
from tba.trainer.step.learner import Learner

log = get_logger(__name__)

STEP, PUBLISH, SAVE, END = "step", "publish", "save", "end"


def run_other_rank(learner: Learner, ranks: Ranks) -> None:
    """Take part in what rank 0 commands until END. Raises RuntimeError if rank 0 is gone, MemoryShort."""
    while True:
        command, payload = ranks.receive()
        if command == STEP:
            _step(learner, payload)
        elif command == PUBLISH:
            with torch.no_grad():
                for kind in payload.decode().split():
                    for _ in gathered(learner.policy, kind):
                        pass
        elif command == SAVE:
            for _ in checkpoint.tensors_of(learner):
                pass
        elif command == END:
            return


def _step(learner: Learner, packed: bytes) -> None:
    try:
        learner.step_in_memory(unpack_batch(packed))
    except MemoryShort:
        # This rank alone is short of memory; the others would wait for it forever. Its end is noticed.
        raise
    except TbaError as error:
        # Rank 0 has raised the same error and decides how to continue.
        log.debug("step failed", reason=str(error))
