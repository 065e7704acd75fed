"""Top-p, top-k and min-p: what was left to sample from goes with the row, and ratios to the sampler are exact."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tba.common.errors import ConfigError
from tba.common.wire.trajectory import Trajectory, encode_kept
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings
from tba.searcher.engines.transformers_engine import sample
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.puts import make_episode, make_trajectory
from tba.tests.helpers.trainer import VOCABULARY, make_learner, make_row, objective, save_tiny_model, tiny_model
from tba.tests.runner import size
from tba.tests.unit.trainer.test_objectives import by_hand
from tba.trainer.batch.batch import TrainBatch, counted, decode, pack_batch, unpack_batch
from tba.trainer.model.chunked_logprobs import Kept, token_logprobs
from tba.trainer.model.scorer import Scorer

CUTS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 3},
    {"min_p": 0.3},
    {"temperature": 1.4, "top_p": 0.8, "top_k": 5, "min_p": 0.1},
]


def sampled(directory: Any, cuts: list[dict[str, Any]]) -> list[Trajectory]:
    """Return responses of the Transformers engine, sampled with each of these settings in turn."""
    engine = cpu_engine(directory, max_in_flight=8)
    settings = [SamplingSettings(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "seed": n} | cuts[n % len(cuts)])
                for n in range(8)]  # fmt: skip
    for n, one in enumerate(settings):
        engine.submit(GenerationRequest(n, np.array([1, 2 + n // 4], np.int32), one))
    found: dict[int, Any] = {}
    while engine.in_flight:
        found |= {generation.id: generation for generation in engine.step()}
    return [
        make_trajectory(
            f"p{n // 4}",
            lease=0,
            tokens=found[n].response_ids,
            prompt_ids=np.array([1, 2 + n // 4], np.int32),
            logprobs=found[n].logprobs,
            sampling=settings[n].recorded(),
            reward=n / 8,
            kept=found[n].kept,
        )
        for n in range(8)
    ]


def batch_of(harness: Any, trajectories: list[Trajectory]) -> TrainBatch:
    """Return the batch of these trajectories after the wire and the database."""
    buffer = harness(fill=(2, 0))
    buffer.put(trajectories, 0)
    reply = buffer.sample(0, prompts=2, samples=4)
    return decode(reply.message, [memoryview(frame) for frame in reply.frames], prompts=2, samples=4)


@pytest.mark.slow
@pytest.mark.parametrize("train", [{}, {"packing": "packed"}, {"micro_batch_tokens": 20}], ids=str)
@pytest.mark.parametrize("cuts", [[one] for one in CUTS] + [[{}, *CUTS, {"temperature": 0.7}]])
def test_ratios_of_fresh_data_are_1(harness, tmp_path, cuts, train):
    trajectories = sampled(save_tiny_model(tmp_path), cuts)
    batch = batch_of(harness, trajectories)
    result = make_learner(name="tb_stale", **train).step(batch)
    ratios = [not_none(ratio) for ratio in not_none(result.rows).log_ratio]
    assert max(map(abs, ratios)) < 1e-5
    assert result.metrics["mismatch_max"] < 1e-5
    # Over kept tokens they would be equal, however much probability leaves these.
    assert not {"sampled_mass", "policy_mass"} & result.metrics.keys()


def test_without_kept_tokens_ratios_of_cut_responses_are_not_known(harness, tmp_path):
    trajectories = sampled(save_tiny_model(tmp_path), [{"top_p": 0.6}, {}])
    trajectories = [dataclasses.replace(one, kept=one.kept[:0]) for one in trajectories]
    result = make_learner(name="tb_stale").step(batch_of(harness, trajectories))
    cut = {n for n, row in enumerate(trajectories) if row.sampling["top_p"] < 1}
    known = [ratio is not None for ratio in not_none(result.rows).log_ratio]
    assert sum(known) == len(trajectories) - len(cut)


def test_a_batch_whose_kept_tokens_fit_no_message_is_handed_out_without_them(harness, tmp_path, monkeypatch):
    trajectories = sampled(save_tiny_model(tmp_path), [{"top_k": 7}])
    sizes = [4 * len(one.kept) for one in trajectories], [4 * len(one.response_ids) for one in trajectories]
    monkeypatch.setattr("tba.buffer.service.training.MAX_FRAME_BYTES", sum(sizes[0]) - 1)
    assert sum(sizes[1]) < sum(sizes[0])
    batch = batch_of(harness, trajectories)
    assert [len(row.kept) for row in batch.rows] == [0] * 8
    ratios = not_none(make_learner(name="tb_stale").step(batch).rows).log_ratio
    assert ratios == [None] * 8


def test_kept_tokens_survive_the_way_to_another_rank_and_ids_are_checked(harness, tmp_path):
    batch = batch_of(harness, sampled(save_tiny_model(tmp_path), CUTS))
    again = unpack_batch(pack_batch(batch))
    assert [row.kept.tolist() for row in again.rows] == [row.kept.tolist() for row in batch.rows]
    assert max(row.kept.max() for row in batch.rows) <= VOCABULARY
    foreign = dataclasses.replace(batch.rows[0], kept=np.where(batch.rows[0].kept, VOCABULARY + 1, 0))
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        make_learner().step(dataclasses.replace(batch, rows=[foreign, *batch.rows[1:]]))


@pytest.mark.parametrize("packed", [False, True])
def test_the_sequences_of_an_episode_have_the_kept_tokens_of_their_own_positions(packed):
    episode = make_episode()
    masked = zip(episode.response_ids, episode.loss_mask, strict=True)
    left = [np.unique([token, 0, token // 2]) if sampled else np.array([token]) for token, sampled in masked]
    kept = encode_kept(episode.response_ids.tolist(), [ids.astype(np.int32) for ids in left])
    fields = {"loss_mask": episode.loss_mask, "segments": episode.segments, "kept": kept}
    row = make_row(0, episode.prompt_ids, episode.response_ids, **fields)
    scorer = Scorer(tiny_model(vocabulary=10), packed=packed)
    found_R = scorer.score([row], tempered=True).tempered_R[counted([row])]
    expected = []
    for (_, first, end), one in zip(row.spans, row.sequences, strict=True):
        tokens = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids]).astype(np.int64))
        logits = scorer.model(input_ids=tokens[None]).logits[0, len(one.prompt_ids) - 1 : -1]
        for n in range(first, end):
            own = logits[n - first, left[n]].log_softmax(0)
            expected += [own[left[n].tolist().index(row.response_ids[n])]] if row.loss_mask[n] else []
    assert torch.allclose(found_R, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("positions", [1, 4, 100])
def test_log_probabilities_over_kept_tokens_and_their_gradients_are_those_of_log_softmax(monkeypatch, positions):
    monkeypatch.setattr("tba.trainer.model.chunked_logprobs._CPU_LOGITS", 11 * positions)
    torch.manual_seed(1)
    head = nn.Linear(6, 11).double()
    hidden, target = torch.randn(13, 6, dtype=torch.float64, requires_grad=True), torch.randint(11, (13,))
    temperature, whole = torch.linspace(0.5, 1.5, 13, dtype=torch.float64), torch.arange(13) % 3 == 0
    left = (torch.rand(13, 11) < 0.4) & ~whole[:, None]
    left[5] = False
    left.scatter_(1, target[:, None], value=False)
    kept = Kept(left.nonzero()[:, 1], left.sum(1), whole)
    plain, found, _ = token_logprobs(head, hidden, target, temperature_R=temperature, kept=kept)
    outside = ~left.scatter(1, target[:, None], value=True) & ~whole[:, None]
    logits = (head(hidden) / temperature[:, None]).masked_fill(outside, -torch.inf)
    expected = logits.log_softmax(1).gather(1, target[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-14)
    assert found[5] == 0
    upstream, inputs = torch.randn(13, dtype=torch.float64), [hidden, *head.parameters()]
    full = head(hidden).log_softmax(1).gather(1, target[:, None])[:, 0]
    ours = torch.autograd.grad((found * upstream + plain).sum(), inputs)
    theirs = torch.autograd.grad((expected * upstream + full).sum(), inputs)
    assert all(torch.allclose(one, other, atol=1e-13) for one, other in zip(ours, theirs, strict=True))


# A policy that is a table of logits with a row for each prefix, so that all responses can be enumerated.
TOKENS, LENGTH, SAMPLES, BETA, STEPS = 5, 2, 48, 0.3, 150
RESPONSES = list(itertools.product(range(TOKENS), repeat=LENGTH))
PREFIXES = [(), *((token,) for token in range(TOKENS))]
PLACES = torch.tensor([[PREFIXES.index(one[:length]) for length in range(LENGTH)] for one in RESPONSES])


def probabilities(table: Tensor) -> np.ndarray:
    """Return the probability of each response: [Y]."""
    return table.log_softmax(1)[PLACES, torch.tensor(RESPONSES)].sum(1).exp().detach().numpy()


def draw(table: Tensor, top_p: float, rng: np.random.Generator) -> tuple[list[int], np.ndarray, Kept | None]:
    """Sample responses as the engine does. Returns their indices, log-probabilities [K, T] and kept tokens."""
    settings, rows, left, logprobs = [SamplingSettings(1.0, top_p, 1)] * SAMPLES, [0] * SAMPLES, [], []
    chosen = np.zeros(SAMPLES, np.int64)
    for _ in range(LENGTH):
        drawn = sample(table[rows], settings, torch.from_numpy(rng.random(SAMPLES)))
        rows = [PREFIXES.index((token,)) for token in drawn.tokens_B.tolist()]
        chosen = TOKENS * chosen + drawn.tokens_B.numpy()
        left.append([drawn.kept[n][drawn.kept[n] != drawn.tokens_B[n].item()] for n in drawn.kept])
        logprobs.append(drawn.logprobs_B.numpy())
    others = [ids for pair in zip(*left, strict=True) for ids in pair]
    counts = torch.tensor([len(ids) for ids in others])
    kept = (
        Kept(torch.tensor(np.concatenate(others).astype(int)), counts, torch.zeros(len(counts), dtype=torch.bool))
        if others
        else None
    )
    return chosen.tolist(), np.stack(logprobs, axis=1), kept


def score(table: Tensor, chosen: list[int], kept: Kept | None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token over the vocabulary, and over the kept tokens, by the trainer's head."""
    head = nn.Linear(len(PREFIXES), TOKENS, bias=False)
    del head.weight
    head.weight = table.T
    hidden_RH = torch.eye(len(PREFIXES), dtype=torch.float64)[PLACES[chosen].flatten()]
    target_R = torch.tensor([RESPONSES[one] for one in chosen]).flatten()
    return token_logprobs(head, hidden_RH, target_R, temperature_R=torch.ones(len(target_R)), kept=kept)[:2]


def trained(
    name: str, top_ps: list[float], seed: int, *, renormalised: bool = True
) -> tuple[Tensor, np.ndarray, float]:
    """Train on fresh data with these top-p in turn. Returns the table, pi* [Y], and the largest token log-ratio."""
    rng, loss_of, largest = np.random.default_rng(seed), objective(name), 0.0
    start = torch.from_numpy(rng.normal(0, 0.5, (len(PREFIXES), TOKENS)))
    reward_Y = torch.from_numpy(rng.random(len(RESPONSES)))
    table = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([table], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        chosen, sampled_KT, kept = draw(table.detach(), top_ps[step % len(top_ps)], rng)
        logprob_R, tempered_R = score(table, chosen, kept if renormalised else None)
        sampled_R = torch.from_numpy(sampled_KT).flatten()
        largest = max(largest, float((tempered_R.detach() - sampled_R).abs().max()))
        reference_bK = score(start, chosen, None)[0].view(1, SAMPLES, LENGTH).sum(2)
        fields = {"tempered_R": tempered_R, "reference_bK": reference_bK}
        responses = by_hand([LENGTH] * SAMPLES, logprob_R, sampled_R, reward_Y[chosen], **fields)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of.loss(responses, BETA))
        optimizer.step()
        schedule.step()
    optimum = probabilities(start) * np.exp(reward_Y.numpy() / BETA)
    return table.detach(), optimum / optimum.sum(), largest


def variation(table: Tensor, optimum: np.ndarray, top_p: float) -> float:
    """Return the total variation between pi and pi* over what is sampled with this top-p."""
    seen = sorted({one for _ in range(10) for one in draw(table, top_p, np.random.default_rng(0))[0]})
    policy, best = probabilities(table)[seen], optimum[seen]
    return float(np.abs(policy / policy.sum() - best / best.sum()).sum() / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tb", "tb_stale"])
def test_the_posterior_of_top_p_is_the_true_one_over_what_is_sampled(name):
    """And over all responses, if a part of the data is sampled from all of the vocabulary."""
    for seed in range(size(1, 2)):
        table, optimum, largest = trained(name, [0.9], seed)
        assert largest < 1e-5
        assert variation(table, optimum, 0.9) < 0.005
        table, optimum, _ = trained(name, [0.9, 1.0], seed)
        assert variation(table, optimum, 1.0) < 0.005
