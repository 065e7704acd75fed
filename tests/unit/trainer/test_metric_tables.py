"""Metrics of odd batches, by loops and exact sums: uncounted, duplicated, demonstrated and huge rows, in any order."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tba.trainer.step.step_metrics import log_ratios_by_advantage, mass_metrics, mismatch_metrics

NAN = math.nan


def tensor(values):
    return torch.tensor(np.array(values, np.float64))


# Rewards as exact numbers and the floats that a sum of parts gives for them, and which rows are measured.
GROUPS = [
    (["1/10"] * 3, [0.1] * 3, [1, 1, 1]),
    (["1/10"] * 7, [0.1] * 7, [1] * 7),
    (["3/10", "3/10", "3/10"], [0.3, 0.1 + 0.2, 0.3], [1, 1, 1]),
    (["3/10", "3/10", "9/10"], [0.3, 0.1 + 0.2, 0.9], [1, 1, 1]),
    (["0", "1", "1"], [0.0, 1.0, 1.0], [1, 1, 0]),
    (["0", "1", "1"], [0.0, 1.0, 1.0], [0, 1, 1]),
    (["-3/10", "-3/10"], [-0.3, -0.1 - 0.2], [1, 1]),
    (["1000000000", "1000000000", "0"], [1e9, 1e9 + 1e-7, 0.0], [1, 1, 1]),
    (["1", "0.999999"], [1.0, 0.999999], [1, 1]),
    (["7/10"] * 20, [0.7] * 20, [1] * 20),
    (["1/3"] * 11, [1 / 3] * 11, [1] * 11),
]


@pytest.mark.parametrize(("exact", "rewards", "measured"), GROUPS)
def test_ratios_by_the_sign_of_an_advantage_are_means_over_rows_on_each_side_of_the_exact_mean(
    exact, rewards, measured
):
    numbers = [*map(Fraction, exact)]
    mean, ratios = sum(numbers) / len(numbers), np.linspace(-5, 3, len(numbers))
    sides = {
        "log_ratio_positive": [
            r for r, one, is_in in zip(ratios, numbers, measured, strict=True) if is_in and one > mean
        ],
        "log_ratio_negative": [
            r for r, one, is_in in zip(ratios, numbers, measured, strict=True) if is_in and one < mean
        ],
    }
    found = log_ratios_by_advantage(tensor([ratios]), tensor([measured]).bool(), tensor([rewards]))
    expected = {name: np.mean(side) if side else NAN for name, side in sides.items()}
    assert found == pytest.approx(expected, nan_ok=True)


# Per prompt: tokens, probability when sampled, ratio, measured.
BATCHES = [
    [[(b"a", 0.5, 0.5, 1), (b"b", 0.2, 2.0, 1)]],
    [[(b"a", 0.5, 0.5, 1), (b"a", 0.1, 1.0, 1)]],
    [[(b"a", 0.5, 0.5, 1), (b"b", 0.9, 1.0, 0)]],
    [[(b"a", 0.7, 1.0, 1), (b"b", 0.6, 1.0, 1)]],
    [[(b"a", 0.5, 0.1, 1), (b"b", 0.1, 1.0, 0)], [(b"a", 0.3, 3.0, 1), (b"a", 0.3, 1.0, 1)]],
    [[(b"a", 0.5, 0.1, 0), (b"b", 0.1, 1.0, 0)], [(b"", 1.0, 1.0, 0), (b"a", 0.3, 1.0, 1)]],
    [[(b"a", 1e-9, 1e3, 1), (b"a", 3e-9, 1e3, 1)]],
    [[(b"a", 0.4, 0.25, 1), (b"a", 0.4, 0.25, 1), (b"b", 0.2, 1.0, 1)],
     [(b"a", 0.5, 0.6, 1), (b"b", 0.1, 0.1, 1), (b"c", 0.3, 2.0, 1)]],
    [[(b"a", 0.4, 1.0, 1), (b"a", 0.1, 1.0, 1), (b"b", 0.2, 1.0, 1)]],
    [[(b"a", 0.9, 0.1, 1), (b"b", 0.9, 1.0, 1)]],
]  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
def test_masses_count_each_measured_response_once_in_any_order_of_the_rows(batch):
    expected = dict.fromkeys(("sampled_mass", "policy_mass"), 0.0)
    counted = 0
    for group in batch:
        texts = {text for text, *_, measured in group if measured}
        counted += bool(texts)
        for name, is_policy in (("sampled_mass", False), ("policy_mass", True)):
            each = [np.mean([p * (r if is_policy else 1) for t, p, r, m in group if m and t == text]) for text in texts]
            expected[name] += min(1.0, sum(each))
    expected = {name: value / counted for name, value in expected.items()}
    for order in itertools.permutations(range(len(batch[0]))):
        rows = [[group[n] for n in order] for group in batch]
        columns = [[[row[n] for row in group] for group in rows] for n in range(4)]
        found = mass_metrics(
            tensor(columns[2]).log(),
            tensor(columns[1]).log(),
            tensor(columns[3]).bool(),
            [*itertools.chain(*columns[0])],
        )
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("difference", [[0.0], [1e-6, -2e-6], [0.5, -0.5, 0.0], [3.0], [-700.0, 1.0]])
def test_the_mismatch_is_that_of_numpy(difference):
    d = np.array(difference)
    expected = {"mismatch_mean": abs(d).mean(), "mismatch_max": abs(d).max(), "mismatch_kl": (np.expm1(d) - d).mean()}
    assert mismatch_metrics(tensor(difference)) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert mismatch_metrics(tensor([])) == {}
