"""Comparing an engine's log-probabilities with the trainer's."""

import math
from pathlib import Path

import numpy as np
import pytest

from tba.common.errors import CanaryMismatch
from tba.common.snapshot import Canary, Manifest, Snapshot
from tba.searcher.snapshot_checks import Mismatch, mismatch, prove


class Scores:
    """An engine as far as a canary goes: it gives these log-probabilities."""

    def __init__(self, scores):
        self.scores = [np.asarray(score, np.float32) for score in scores]

    def score(self, sequences):
        return [score[: len(ids) - 1] for score, ids in zip(self.scores, sequences, strict=True)]


def snapshot(logprobs):
    sequences = [[1] * (len(one) + 1) for one in logprobs]
    return Snapshot(Path("v1"), Manifest("run", 1, 1, 0.0, {}, Canary(sequences, logprobs)), [])


def test_mismatch_by_hand():
    found = mismatch(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -2.9]))
    assert found.maximum == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.2)
    assert found.kl == pytest.approx(((math.exp(0.5) - 1.5) + (math.exp(-0.1) - 0.9)) / 3)


def test_equal_log_probabilities_are_no_mismatch_and_one_that_is_no_number_is_one():
    same = np.array([-1.0, -2.0])
    assert mismatch(same, same) == Mismatch(0.0, 0.0, 0.0)
    odd = mismatch(np.array([-1.0, np.nan]), same)
    assert math.isnan(odd.maximum)
    assert math.isnan(odd.mean)


@pytest.mark.parametrize(
    ("scores", "refused"),
    [
        ([-1.0, -1.0, -1.0, -1.9], False),  # one token off by rounding
        ([-1.0, -1.0, -1.0, -2.1], True),
        ([-1.3, -1.3, -1.3, -1.3], True),  # no token far off, all of them a little
        ([-1.0, -1.0, -1.0, float("nan")], True),
    ],
)
def test_the_largest_and_the_mean_difference_are_bounded(scores, refused):
    one = snapshot([[-1.0, -1.0], [-1.0, -1.0]])
    engine = Scores([scores[:2], scores[2:]])
    if refused:
        with pytest.raises(CanaryMismatch, match="v1 is not what the trainer has"):
            prove(engine, one, 1.0, context=100)
    else:
        assert prove(engine, one, 1.0, context=100).maximum == pytest.approx(0.9, abs=1e-6)


def test_of_a_sequence_that_fills_the_context_the_beginning_counts():
    one = snapshot([[-1.0] * 9])
    assert prove(Scores([[-1.0, -1.0, -1.0, -9.0, -9.0, -9.0, -9.0, -9.0, -9.0]]), one, 0.1, context=5).maximum == 0
