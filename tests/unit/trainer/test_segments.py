"""Episodes: sequences of a row are computed alone, and a log Z of each turn is exact in a world of two turns."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tba.common.wire.trajectory import sequences
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.puts import make_episode
from tba.tests.helpers.trainer import make_batch, make_learner, make_row, objective, random_batch, tiny_model
from tba.tests.helpers.two_turns import (
    BETA,
    Expected,
    Policy,
    Sampler,
    gain,
    gain_of,
    group_of,
    make_sampler,
    make_world,
    mean_imitation,
    paths,
    train,
)
from tba.tests.runner import slow
from tba.trainer.batch.batch import Row, TrainBatch, counted, decode
from tba.trainer.model.scorer import Scorer
from tba.trainer.step.accumulate import turns_of

MODEL: dict[str, Any] = {"vocabulary": 10, "layers": 2}
EPISODE = make_episode()


def row_of(episode: Any, id_: int = 0, **fields: Any) -> Row:
    logprobs = {"sampling_logprobs": episode.logprobs, "loss_mask": episode.loss_mask, "segments": episode.segments}
    return make_row(id_, episode.prompt_ids, episode.response_ids, **{**logprobs, **fields})


def by_sequences(model: Any, episode: Any) -> list[torch.Tensor]:
    """Return the log-probability of each sampled token, from a forward pass over each sequence by itself."""
    found = []
    for context_ids, response_ids, mask, _ in sequences(episode):
        tokens = torch.from_numpy(np.concatenate([context_ids, response_ids]).astype(np.int64))
        logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        first = len(context_ids)
        found += [logprobs[first + n - 1, tokens[first + n]] for n in range(len(response_ids)) if mask[n]]
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_with_segments_has_the_log_probabilities_of_its_sequences_alone(packed):
    model = tiny_model(**MODEL)
    others = random_batch(3).rows
    rows = [others[0], row_of(EPISODE), *others[1:4], row_of(EPISODE), others[4]]
    expected = torch.stack(by_sequences(model, EPISODE))
    scores = Scorer(model, packed=packed).score(rows, tempered=True, pooled=True, entropy=True)
    parts = torch.split(scores.logprob_R, [len(row.response_ids) for row in rows])
    for n in (1, 5):
        assert torch.allclose(parts[n][counted([rows[n]])], expected, atol=1e-5, rtol=0)
        assert parts[n][EPISODE.loss_mask == 0][1:].tolist() == [0.0] * 5
    alone = Scorer(model, packed=packed).score(others[:5], pooled=True)
    assert torch.allclose(torch.cat([parts[0], *parts[2:5], parts[6]]), alone.logprob_R, atol=1e-5, rtol=0)
    # Of the first context, which is the prompt.
    (first_H,) = not_none(Scorer(model, packed=packed).score([row_of(EPISODE).sequences[0]], pooled=True).prompt_NH)
    prompt_NH = not_none(scores.prompt_NH)
    assert torch.allclose(prompt_NH[[0, 2, 3, 4, 6]], not_none(alone.prompt_NH), atol=1e-5, rtol=0)
    assert torch.allclose(prompt_NH[1], first_H, atol=1e-5, rtol=0)
    assert [len(prompt_NH), len(not_none(scores.entropy_R))] == [len(rows), len(scores.logprob_R)]


def same_turns(id_: int, prompt: list[int], turns: list[list[int]], *, cut: bool) -> Row:
    """Return turns with an observation of one token between them, or all of their context again if `cut`."""
    response, mask, segments, context = list(turns[0]), [1] * len(turns[0]), [], [*prompt, *turns[0]]
    for turn in turns[1:]:
        context.append(9)
        added = context if cut else [9]
        segments += [len(response)] if cut else []
        response += [*added, *turn]
        mask += [0] * len(added) + [1] * len(turn)
        context += turn
    return make_row(
        id_,
        prompt,
        response,
        sampling_logprobs=np.where(mask, -1.5, 0.0).astype(np.float32),
        loss_mask=np.array(mask, np.uint8),
        segments=np.array(segments, np.int32),
        on_policy=id_ == 1,
    )


def batch_of(*, cut: bool) -> TrainBatch:
    """Return two groups of three episodes with one to four turns."""
    rng = np.random.default_rng(0)
    turns = [[rng.integers(0, 10, 1 + n % 3).tolist() for _ in range(1 + n % 4)] for n in range(6)]
    rows = [same_turns(n, [1, 2 + n // 3], turns[n], cut=cut) for n in range(6)]
    return make_batch(rows, rng.random((2, 3)))


def step_of(batch: TrainBatch, name: str, tokens: int) -> tuple[Any, torch.Tensor]:
    """Return the result of a step and its gradient, before clipping."""
    own = {"entropy": True, "end_ids": frozenset({1})}
    name, keys = ("tb", {"log_z": "turn"}) if name == "turn" else (name, {})
    learner = make_learner(name=name, keys=keys, own=own, model=MODEL, double=True, micro_batch_tokens=tokens)
    reference_BK, _, of_tokens = learner._complete_reference(batch)
    if learner.log_z is not None:
        with torch.no_grad():
            # So that what is learned matters.
            learner.log_z.linear.weight.copy_(torch.linspace(-1, 1, 16))
    learner.accumulate(batch, reference_BK, 0.3, of_tokens)
    gradient = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])
    learner.optimizer.zero_grad()
    return learner.step(batch), gradient


@pytest.mark.parametrize("tokens", [20, *slow(10_000)])
@pytest.mark.parametrize(
    "name",
    ["tb", "turn", "tb_stale", "tb_learned_z", "tb_prefix", "oapl", "grpo", "dr_grpo", "ppo_clip", "ppo", "cispo"],
)
def test_the_loss_does_not_depend_on_how_many_sequences_an_episode_became(name, tokens):
    whole, cut = batch_of(cut=False), batch_of(cut=True)
    (expected, of_whole), (found, of_cut) = (step_of(batch, name, tokens) for batch in (whole, cut))
    # The head is always float32.
    near = 1e-6 if name in ("turn", "tb_learned_z", "tb_prefix", "ppo") else 1e-8
    assert of_whole.abs().max() > 1e-6
    assert torch.allclose(of_cut, of_whole, atol=near if near > 1e-8 else 1e-12, rtol=0)
    same = [n for n in expected.metrics if n not in ("tokens", "grad_cosine")]
    assert {n: found.metrics[n] for n in same} == pytest.approx({n: expected.metrics[n] for n in same}, abs=near)
    for field in ("logprob", "log_ratio", "advantage", "weight", "mismatch"):
        assert getattr(found.rows, field) == pytest.approx(getattr(expected.rows, field), abs=near)
    mean = sum(int(row.loss_mask.sum()) for row in whole.rows) / len(whole.rows)
    assert found.metrics["response_tokens_mean"] == mean


def test_a_recorded_batch_of_episodes_gives_the_same_step_bit_for_bit_after_a_restart(harness):
    buffer = harness()
    buffer.fill(2, 0)
    for n in range(2):
        group = [make_episode(f"p{n}", 0, tokens=[n, k, *EPISODE.response_ids[2:]], reward=k / 2) for k in range(2)]
        buffer.put(group, first_sequence=10 * n)
    numbers = []
    for _ in range(2):
        reply = buffer.sample(0, prompts=2, samples=2)
        frames = [memoryview(frame) for frame in reply.frames]
        learner = make_learner(model=MODEL)
        result = learner.step(decode(reply.message, frames, prompts=2, samples=2))
        weights = torch.cat([parameter.detach().flatten() for parameter in learner.policy.parameters()])
        numbers.append((result.metrics, result.rows, result.reference, weights.numpy().tobytes()))
        buffer.store.close()
        buffer = harness(buffer.store.path)
    assert numbers[0] == numbers[1]
    assert numbers[0][0]["grad_norm"] > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_value_of_a_token_is_of_the_hidden_state_before_it(packed):
    batch = episodes(4)
    rows = [*batch.rows[:3], make_row(9, [1, 2], []), *batch.rows[3:]]
    learner = make_learner(model={"seed": 1}, double=True, packing="packed" if packed else "padded")
    found_SH = not_none(learner.scorer.score(rows, places="token").place_SH)
    expected = []
    for row in rows:
        tokens = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        hidden_TH = learner.policy.base_model(input_ids=tokens).last_hidden_state[0].detach()
        expected += [hidden_TH[len(row.prompt_ids) - 1 + t] for t, counts in enumerate(row.loss_mask) if counts]
    assert torch.allclose(found_SH, torch.stack(expected), atol=1e-12)


# At the optimum each action makes log pi / ref + log Z(h) = r / beta + E log Z(h'), so no luck is left to be explained.
FAR = make_sampler(4, parts=32, spread=4.0)
NEAR = make_sampler(0, parts=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sampler"),
    [("deterministic", NEAR), ("random", NEAR), ("luck", NEAR), ("luck", FAR)],
)
def test_with_a_log_z_of_each_turn_the_optimum_is_reached_from_every_sampler(kind, sampler):
    assert gain_of(objective("tb", log_z="turn"), make_world(kind), sampler) > 0.9995


EVEN = Sampler(torch.full((3,), 1 / 3).double(), torch.full((3, 3, 3), 1 / 3).double(), 3)


@pytest.mark.parametrize(
    ("name", "keys", "samples"),
    [("tb", {}, 27), ("oapl", {"value_beta": "beta"}, 27), ("tba_prime", {}, 3), ("tb_stale", {}, 3)],
)
def test_the_expected_gradient_of_an_objective_is_its_mean_over_all_groups(name, keys, samples):
    world, policy = make_world("luck"), Policy()
    policy.logits.data.normal_(std=2.0, generator=torch.Generator().manual_seed(1))
    path_N3 = paths(world, EVEN)
    if samples == 3:
        path_N3 = path_N3[torch.cartesian_prod(*[torch.arange(27)] * 3).flatten()]
    exact = objective(name, **keys).loss(group_of(world, EVEN, policy, path_N3, samples), BETA)
    raised = mean_imitation(world, EVEN, 2) if name == "tb_stale" else 0.0
    expected = Expected("tba_prime" if samples == 3 else name, samples, raised=raised).loss(world, EVEN, policy)
    gradient, mean = (torch.autograd.grad(one, policy.logits)[0] for one in (exact, expected))
    assert torch.allclose(gradient, mean, atol=1e-12)
    assert gradient.abs().max() > 1e-3


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_the_world_of_two_turns_gives():
    page = (Path(__file__).parents[3] / "docs/objectives.md").read_text()
    luck, near = make_world("luck"), [make_sampler(seed) for seed in range(4)]

    def gains(samplers, name, samples=math.inf, *, cap=8.0, world=luck, imitates=False):
        raised = [mean_imitation(world, one, samples - 1) if imitates else 0.0 for one in samplers]
        found = [Expected(name, samples, cap, add).gain(world, one) for one, add in zip(samplers, raised, strict=True)]
        ends = dict.fromkeys(f"{round(100 * one):,}".replace("-", "−") for one in (min(found), max(found)))
        return " to ".join(ends)

    def row(name, **keys):
        return gains(near, name, **keys), gains([FAR], name, **keys)

    without = [gains(near, "tb", world=make_world(kind)) for kind in ("random", "deterministic")]
    tb, oapl, prime = (row(name) for name in ("tb", "oapl", "tba_prime"))
    stale, few = (row("tba_prime", samples=samples, imitates=True) for samples in (16, 4))
    longer, untruncated = gains([FAR], "tba_prime", cap=32.0), gains([FAR], "tba_prime", 16, cap=1e9, imitates=True)
    few_prime = row("tba_prime", samples=4)
    assert few_prime[0] == few[0]
    for line in (
        f"| `tb`, `tb_learned_z` | {tb[0]} (no luck: {without[0]}; deterministic: {without[1]}) | {tb[1]} |",
        f'| `oapl`, `value_beta = "beta"` | {oapl[0]} | {oapl[1]} |',
        f"| `tba_prime`, large K | {prime[0]} | {prime[1]} (`truncation = 32`: {longer}) |",
        f"| `tb_stale`, K = 16 | {stale[0]} | {stale[1]} (not truncated: {untruncated}) |",
        f"| `tb_stale`, K = 4 | {few[0]} (`tba_prime` too) | {few[1]} (`tba_prime`: {few_prime[1]}) |",
    ):
        assert line in page, line


@pytest.mark.slow
def test_a_learned_log_z_of_histories_that_no_other_sample_has_is_exact_too():
    # Each first action and observation once in a group, and the second actions in proportion over the groups.
    world, policy, second = make_world("luck"), Policy(), NEAR.second_AOa
    uniform = replace(NEAR, first_A=torch.full((3,), 1 / 3, dtype=torch.float64))
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
