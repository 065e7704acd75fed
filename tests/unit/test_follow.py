"""What a rank other than 0 makes of a step that fails."""

import pytest
import torch

from tba.common.errors import MemoryShort, TbaError
from tba.trainer.follow import END, STEP, follow, pack_batch
from tba.trainer.ranks import Ranks

from .rank_lab import make_learner
from .tb_lab import random_batch


class Told(Ranks):
    """Hears these commands."""

    def __init__(self, *commands: tuple[str, bytes]) -> None:
        super().__init__()
        self._commands = list(commands)

    def receive(self) -> tuple[str, bytes]:
        return self._commands.pop(0)


@pytest.fixture
def steps():
    """A step to make, then the end."""
    return Told((STEP, pack_batch(random_batch(seed=0))), (END, b""))


def failing_learner(monkeypatch, error: Exception):
    learner = make_learner()

    def fail(_):
        raise error

    monkeypatch.setattr(learner, "step", fail)
    return learner


def test_a_rank_that_lacks_memory_says_what_to_change_and_ends(steps, monkeypatch):
    learner = failing_learner(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    said = r"out of memory in step \d+ \(CUDA out .*\): lower train.micro_batch_tokens, which is 30 \("
    with pytest.raises(MemoryShort, match=said):
        follow(learner, steps, micro_batch_tokens=30)


def test_what_all_ranks_raise_is_left_to_rank_0(steps, monkeypatch):
    follow(failing_learner(monkeypatch, TbaError("outside the vocabulary")), steps, micro_batch_tokens=30)


def test_what_is_no_lack_of_memory_stays_what_it_is(steps, monkeypatch):
    with pytest.raises(RuntimeError, match="shapes"):
        follow(failing_learner(monkeypatch, RuntimeError("shapes differ")), steps, micro_batch_tokens=30)
