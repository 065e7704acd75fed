"""One optimiser step of the real Learner on a tiny real model, and its chunked log-probabilities."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tba.common.errors import TbaError
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.trainer import (
    VOCABULARY,
    in_float64,
    make_batch,
    make_learner,
    make_row,
    random_batch,
    tiny_model,
)
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.metrics.stopwatch import Stopwatch
from tba.trainer.model import chunked_logprobs
from tba.trainer.model.chunked_logprobs import token_logprobs
from tba.trainer.model.scorer import Scorer, sequence_logprobs
from tba.trainer.step.learner import Learner, StepResult
from tba.trainer.step.step_metrics import stale_metrics


def naive_logprob(model, row) -> torch.Tensor:
    """Sum log p over a response from the full logits of one sequence, without padding or chunks."""
    tokens = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    first = len(row.prompt_ids)
    return sum(logprobs[t - 1, tokens[t]] for t in range(first, len(tokens)) if row.loss_mask[t - first])


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.parameters()]).clone()


@pytest.mark.parametrize("pass_tokens", [0, 64], ids=["a pass for each length", "one pass"])
def test_log_probabilities_equal_those_of_an_unpadded_forward_pass_without_masked_tokens(monkeypatch, pass_tokens):
    monkeypatch.setattr("tba.trainer.model.scorer.CPU_PASS_TOKENS", pass_tokens)
    model = in_float64(tiny_model())
    masked = make_row(1, [1, 2], [3, 4, 5], loss_mask=np.array([1, 0, 1], np.uint8))
    rows = [*random_batch(3).rows, masked, make_row(2, [1, 2], [])]
    *found, empty = sequence_logprobs(Scorer(model).score(rows).logprob_R, rows)
    expected = torch.stack([naive_logprob(model, row) for row in rows[:-1]])
    assert torch.allclose(torch.stack(found), expected, atol=1e-12, rtol=0)
    assert empty.item() == 0


def test_the_gradient_of_a_step_is_equation_7_on_the_model():
    learner, batch = make_learner(double=True, max_grad_norm=1e9), random_batch(1)
    policy = torch.stack([naive_logprob(learner.policy, row) for row in batch.rows]).view(3, 4)
    reference = torch.stack([naive_logprob(in_float64(tiny_model(seed=1)), row) for row in batch.rows]).view(3, 4)
    kl = (policy - reference).detach()
    reward = batch.reward_BK
    advantage = reward - reward.mean(1, keepdim=True) - 0.3 * (kl - kl.mean(1, keepdim=True))
    expected = torch.autograd.grad(-(advantage * policy).mean(), list(learner.policy.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected))
    found, _ = gradients_of_step(learner, batch)
    assert all(torch.allclose(a, b, atol=1e-9 * norm, rtol=0) for a, b in zip(found, expected, strict=True))


def sampled_at(temperature: float, batch: TrainBatch, model) -> TrainBatch:
    """Return the batch as `model` samples it at a temperature: with log-probabilities from its full logits."""
    rows = []
    for row in batch.rows:
        tokens = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        logprobs = (model(input_ids=tokens).logits[0].detach() / temperature).log_softmax(-1)
        first = len(row.prompt_ids)
        chosen = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        rows.append(replace(row, sampling_logprobs=chosen.float().numpy(), temperature=temperature, on_policy=True))
    return replace(batch, rows=rows)


def test_the_gradient_of_reinforce_at_a_temperature_is_that_of_the_policy_at_it():
    learner = make_learner(double=True, name="reinforce", max_grad_norm=1e9, micro_batch_tokens=16)
    batch = random_batch(5)
    rows = [replace(row, temperature=(0.7, 1.0, 1.3)[n % 3]) for n, row in enumerate(batch.rows)]
    total = torch.zeros((), dtype=torch.float64)
    for row, reward in zip(rows, batch.reward_BK.flatten().tolist(), strict=True):
        tokens = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        logprobs = (learner.policy(input_ids=tokens).logits[0] / row.temperature).log_softmax(-1)
        first = len(row.prompt_ids)
        total = total - reward * logprobs[first - 1 : -1].gather(1, tokens[0, first:, None]).sum() / len(rows)
    expected = torch.autograd.grad(total, list(learner.policy.parameters()))
    found, _ = gradients_of_step(learner, replace(batch, rows=rows))
    assert all(torch.allclose(a, b, atol=1e-12, rtol=1e-9) for a, b in zip(found, expected, strict=True))


def test_norms_and_biases_have_no_weight_decay():
    """AdamW without a gradient only decays: a rate of 0.01 and a decay of 0.5 take 0.5 % of a matrix."""
    learner = make_learner(weight_decay=0.5)
    before = {name: tensor.detach().clone() for name, tensor in learner.policy.named_parameters()}
    for parameter in learner.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner._update(1.0)
    for name, tensor in learner.policy.named_parameters():
        kept = 1.0 if tensor.ndim == 1 else 0.995
        assert torch.allclose(tensor.detach(), before[name] * kept, rtol=1e-6), name
    assert {tensor.ndim for tensor in before.values()} == {1, 2}


def gradients_of_step(learner: Learner, batch) -> tuple[list[torch.Tensor], StepResult]:
    """Return the gradients that the optimiser receives, and the result of the step."""
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in learner.policy.parameters())
    )
    return seen, learner.step(batch)


def test_gradient_checkpointing_changes_no_gradient():
    batch = random_batch(2)
    normal, checkpointing = make_learner(double=True), make_learner(double=True, gradient_checkpointing=True)
    assert checkpointing.policy.training
    policy = checkpointing.policy
    # transformers 5.24 warns of the old name.
    assert getattr(policy, "is_activation_checkpointing", False) or policy.is_gradient_checkpointing
    (expected, _), (found, _) = gradients_of_step(normal, batch), gradients_of_step(checkpointing, batch)
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(found, expected, strict=True))


def test_stored_reference_values_are_used_and_missing_ones_computed_and_returned():
    batch = random_batch(1)
    result = make_learner().step(batch)
    assert result.reference.keys() == {row.id for row in batch.rows}
    expected = naive_logprob(tiny_model(seed=1), batch.rows[5]).item()
    assert result.reference[batch.rows[5].id] == pytest.approx(expected, abs=1e-5)
    stored = [[result.reference[row.id] for row in batch.rows[b * 4 : b * 4 + 4]] for b in range(3)]
    stored[1][1] = math.nan
    again = make_learner().step(make_batch(batch.rows, batch.reward_BK.tolist(), reference=stored))
    assert again.reference.keys() == {batch.rows[5].id}
    assert again.metrics["loss"] == pytest.approx(result.metrics["loss"], rel=1e-6)


def test_the_reference_of_a_repeated_trajectory_is_computed_once():
    rows = [make_row(1, [1], [2, 3]), make_row(1, [1], [2, 3]), make_row(2, [1], [4])]
    result = make_learner().step(make_batch(rows, [[1.0, 1.0, 0.0]]))
    assert result.reference.keys() == {1, 2}
    assert result.metrics["reference_computed"] == 2


def test_the_mismatch_is_measured_on_on_policy_tokens_only():
    model = tiny_model()
    row = make_row(1, [1, 2], [3], on_policy=True)
    exact = naive_logprob(model, row).item()
    fresh = make_row(1, [1, 2], [3], on_policy=True, sampling_logprobs=np.array([exact - 0.25], np.float32))
    stale = make_row(2, [1, 2], [4], sampling_logprobs=np.array([-90], np.float32))
    metrics = make_learner().step(make_batch([fresh, stale], [[0.0, 1.0]])).metrics
    assert metrics["mismatch_mean"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(0.25, abs=1e-5)
    assert "mismatch_mean" not in make_learner().step(random_batch(1)).metrics


def test_all_metrics_are_finite_floats():
    metrics = make_learner().step(random_batch(1)).metrics
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def test_log_ratios_are_of_responses_above_and_below_the_mean_reward_without_demonstrations():
    log_ratio, reward = torch.tensor([[1.0, 0.5, -2.0, -4.0]]), [[1.0, 1.0, 0.0, 1.0]]
    rows = [make_row(n, [1], [2, 3], temperature=float(n < 3)) for n in range(4)]
    assert stale_metrics(make_batch(rows, reward), log_ratio) == {"log_ratio_positive": 0.75, "log_ratio_negative": -2}
    demonstrations = random_batch(1)
    demonstrations = replace(demonstrations, rows=[replace(row, temperature=0.0) for row in demonstrations.rows])
    assert not any(name.startswith("log_ratio") for name in make_learner().step(demonstrations).metrics)


def test_tokens_and_responses_that_do_not_count_say_nothing_of_masses_and_log_ratios():
    logprobs = [np.log([p, 0.1]).astype(np.float32) for p in (0.25, 0.5, 0.5)]
    masks = [np.array(mask, np.uint8) for mask in ([1, 0], [1, 0], [0, 0])]
    rows = [make_row(n, [1], [n, 9], sampling_logprobs=logprobs[n], loss_mask=masks[n]) for n in range(3)]
    found = stale_metrics(make_batch(rows, [[1.0, 0.0, 1.0]]), torch.tensor([[-3.0, -1.0, 0.0]]))
    assert found == pytest.approx(
        {
            "log_ratio_positive": -3.0,
            "log_ratio_negative": -1.0,
            "sampled_mass": 0.75,
            "policy_mass": 0.25 * math.exp(-3) + 0.5 * math.exp(-1),
        }
    )


def test_the_cosine_is_that_of_the_gradient_and_the_mean_of_the_earlier_ones():
    learner = make_learner(double=True, max_grad_norm=1e9, adam_betas=[0.5, 0.9])
    first, second, third = (
        torch.cat([gradient.flatten() for gradient in gradients_of_step(learner, random_batch(seed))[0]])
        for seed in range(3)
    )
    mean = 0.5 * (0.5 * first) + 0.5 * second
    expected = torch.nn.functional.cosine_similarity(third, mean, dim=0).item()
    learner = make_learner(double=True, max_grad_norm=1e9, adam_betas=[0.5, 0.9])
    metrics = [learner.step(random_batch(seed)).metrics for seed in range(3)]
    assert "grad_cosine" not in metrics[0]
    assert metrics[2]["grad_cosine"] == pytest.approx(expected)


def test_the_truncated_share_counts_responses_without_an_end_token():
    rows = [make_row(1, [1], [3, 2]), make_row(2, [1], [2, 3]), make_row(3, [1], []), make_row(4, [1], [5])]
    batch = make_batch(rows, [[0.0, 1.0, 0.0, 1.0]])
    assert "truncated_share" not in make_learner().step(batch).metrics
    learner = make_learner(own={"end_ids": frozenset({2, 5})})
    assert learner.step(batch).metrics["truncated_share"] == 0.5
    # The last sampled token decides, not what an environment answered to it.
    mask = np.array([1, 0], np.uint8)
    answered = make_batch([make_row(n, [1], [2, 3], loss_mask=mask) for n in range(2)], [[0.0, 1.0]])
    assert learner.step(answered).metrics["truncated_share"] == 0.0


def test_a_step_with_an_infinite_loss_counts_but_changes_neither_weights_nor_optimiser():
    learner, batch = make_learner(), random_batch(1, step=7)
    before = parameters(learner)
    broken = make_batch(batch.rows, [[math.inf, 0, 0, 0], [0] * 4, [0] * 4], step=7)
    result = learner.step(broken)
    assert re.match("loss nan.*: trajectories 100$", result.skipped)
    assert result.metrics["skipped"] == 1
    assert "loss" not in result.metrics
    assert torch.equal(parameters(learner), before)
    assert not learner.optimizer.state
    assert learner.steps_done == 1
    assert result.reference.keys() == {row.id for row in batch.rows}
    assert all(p.grad is None for p in learner.policy.parameters())
    learner.step(batch)
    assert not torch.equal(parameters(learner), before)


# Rewards of three groups, and the rows that are to blame.
HUGE: list[tuple[list[list[float]], list[int]]] = [
    ([[0, 1, 0, 0], [0, 1e160, 0, 1], [0, 0, 1, 0]], [5]),
    ([[0, 1, 0, 0], [0, -1e160, 0, 1], [0, 0, 1, 0]], [5]),
    ([[1e300, 1, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1e300]], [0, 11]),
    ([[0, 1, 0, 0], [1e40] * 4, [0, 0, 1, 0]], [4, 5, 6, 7]),
    ([[0, 1, math.inf, 0], [0, 1, 0, 1], [0, 0, 1, 0]], [2]),
    ([[0, 1, 0, 0], [0, 1, 0, 1], [-math.inf, 0, math.nan, 0]], [8, 10]),
    ([[0, 1e6, 0, 0], [0, -1e6, 0, 1], [0, 0, 1, 0]], []),
]


@pytest.mark.parametrize(("rewards", "blamed"), HUGE)
@pytest.mark.parametrize("name", ["tb", "tb_stale", "rloo", "oapl", "grpo", "cispo", "dr_grpo", "online_dpo"])
def test_a_reward_that_the_buffer_would_refuse_skips_the_step_and_is_blamed_alone(name, rewards, blamed):
    batch, learner = random_batch(1), make_learner(name=name)
    before = parameters(learner)
    result = learner.step(make_batch(batch.rows, rewards))
    assert result.blamed == [batch.rows[n].id for n in blamed]
    assert result.metrics["skipped"] == bool(blamed)
    assert torch.equal(parameters(learner), before) == bool(blamed)


@pytest.mark.parametrize(
    ("broken", "reason", "stored"),
    [("policy", "loss nan", {31, 32}), ("reference", "a reference log-probability is not finite", {31})],
)
def test_the_trajectory_whose_log_probability_is_nan_is_blamed_and_what_is_finite_is_stored(broken, reason, stored):
    learner = make_learner()
    model = learner.policy if broken == "policy" else learner.reference.scorer.model
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = math.nan
    rows = [make_row(31, [1], [2, 3]), make_row(32, [1], [7, 3])]
    result = learner.step(make_batch(rows, [[0.0, 1.0]]))
    assert result.skipped.startswith(reason)
    assert result.skipped.endswith(": trajectories 32")
    assert result.blamed == [32]
    assert result.reference.keys() == stored
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_the_time_of_a_step_is_attributed_to_its_phases():
    clock = ManualClock()
    watch = Stopwatch(clock)
    learner = make_learner(own={"watch": watch})
    for model, seconds in ((learner.reference.scorer.model, 1), (learner.policy, 10)):
        model.base_model.register_forward_hook(lambda *_, seconds=seconds: clock.advance(seconds))
    learner.optimizer.register_step_pre_hook(lambda *_: clock.advance(100))
    learner.policy.lm_head.weight.register_hook(lambda _: clock.advance(1000))
    learner.step(random_batch(1))
    taken = {name: value for name, value in watch.take().items() if value}
    passes = taken["seconds_forward"] / 10
    assert taken == {
        "seconds_reference": taken["seconds_reference"],
        "seconds_forward": 10 * passes,
        "seconds_optimizer": 100,
        "seconds_backward": 1000,
        "seconds_step": taken["seconds_reference"] + 10 * passes + 1100,
    }


def test_the_entropy_is_the_mean_over_counted_tokens_and_changes_no_gradient():
    batch = random_batch(1)
    learners = [make_learner(double=True, own={"entropy": entropy}) for entropy in (False, True)]
    expected = torch.cat([_entropies(learners[0].policy, row) for row in batch.rows]).mean().item()
    results = [learner.step(batch) for learner in learners]
    assert results[1].metrics.pop("entropy") == pytest.approx(expected, abs=1e-10)
    assert results[1].metrics == pytest.approx(results[0].metrics, abs=1e-12)
    assert torch.allclose(parameters(learners[0]), parameters(learners[1]), atol=1e-12, rtol=0)


@torch.no_grad()
def _entropies(model, row) -> torch.Tensor:
    """Return the entropy of each distribution that predicts a response token, from the full logits."""
    tokens = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
    logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
    return -(logprobs.exp() * logprobs).sum(-1)


def test_a_token_outside_the_vocabulary_is_reported_with_its_trajectory():
    rows = [make_row(1, [1], [2]), make_row(5, [1], [VOCABULARY])]
    with pytest.raises(TbaError, match="trajectory 5 has token ids outside"):
        make_learner().step(make_batch(rows, [[0.0, 1.0]]))


def test_gradients_are_clipped_to_the_configured_norm():
    learner = make_learner(max_grad_norm=1e-3)
    found, _ = gradients_of_step(learner, random_batch(1))
    assert math.sqrt(sum(float(g.square().sum()) for g in found)) == pytest.approx(1e-3, rel=1e-3)


def test_the_scheduled_learning_rate_and_beta_are_used_and_recorded():
    learner = make_learner(warmup_steps=2, learning_rate=0.01, beta=1.0, beta_final=0.5, beta_anneal_steps=2)
    weights, metrics = [parameters(learner)], []
    for seed in range(3):
        metrics.append(learner.step(random_batch(seed)).metrics)
        weights.append(parameters(learner))
    assert [one["learning_rate"] for one in metrics] == pytest.approx([0, 0.005, 0.01])
    assert [one["beta"] for one in metrics] == [1.0, 0.75, 0.5]
    assert torch.equal(weights[0], weights[1])
    # AdamW's first updates are about as large as the learning rate.
    assert 0.002 < float((weights[2] - weights[1]).abs().max()) < 0.02


@pytest.mark.slow
def test_a_learned_log_z_converges_to_the_vargrad_estimate_of_a_fixed_policy():
    learner = make_learner(name="tb_learned_z", learning_rate=1e-12, max_grad_norm=1e9)
    batch = random_batch(3)
    # The head's group comes last.
    learner.optimizer.param_groups[-1]["lr"] = 0.05
    metrics = [learner.step(batch).metrics for _ in range(80)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    prompt_NH = Scorer(learner.policy).score(batch.rows, pooled=True).prompt_NH
    assert not_none(learner.log_z)(not_none(prompt_NH)[::4]).mean().item() == pytest.approx(
        metrics[-1]["log_z"], rel=0.02
    )


def test_no_reference_is_computed_if_the_objective_does_not_need_it():
    result = make_learner(name="grpo").step(random_batch(0))
    assert result.reference == {}
    assert "kl" not in result.metrics


def expected_logprobs(head: nn.Linear, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return head(hidden).log_softmax(1).gather(1, target[:, None])[:, 0]


def case(bias: bool, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias).to(dtype)
    return head, torch.randn(13, 6, dtype=dtype, requires_grad=True), torch.randint(11, (13,))


def test_autocast_computes_products_in_bfloat16_and_sums_in_float32():
    head, hidden, target = case(bias=False, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(head, hidden, target)[0]
    assert found.dtype == torch.float32
    difference = (found - expected_logprobs(head, hidden, target)).abs().max().item()
    assert 0 < difference < 0.05
    torch.autograd.backward(found.sum())
    assert head.weight.grad.dtype == torch.float32


def test_exact_logits_round_the_factors_only_and_have_the_same_gradient_types():
    head, hidden, target = case(bias=True, dtype=torch.float32)
    rounded = nn.Linear(6, 11)
    rounded.weight.data, rounded.bias.data = head.weight.data.bfloat16().float(), head.bias.data
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(head, hidden, target, exact=True)[0]
    expected = expected_logprobs(rounded, hidden.bfloat16().float(), target)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found_gradients = torch.autograd.grad(found.sum(), [hidden, head.weight, head.bias])
    gradients = torch.autograd.grad(expected.sum(), [hidden, rounded.weight, rounded.bias])
    for one, other in zip(found_gradients, gradients, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.02)


def test_no_tensor_has_the_size_of_positions_times_vocabulary(monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "_CPU_LOGITS", 22)
    head, hidden, target = case(bias=False)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if hasattr(part, "numel"))
            return result

    with Sizes():
        torch.autograd.backward(token_logprobs(head, hidden, target)[0].sum())
    assert max(sizes) == max(13 * 6, 11 * 6)


def test_explorers_are_trained_on_at_their_ratios_and_say_nothing_of_how_far_the_policy_has_moved():
    learner = make_learner(name="dr_grpo", double=True)
    batch = random_batch(5, prompts=2)
    # The policy gives next to nothing of an explorer's responses, every other one.
    rows = [
        replace(
            row, explored=n % 2 == 1, sampling_logprobs=np.full(len(row.response_ids), -0.1 if n % 2 else -2.5, "f4")
        )
        for n, row in enumerate(batch.rows)
    ]
    batch = replace(batch, rows=rows)
    with torch.no_grad():
        policy = torch.stack([naive_logprob(learner.policy, row) for row in rows])
    log_ratio = policy - torch.tensor([float(row.sampling_logprobs.sum(dtype="f8")) for row in rows])
    sums = learner.accumulate(batch, torch.zeros_like(batch.reward_BK), 0.1)
    assert sums.log_ratio_BK.flatten().tolist() == pytest.approx(log_ratio.tolist(), rel=1e-6)
    own_R = torch.cat(torch.split(sums.log_ratio_R, [len(row.response_ids) for row in rows])[::2])
    metrics = learner.step(batch).metrics
    assert metrics["truncated_fraction"] == float(((own_R.exp() < 0.8) | (own_R.exp() > 1.2)).double().mean())
    assert metrics["log_ratio_mean"] == pytest.approx(float(log_ratio[::2].mean()), rel=1e-6)
    good = (batch.reward_BK > batch.reward_BK.mean(dim=1, keepdim=True)).flatten()
    good[1::2] = False
    assert metrics["log_ratio_positive"] == pytest.approx(float(log_ratio[good].mean()), rel=1e-6)
    shown = [metrics[name] for name in ("explored_share", "explored_reward_mean", "own_reward_mean")]
    assert shown == pytest.approx([0.5, float(batch.reward_BK[:, 1::2].mean()), float(batch.reward_BK[:, ::2].mean())])
