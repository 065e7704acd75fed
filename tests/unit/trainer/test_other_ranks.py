"""How a rank other than 0 handles a step that fails."""

from typing import Any
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


def run_with(monkeypatch: pytest.MonkeyPatch, error: Exception, *, report: Any = None) -> None:
    """Run a rank whose step raises an error."""
    learner = make_learner(micro_batch_tokens=30, report=report)

    def fail(_):
        raise error

    monkeypatch.setattr(learner, "step", fail)
    run_other_rank(learner, ScriptedRanks())


def test_a_rank_that_runs_out_of_memory_ends_with_advice(monkeypatch):
    sentence = r"out of memory in step \d+ \(CUDA out .*\): lower train.micro_batch_tokens, which is 30 \("
    with pytest.raises(OutOfMemory, match=sentence):
        run_with(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))


def test_where_states_fill_the_memory_smaller_micro_batches_are_not_the_advice(monkeypatch):
    with pytest.raises(OutOfMemory, match='fill the memory.*more GPUs.*train.offload = "optimizer".*lora.rank'):
        run_with(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."), report=Mock(states_fill=True))


def test_an_error_that_all_ranks_raise_is_left_to_rank_0(monkeypatch):
    run_with(monkeypatch, TbaError("outside the vocabulary"))


def test_other_errors_are_raised_unchanged(monkeypatch):
    with pytest.raises(RuntimeError, match="shapes"):
        run_with(monkeypatch, RuntimeError("shapes differ"))
