"""The numbers of each row of a step, and which part of an objective is at the temperature of sampling."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from tba.tests.helpers.checks import not_none
from tba.tests.helpers.puts import read_log_ratios
from tba.tests.helpers.trainer import LONGEST_RESPONSE, make_batch, make_learner, objective, random_batch
from tba.tests.unit.trainer.test_objectives import BETA, NAMES, case, group_advantages, raised
from tba.tests.unit.trainer.test_step import gradients_of_step, naive_logprob, sampled_at
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.objectives.policy_gradient import negative_log_likelihood
from tba.trainer.objectives.responses import Responses

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("tb", {"imitation": 0.5, "reward_floor": -1.0, "taper": "response"}),
    ("rloo", {"kl": "reference", "taper": "mean"}),
    ("tba_prime", {"truncation": "off"}),
    ("tb_stale", {"truncation": 1.0}),
    ("ppo_clip", {"kl": "ema"}),
    ("cispo", {}),
    ("distill", {"truncation": "off"}),
]


def stale_case(seed: int) -> Responses:
    """Return far from fresh responses; the sampler of two is unknown, and no token of another one counts."""
    known_bK = torch.tensor([True] * 5 + [False] * 2 + [True] * 5).view(3, 4)
    responses = replace(case(seed, drift=0.6), known_bK=known_bK)
    mask_R = responses.mask_R.clone()
    mask_R[: responses.lengths[0]] = False
    return replace(responses, mask_R=mask_R)


def divisor(name: str, responses: Responses) -> torch.Tensor:
    """Return what the gradient of each response is divided by: [b, K]."""
    totals, tokens_bK = responses.totals, responses.tokens_bK.clamp(min=1)
    divisors: dict[str, torch.Tensor | int] = {
        "grpo": totals.rows * tokens_bK,
        "flowrl": totals.rows * tokens_bK,
        "dr_grpo": totals.rows * LONGEST_RESPONSE,
        "ppo_clip": totals.tokens,
        "ppo": totals.tokens,
        "cispo": totals.tokens,
        "distill": totals.tokens,
        "online_dpo": totals.prompts,
    }
    return torch.ones_like(tokens_bK) * divisors.get(name, totals.rows)


@pytest.mark.parametrize(("name", "keys"), VARIANTS)
@pytest.mark.parametrize("seed", range(2))
def test_the_gradient_of_a_row_is_its_weight_times_its_advantage(name, keys, seed):
    responses = stale_case(seed)
    terms = objective(name, **keys).terms(responses, BETA)
    (gradient_R,) = torch.autograd.grad(terms.loss, responses.logprob_R)
    expected = -terms.weight_bK * terms.advantage_bK * responses.tokens_bK / divisor(name, responses)
    assert torch.allclose(responses.per_row(gradient_R), expected, atol=1e-13, rtol=1e-11)
    assert not terms.advantage_bK.requires_grad
    assert not terms.weight_bK.requires_grad
    assert terms.weight_bK.min() >= 0
    # A demonstration, and tokens whose ratio is not known, are left out of what needs the sampler.
    needs_sampler = name in ("oapl", "grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo")
    assert (terms.weight_bK[~not_none(responses.known_bK)] == 0).all() or not needs_sampler
    assert expected.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "ppo_clip", "ppo", "proximal_rloo"])
def test_a_row_whose_ratio_is_a_numerical_error_has_no_weight_and_no_gradient(name):
    responses = stale_case(0)
    responses = replace(responses, sampled_logprob_R=responses.sampled_logprob_R - 25)
    terms = objective(name).terms(responses, BETA)
    (gradient_R,) = torch.autograd.grad(terms.loss, responses.logprob_R)
    assert not gradient_R.any()
    assert not (terms.weight_bK * responses.tokens_bK).any()


def test_of_a_group_online_dpo_uses_the_best_and_the_worst_with_opposite_advantages():
    terms = objective("online_dpo").terms(stale_case(0), BETA)
    assert terms.weight_bK.sum(1).tolist() == [2.0] * 3
    assert torch.allclose(terms.advantage_bK.sum(1), torch.zeros(3, dtype=torch.float64))
    equal = replace(stale_case(0), reward_bK=torch.zeros(3, 4, dtype=torch.float64))
    assert objective("online_dpo").terms(equal, BETA).weight_bK.sum() == 0


def test_a_demonstration_of_sft_has_advantage_and_weight_1():
    terms = negative_log_likelihood(stale_case(0), 0.0)
    assert (terms.advantage_bK == 1).all()
    assert (terms.weight_bK == 1).all()


# ---------------------------------------------------------------- the learner


def mixed_batch(seed: int, model: Any) -> TrainBatch:
    """Return a batch at several temperatures: stale rows, fresh ones, demonstrations, an empty one and a masked one."""
    batch = random_batch(seed)
    fresh = sampled_at(0.7, batch, model).rows
    rows = []
    for n, (row, new) in enumerate(zip(batch.rows, fresh, strict=True)):
        stale = replace(row, temperature=1.3, sampling_logprobs=np.full(len(row.response_ids), -2.0, np.float32))
        demonstration = replace(row, temperature=0.0)
        rows.append([stale, new, demonstration][n % 3])
    empty = {name: getattr(rows[0], name)[:0] for name in ("response_ids", "sampling_logprobs", "loss_mask")}
    rows[0] = replace(rows[0], **empty)
    rows[4] = replace(rows[4], loss_mask=np.zeros_like(rows[4].loss_mask))
    rows[7] = replace(rows[7], loss_mask=np.arange(len(rows[7].loss_mask), dtype=np.uint8) % 2)
    return replace(batch, rows=rows)


def naive_log_ratio(model: Any, row: Any) -> list[float]:
    """Return log pi - log mu of the counted tokens at the temperature of sampling, from the full logits."""
    tokens = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
    logprobs = (model(input_ids=tokens).logits[0].detach() / row.temperature).log_softmax(-1)
    first = len(row.prompt_ids)
    each = zip(row.response_ids.tolist(), row.sampling_logprobs.tolist(), row.loss_mask.tolist(), strict=True)
    return [float(logprobs[first - 1 + t, token]) - mu for t, (token, mu, counts) in enumerate(each) if counts]


@pytest.mark.parametrize("keys", [{}, {"micro_batch_tokens": 16}, {"micro_batch_tokens": 60, "packing": "packed"}])
def test_numbers_of_rows_equal_those_of_the_full_logits(keys):
    learner = make_learner(double=True, name="grpo", **keys)
    batch = mixed_batch(3, learner.policy)
    model = make_learner(double=True).policy.requires_grad_(False)
    result = learner.step(batch)
    numbers = asdict(result.rows)
    logprobs = [float(naive_logprob(model, row)) for row in batch.rows]
    ratios = [naive_log_ratio(model, row) if row.temperature else None for row in batch.rows]
    assert numbers["logprob"] == pytest.approx(logprobs, abs=1e-9)
    assert numbers["log_ratio"] == pytest.approx([None if each is None else sum(each) for each in ratios], abs=1e-6)
    assert numbers["advantage"] == pytest.approx(group_advantages(batch.reward_BK, "std").flatten().tolist())
    for row, each, found in zip(batch.rows, ratios, read_log_ratios(numbers["token_log_ratios"]), strict=True):
        if each is None:
            assert found is None
        else:
            terms = np.zeros(len(row.response_ids))
            terms[row.loss_mask != 0] = each
            assert found == pytest.approx(terms.tolist(), rel=6e-4, abs=1e-6)
    fresh = [row.on_policy and each for row, each in zip(batch.rows, ratios, strict=True)]
    expected = [np.abs(each).mean() if each else None for each in fresh]
    assert numbers["mismatch"] == pytest.approx(expected, abs=1e-6)
    # A demonstration is left out, and a response without counted tokens has no gradient.
    usable = [bool(each) for each in ratios]
    assert all(weight == 0 for weight, used in zip(numbers["weight"], usable, strict=True) if not used)
    assert any(weight > 0 for weight, used in zip(numbers["weight"], usable, strict=True) if used)
    assert numbers["skipped"] == [weight == 0 for weight in numbers["weight"]]


@pytest.mark.parametrize(
    ("name", "keys", "tokens"),
    [
        *(("tb", {}, tokens) for tokens in (1, 30, 100)),
        ("tb", {"log_z": "turn"}, 1),
        *(pytest.param(name, {}, 1, marks=pytest.mark.slow) for name in NAMES if name != "tb"),
    ],
)
def test_gradients_and_numbers_of_rows_do_not_depend_on_micro_batches_and_chunks(name, keys, tokens):
    found = []
    for limit in (100_000, tokens):
        learner = make_learner(double=True, name=name, keys=keys, micro_batch_tokens=limit, max_grad_norm=1e9)
        gradients, result = gradients_of_step(learner, mixed_batch(3, learner.policy))
        found.append((gradients, asdict(result.rows)))
    (whole, expected), (parts, numbers) = found
    for column in expected:
        assert numbers[column] == pytest.approx(expected[column], abs=1e-9), column
    assert set(expected["weight"]) != {0.0}
    assert all(torch.allclose(a, b, atol=1e-12, rtol=1e-9) for a, b in zip(parts, whole, strict=True))
    assert max(float(gradient.abs().max()) for gradient in whole) > 1e-4


def test_means_of_the_numbers_are_the_metrics_of_the_step():
    learner = make_learner(double=True)
    batch = sampled_at(0.7, random_batch(5), make_learner(double=True, model={"seed": 7}).policy)
    result = learner.step(batch)
    metrics = result.metrics
    columns = asdict(result.rows)
    each = read_log_ratios(columns.pop("token_log_ratios"))
    rows = {name: np.array(column, float) for name, column in columns.items()}
    reference = list(result.reference.values())
    assert np.mean(rows["log_ratio"]) == pytest.approx(metrics["log_ratio_mean"], rel=1e-9)
    assert np.mean(rows["logprob"]) - np.mean(reference) == pytest.approx(metrics["kl"], rel=1e-9)
    assert np.std(rows["advantage"]) == pytest.approx(metrics["advantage_std"], rel=1e-9)
    tokens = [len(row.response_ids) for row in batch.rows]
    assert [sum(not_none(row)) for row in each] == pytest.approx(rows["log_ratio"], rel=1e-3, abs=1e-3)
    assert np.average(rows["mismatch"], weights=tokens) == pytest.approx(metrics["mismatch_mean"], rel=1e-5)
    assert (rows["weight"] == 1).all()
    assert not rows["skipped"].any()


# Rows without a counted token, and demonstrations, whose sampler is unknown: none of them has a ratio.
UNMEASURED: list[tuple[list[int], list[int]]] = [
    ([], []),
    ([0], []),
    ([0, 1, 2, 3], []),
    ([1, 5, 9], [2]),
    ([*range(10)], []),
    ([0, 4, 8], [1, 5, 9]),
    ([*range(11)], [11]),
    ([*range(12)], []),
]


@pytest.mark.parametrize(("uncounted", "demonstrated"), UNMEASURED)
@pytest.mark.parametrize("name", ["grpo", "proximal_rloo"])
def test_metrics_of_ratios_and_the_rate_are_those_of_the_rows_with_a_ratio(name, uncounted, demonstrated):
    learner = make_learner(double=True, name=name, learning_rate_by_ess=True)
    model = make_learner(double=True).policy.requires_grad_(False)
    rows = sampled_at(0.7, random_batch(3), make_learner(double=True, model={"seed": 7}).policy).rows
    for n in uncounted:
        rows[n] = replace(rows[n], loss_mask=np.zeros_like(rows[n].loss_mask))
    for n in demonstrated:
        rows[n] = replace(rows[n], temperature=0.0)
    each = [naive_log_ratio(model, row) for n, row in enumerate(rows) if n not in {*uncounted, *demonstrated}]
    metrics = learner.step(replace(random_batch(3), rows=rows)).metrics
    names = ("log_ratio_mean", "log_ratio_std", "log_ratio_min", "log_ratio_max", "effective_sample_ratio",
             "sampler_kl", "truncated_fraction")  # fmt: skip
    if not each:
        assert not metrics.keys() & {*names}
        assert (
            metrics["learning_rate"]
            == make_learner(double=True, name=name).step(random_batch(3)).metrics["learning_rate"]
        )
        return
    sums = np.array([sum(one) for one in each])
    weights, limited = np.exp(sums), np.minimum(np.exp(sums), 10)
    ratios = np.exp(np.concatenate(each)) if name == "grpo" else weights
    ess = weights.sum() ** 2 / (len(sums) * (weights**2).sum())
    expected = [sums.mean(), sums.std(), sums.min(), sums.max(), ess, (limited - 1 - np.log(limited)).mean(),
                ((ratios < 0.8) | (ratios > 1.2)).mean()]  # fmt: skip
    assert [metrics[one] for one in names] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    plain = make_learner(double=True, name=name).step(random_batch(3)).metrics["learning_rate"]
    assert metrics["learning_rate"] == pytest.approx(plain * math.sqrt(ess), rel=1e-5)


def test_log_ratios_beyond_the_range_of_half_precision_are_its_limits():
    batch = mixed_batch(3, make_learner().policy)
    far = replace(batch.rows[3], sampling_logprobs=np.full(len(batch.rows[3].response_ids), -1e6, np.float32))
    rows = make_learner().step(replace(batch, rows=[*batch.rows[:3], far, *batch.rows[4:]])).rows
    assert set(not_none(read_log_ratios(rows.token_log_ratios)[3])) == {65504.0}
    assert not_none(rows.log_ratio[3]) > 1e6


def test_rows_whose_log_ratios_do_not_fit_a_report_are_left_out(monkeypatch):
    learner, batch = make_learner(), sampled_at(1.0, random_batch(5), make_learner(model={"seed": 7}).policy)
    sizes = [2 * len(row.response_ids) for row in batch.rows]
    monkeypatch.setattr("tba.trainer.step.step_metrics.MAX_LOG_RATIO_BYTES", sum(sizes[:3]))
    rows = learner.step(batch).rows
    assert [blob and len(blob) for blob in not_none(rows.token_log_ratios)] == [*sizes[:3], *[None] * 9]
    assert None not in rows.log_ratio


def test_a_skipped_step_has_the_finite_numbers_and_all_rows_are_skipped():
    batch = random_batch(1)
    rows = make_learner().step(make_batch(batch.rows, [[math.inf, 0, 0, 0], [0] * 4, [0] * 4])).rows
    assert rows.skipped == [True] * 12
    assert None not in rows.logprob
    assert rows.advantage[0] is None
    assert None not in rows.advantage[4:]
    assert None not in not_none(rows.token_log_ratios)


def test_a_step_without_a_forward_pass_has_no_numbers():
    learner = make_learner()
    with torch.no_grad():
        learner.reference.scorer.model.get_input_embeddings().weight.fill_(math.nan)
    rows = asdict(learner.step(random_batch(1)).rows)
    assert rows.pop("skipped") == [True] * 12
    assert rows.pop("token_log_ratios") is None
    assert all(column == [None] * 12 for column in rows.values())


TEMPERED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("tb", {"taper": "response"}),
    ("tb", {"taper": "mean", "imitation": 0.5}),
    ("rloo", {"kl": "ema"}),
    ("dr_grpo", {"kl": "reference", "imitation": 1.0}),
    ("reinforce", {"taper": "response", "kl": "ema"}),
    ("tba_prime", {"mean_kl": "policy"}),
    ("tb_stale", {"kl": "ema"}),
]
AT_SAMPLING = ["oapl", "reinforce", "rloo", "proximal_rloo", "ppo_clip", "ppo", "grpo", "dr_grpo", "cispo"]


def at_temperature(seed: int) -> Responses:
    """Return stale responses of a temperature: log-probabilities at 1 and at the temperature, unlike each other."""
    responses = case(seed, drift=0.6)
    generator = torch.Generator().manual_seed(seed)
    tempered_R = responses.logprob_R.detach() + torch.randn(
        responses.logprob_R.shape, generator=generator, dtype=torch.float64
    )
    sampled_R = tempered_R + 0.6 * torch.randn(tempered_R.shape, generator=generator, dtype=torch.float64)
    return replace(responses, tempered_R=tempered_R.requires_grad_(), sampled_logprob_R=sampled_R)


def gradients(responses: Responses, name: str, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients with respect to log-probabilities at temperature 1, and at that of sampling."""
    leaves = responses.logprob_R, not_none(responses.tempered_R)
    loss = objective(name, **keys).loss(responses, BETA)
    at_1, tempered = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return at_1, tempered


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "keys"), [*((name, {}) for name in AT_SAMPLING), ("rloo", {"kl": "ema"})])
def test_objectives_of_the_sampling_policy_use_nothing_at_temperature_1(name, keys, seed):
    responses = at_temperature(seed)
    at_1, tempered = gradients(responses, name, **keys)
    assert not at_1.any()
    same = replace(responses, logprob_R=not_none(responses.tempered_R).detach().clone().requires_grad_())
    assert torch.equal(gradients(same, name, **keys)[1], tempered)
    assert tempered.abs().max() > 1e-4


@pytest.mark.parametrize("name", ["tb", "tb_learned_z", "tb_prefix", "online_dpo"])
def test_balance_and_preferences_use_nothing_at_the_temperature_of_sampling(name):
    responses = at_temperature(0)
    at_1, tempered = gradients(responses, name)
    assert not tempered.any()
    moved = replace(responses, tempered_R=(not_none(responses.tempered_R).detach() - 1).requires_grad_())
    assert torch.equal(gradients(moved, name)[0], at_1)
    assert at_1.abs().max() > 1e-4


def equation_7(responses: Responses, *, sampler_mean: bool) -> torch.Tensor:
    """Compute the advantages of Eq. 7, with loops; the mean KL may be that of the sampler at its temperature."""
    kl = (responses.policy_bK - responses.reference_bK).detach()
    advantage = group_advantages(responses.reward_bK - BETA * kl, "mean")
    if sampler_mean:
        log_ratio_N = torch.stack([part.sum() for part in torch.split(counted_log_ratio(responses), responses.lengths)])
        advantage = advantage - BETA * log_ratio_N.view_as(advantage).mean(1, keepdim=True)
    return advantage


def counted_log_ratio(responses: Responses) -> torch.Tensor:
    log_ratio_R = not_none(responses.tempered_R) - responses.sampled_logprob_R
    return torch.where(responses.mask_R, log_ratio_R, 0.0).detach()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("imitation", [0.0, 1.0])
def test_eq_7_on_tokens_is_at_temperature_1_its_ratios_and_what_is_imitated_at_that_of_sampling(imitation, seed):
    responses = at_temperature(seed)
    weight_R = counted_log_ratio(responses).exp().clamp(max=8.0) * responses.mask_R / responses.totals.rows
    advantage_R, raised_R = (
        torch.cat([value.repeat(length) for value, length in zip(of_rows.flatten(), responses.lengths, strict=True)])
        for of_rows in (equation_7(responses, sampler_mean=True), raised(responses.reward_bK, 1.0, None))
    )
    at_1, tempered = gradients(responses, "tb_stale" if imitation else "tba_prime")
    assert torch.allclose(at_1, -weight_R * advantage_R, atol=1e-14, rtol=0)
    assert torch.allclose(tempered, -imitation * weight_R * raised_R, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["response", "mean"])
def test_the_taper_of_tb_is_by_the_ratio_at_the_temperature_of_sampling(kind):
    responses = at_temperature(1)
    ratio_R, mask_R = counted_log_ratio(responses), responses.mask_R
    advantage = equation_7(responses, sampler_mean=False)
    weights = []
    parts = zip(torch.split(ratio_R, responses.lengths), torch.split(mask_R, responses.lengths), strict=True)
    for (part, counts), value in zip(parts, advantage.flatten().tolist(), strict=True):
        log_ratio = part.sum() / (max(int(counts.sum()), 1) if kind == "mean" else 1)
        weights.append(float(log_ratio.clamp(max=0).exp()) if value < 0 else 1.0)
    at_1, tempered = gradients(responses, "tb", taper=kind)
    assert not tempered.any()
    rows = zip(weights, advantage.flatten().tolist(), responses.lengths, strict=True)
    expected = torch.cat([torch.full((length,), -weight * value) for weight, value, length in rows])
    assert torch.allclose(at_1, expected.double() * mask_R / responses.totals.rows, atol=1e-7, rtol=0)
    assert 0 < min(weights) < 0.9


@pytest.mark.parametrize(("name", "keys"), TEMPERED)
def test_log_probabilities_of_an_unknown_sampler_have_no_effect(name, keys):
    known_bK = torch.tensor([True, False, True, True] * 3).view(3, 4)
    one = replace(at_temperature(2), known_bK=known_bK)
    unknown_R = ~one.per_token(known_bK)
    other = replace(one, sampled_logprob_R=torch.where(unknown_R, -3.0, one.sampled_logprob_R))
    for found, expected in zip(gradients(one, name, **keys), gradients(other, name, **keys), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "keys"), [("tb_stale", {}), ("tb", {"imitation": 1.0}), ("rloo", {"imitation": 1.0})])
def test_a_wrong_demonstration_among_right_answers_is_not_imitated(name, keys):
    responses = at_temperature(0)
    known_bK = torch.ones(3, 4, dtype=torch.bool)
    known_bK[:, 0] = False
    group = replace(
        responses, known_bK=known_bK, reward_bK=known_bK.double(), reference_bK=responses.policy_bK.detach()
    )
    advantage_bK = objective(name, **keys).terms(group, 1e-9).advantage_bK
    assert (advantage_bK[:, 0] < -0.7).all()
    assert (advantage_bK[:, 1:] > 0).all()
