"""Rewards that differ by rounding are equal, wherever the project asks: trainer, sampler, curriculum, views, pages."""

import sqlite3
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tba.buffer.sampling.sampler import PromptTable, _log_weights
from tba.buffer.store.views import VIEWS
from tba.common.rewards import are_equal, level
from tba.tests.unit.buffer.test_sampling_distribution import index_of, rules
from tba.tests.unit.trainer.test_objectives import case
from tba.trainer.objectives.balance import trajectory_balance
from tba.ui.pages.prompts import summary

# Rewards of a group, and the exact numbers that they stand for.
GROUPS = [
    ([0.1] * 3, ["1/10"] * 3),
    ([0.1] * 7, ["1/10"] * 7),
    ([0.3, 0.1 + 0.2, 0.3], ["3/10"] * 3),
    ([0.7 + 0.2 + 0.1, 1.0], ["1", "1"]),
    ([0.1 + 0.2 - 0.3, 0.0], ["0", "0"]),
    ([-0.3, -0.1 - 0.2], ["-3/10"] * 2),
    ([1e9, 1e9 + 1e-7], ["1000000000"] * 2),
    ([sum([0.1] * 10), 1.0, 0.1 * 10], ["1"] * 3),
    ([1.0, 1.0 - 1e-12], ["1", "0.999999999999"]),
    ([1e-9, 2e-9], ["1/1000000000", "2/1000000000"]),
    ([0.0, 1.0, 1.0], ["0", "1", "1"]),
    ([0.3, 0.1 + 0.2, 0.9], ["3/10", "3/10", "9/10"]),
]
TABLE = pytest.mark.parametrize(("rewards", "exact"), [(one, [*map(Fraction, two)]) for one, two in GROUPS])


@TABLE
def test_rewards_are_equal_where_their_exact_sums_are(rewards, exact):
    assert are_equal(min(rewards), max(rewards)) == (min(exact) == max(exact))
    ranks = [sum(other < one for other in set(exact)) for one in exact]
    found = level(np.array(rewards))
    assert [sum(other < one for other in set(found)) for one in found] == ranks
    assert np.array_equal(level(np.array([rewards, rewards[::-1]])), [found, found[::-1]])


@TABLE
def test_a_prompt_of_equal_rewards_is_flat_for_sampler_view_and_page(rewards, exact):
    is_flat = min(exact) == max(exact)
    table = PromptTable(index_of({0: [(1, reward, False) for reward in rewards]}), 1)
    table.refresh()
    assert table.flat[:1].tolist() == [is_flat]
    newest = [
        {"error": None, "guided": None, "policy_version": 1, "visit": 1, "passed": 0, "reward": r} for r in rewards
    ]
    assert summary(newest)["flat"] == is_flat
    waste = next(view for view in VIEWS if "VIEW waste" in view)
    condition = waste.partition("HAVING")[2].partition("))) AS flat_groups")[0] + ")"
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (reward REAL)")
    connection.executemany("INSERT INTO t VALUES (?)", [[reward] for reward in rewards])
    assert len(connection.execute(f"SELECT COUNT(*) FROM t HAVING {condition}").fetchall()) == is_flat


@TABLE
def test_equal_rewards_have_neighbouring_ranks_in_the_order_of_their_age(rewards, exact):
    newest_first = sorted(range(len(rewards)), key=lambda n: (-exact[n], -n))
    chances = np.exp(_log_weights(np.array(rewards), "rank", rules()))
    assert chances.tolist() == pytest.approx([1 / (newest_first.index(n) + 1) for n in range(len(rewards))])


@pytest.mark.parametrize("kind", ["response", "mean"])
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 0.7, 1e6 / 3, -0.1])
@pytest.mark.parametrize("samples", [3, 5, 6, 7])
def test_without_an_advantage_no_response_of_trajectory_balance_is_tapered(samples, reward, kind):
    """At the reference, with equal rewards, each advantage of Eq. 7 is 0: the weight is 1 whatever the ratio is."""
    responses = case(samples=samples, drift=1.0)
    reward_bK = torch.full_like(responses.reward_bK, reward)
    responses = replace(responses, reward_bK=reward_bK, reference_bK=responses.policy_bK.detach())
    terms = trajectory_balance(responses, 0.01, taper_kind=kind)
    assert torch.equal(terms.weight_bK, torch.ones_like(reward_bK))
    reward_bK[:, 0] += 1e-6 * abs(reward)
    weight_bK = trajectory_balance(replace(responses, reward_bK=reward_bK), 0.01, taper_kind=kind).weight_bK
    assert (weight_bK[:, 1:] < 1).any()
