"""How a rank other than 0 handles a step that fails."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tba.common.errors import OutOfMemory, TbaError
from tba.tests.helpers.ranks import make_learner
from tba.tests.helpers.trainer import random_batch
from tba.trainer.batch.batch import pack_batch
from tba.trainer.distributed import END, STEP, Ranks
from tba.trainer.loop import run_other_rank


class ScriptedRanks(Ranks):
    """Receives one step to make, then END."""

    def __init__(self) -> None:
        super().__init__()
        self._script = [(STEP, pack_batch(random_batch(seed=0))), (END, b"")]

    def receive(self) -> tuple[str, bytes]:
        return self._script.pop(0)


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ADVICE = r"out of memory in step \d+ \(CUDA out .*\): lower train.micro_batch_tokens, which is 30 \("


@pytest.mark.parametrize(
    ("error", "report", "raised", "words"),
    [
        (CUDA, None, OutOfMemory, ADVICE),
        # Smaller micro-batches would be of little use.
        (CUDA, Mock(states_fill=True), OutOfMemory, 'fill the memory.*more GPUs.*train.offload = "optimizer".*lora.r'),
        (RuntimeError("shapes differ"), None, RuntimeError, "shapes differ"),
        # All ranks raise it, and rank 0 decides.
        (TbaError("outside the vocabulary"), None, None, ""),
    ],
)
def test_a_rank_ends_with_advice_if_it_runs_out_of_memory_and_leaves_what_all_raise_to_rank_0(
    monkeypatch, error, report, raised, words
):
    learner = make_learner(micro_batch_tokens=30, own={"report": report})

    def fail(_):
        raise error

    monkeypatch.setattr(learner, "step", fail)
    with pytest.raises(raised, match=words) if raised else nullcontext():
        run_other_rank(learner, ScriptedRanks())
