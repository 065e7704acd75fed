"""A log Z of each turn: exact in a world of two turns, and the same however a batch is cut.

At the optimum each action makes log pi / ref + log Z(h) = r / beta + E log Z(h'), so no luck is left to be explained.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tba.common.config import ObjectiveSection
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import make_batch, make_learner, make_row, objective, random_batch
from tba.tests.helpers.two_turns import BETA, Policy, gain, gain_of, group_of, make_sampler, make_world, train
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.step.turns import turns_of

FAR = make_sampler(4, parts=32, spread=4.0)
SAMPLERS = [make_sampler(seed, parts=8) for seed in range(4)] + [FAR]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("deterministic", SAMPLERS[0]), ("random", SAMPLERS[0]), *(("luck", sampler) for sampler in SAMPLERS)],
)
def test_with_a_log_z_of_each_turn_the_optimum_is_reached_from_every_sampler(kind, sampler):
    assert gain_of(objective("tb", log_z="turn"), make_world(kind), sampler) > 0.9995


@pytest.mark.slow
def test_luck_that_the_policy_sees_moves_tb_and_oapl_off_the_optimum_on_stale_data_only():
    stale, fixed = SAMPLERS[0], make_world("deterministic")
    assert gain_of(objective("tb"), fixed, stale) > 0.9995
    assert gain_of(objective("tb"), make_world("random"), stale) < 0.97
    for name in ("tb", "oapl"):
        assert gain_of(objective(name), make_world("luck"), stale) < 0


@pytest.mark.slow
def test_token_weights_without_truncation_survive_luck():
    assert gain_of(objective("tba_prime", truncation=1e9), make_world("luck"), SAMPLERS[1]) > 0.9995


@pytest.mark.slow
def test_a_learned_log_z_of_histories_that_no_other_sample_has_is_exact_too():
    # Each first action and observation once in a group, and the second actions in proportion over the groups.
    world, policy, second = make_world("luck"), Policy(), SAMPLERS[0].second_AOa
    uniform = replace(SAMPLERS[0], first_A=torch.full((3,), 1 / 3, dtype=torch.float64))
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    chosen_89 = torch.stack([torch.arange(3).repeat_interleave((8 * p).long()) for p in second.view(9, 3)], 1)
    path_N3 = torch.cat([torch.cat([pairs, one[:, None]], 1) for one in chosen_89])
    value_AO = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    balance = objective("tb", log_z="turn")
    train(policy, lambda: balance.loss(group_of(world, uniform, policy, path_N3, 9, value_AO), BETA), value_AO)
    assert gain(world, policy) > 0.9995
    learned = value_AO.detach() + BETA * torch.tensor(3.0).log()
    assert torch.allclose(learned, BETA * (world.reward_AOa / BETA).logsumexp(2), atol=2e-3)


def episodes(seed: int, prompts: int = 2, samples: int = 4) -> TrainBatch:
    """Return a batch of episodes of up to three turns, some of which begin alike."""
    rng = np.random.default_rng(seed)
    rows, turn_rewards = [], []
    for n in range(prompts * samples):
        turns = [rng.integers(0, 2, size=2) for _ in range(1 + n % 3)]
        ids = np.concatenate([*(np.concatenate([turn, [3]]) for turn in turns[:-1]), turns[-1]])
        mask = np.concatenate([*([1, 1, 0] for _ in turns[:-1]), [1, 1]]).astype(np.uint8)
        rows.append(make_row(n, [1, 4 + n // samples], ids, loss_mask=mask))
        turn_rewards.append(rng.random(len(turns)).tolist())
    rewards = np.array([sum(each) for each in turn_rewards]).reshape(prompts, samples)
    return replace(make_batch(rows, rewards), turn_rewards=turn_rewards)


def gradient(batch: TrainBatch, **train_keys) -> tuple[float, torch.Tensor]:
    learner = make_learner(name="tb", keys={"log_z": "turn"}, double=True, **train_keys)
    reference_BK, _, of_tokens = learner._complete_reference(batch)
    assert learner.log_z is not None
    with torch.no_grad():
        # So that what is learned matters.
        not_none(learner.log_z).linear.weight.fill_(0.1)
    sums = learner.accumulate(batch, reference_BK, 0.3, of_tokens)
    return sums.loss, torch.cat([one.grad.flatten() for one in learner.trained if one.grad is not None])


@pytest.mark.parametrize("keys", [{"micro_batch_tokens": 40}, {"micro_batch_tokens": 9}, {"packing": "packed"}])
def test_the_loss_over_turns_does_not_depend_on_how_the_batch_is_cut(keys):
    loss, whole = gradient(episodes(1))
    other_loss, other = gradient(episodes(1), **keys)
    assert other_loss == pytest.approx(loss, rel=1e-9)
    assert torch.allclose(whole, other, rtol=1e-6, atol=1e-9)
    assert whole.abs().max() > 1e-3


def test_with_one_turn_each_it_is_trajectory_balance():
    batch, steps = random_batch(3), []
    for keys in ({}, {"log_z": "turn"}):
        learner = make_learner(name="tb", keys=keys)
        steps.append([learner.step(batch).metrics["loss"] for _ in range(3)])
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)


def test_turns_share_a_history_only_with_the_same_tokens_before_in_the_same_group():
    mask = np.array([1, 0, 1], np.uint8)
    answers = [[0, 5, 1], [0, 5, 2], [0, 6, 1], [2, 5, 1], [0, 5, 1], [0, 5, 1]]
    rows = [make_row(n, [1], ids, loss_mask=mask) for n, ids in enumerate(answers)]
    turns = turns_of(rows, torch.ones(6), [[0.25, 0.75]] * 6, -torch.ones(18), 4)
    first, second = turns.history_S.view(6, 2).T.tolist()
    assert first == [first[0]] * 4 + [first[4]] * 2
    assert first[0] != first[4]
    assert [second.index(one) for one in second] == [0, 0, 2, 3, 4, 4]
    assert turns.shared_S.view(6, 2)[:, 1].tolist() == [True, True, False, False, True, True]
    assert (turns.lengths, turns.reference_S.tolist()) == ([1] * 12, [-1.0] * 12)
    assert turns.reward_S.view(6, 2)[0].tolist() == [0.25, 0.75]


def test_a_trajectory_that_is_drawn_twice_shares_its_histories_with_no_other_sample():
    mask = np.array([1, 0, 1], np.uint8)
    rows = [make_row(id_, [1], ids, loss_mask=mask) for id_, ids in ((7, [0, 5, 1]), (7, [0, 5, 1]), (8, [2, 5, 1]))]
    turns = turns_of(rows, torch.zeros(3), [[]] * 3, torch.zeros(9), 3)
    assert turns.shared_S.tolist() == [True, False] * 3


def test_the_last_turn_has_what_no_turn_is_said_to_have_earned():
    mask = np.array([1, 0, 1, 1], np.uint8)
    rows = [make_row(n, [1], [0, 5, 1, 1], loss_mask=mask) for n in range(3)]
    rows[2] = make_row(2, [1], [])
    turns = turns_of(rows, torch.tensor([1.0, 2.0, 3.0]), [[0.5, 0.25], [], []], -torch.ones(8), 3)
    assert turns.reward_S.tolist() == [0.5, 0.5, 0.0, 2.0, 3.0]
    assert turns.lengths == [1, 2, 1, 2, 0]


def test_a_log_z_of_each_turn_is_refused_where_it_has_no_meaning():
    for keys in ({"name": "tba_prime"}, {"name": "tb_learned_z"}, {"imitation": 0.5}, {"taper": "mean"}):
        with pytest.raises(ValidationError, match=r'set objective\.name = "tb"'):
            ObjectiveSection(log_z="turn", **keys)
