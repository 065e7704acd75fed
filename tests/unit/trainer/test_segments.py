"""Rows in which a new context begins: each sequence is computed alone, and the loss is that of one response."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tba.common.wire.trajectory import sequences
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.puts import make_episode
from tba.tests.helpers.trainer import make_batch, make_learner, make_row, random_batch, tiny_model
from tba.trainer.batch.batch import Row, TrainBatch, counted, decode
from tba.trainer.model.scorer import Scorer, sequence_logprobs
from tba.trainer.step.learner import Measured

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
    measured = Measured(True, frozenset({1}))
    name, keys = ("tb", {"log_z": "turn"}) if name == "turn" else (name, {})
    learner = make_learner(name=name, keys=keys, measured=measured, model=MODEL, double=True, micro_batch_tokens=tokens)
    reference_BK, _, of_tokens = learner._complete_reference(batch)
    learner.accumulate(batch, reference_BK, 0.3, of_tokens)
    gradient = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])
    learner.optimizer.zero_grad()
    return learner.step(batch), gradient


@pytest.mark.parametrize("tokens", [10_000, 20])
@pytest.mark.parametrize(
    "name", ["tb", "turn", "tb_stale", "tb_learned_z", "oapl", "grpo", "dr_grpo", "ppo_clip", "cispo"]
)
def test_the_loss_does_not_depend_on_how_many_sequences_an_episode_became(name, tokens):
    whole, cut = batch_of(cut=False), batch_of(cut=True)
    name, *turn = name.split()
    keys = {"log_z": "turn"} if turn else {}
    (expected, of_whole), (found, of_cut) = (step_of(batch, name, tokens, **keys) for batch in (whole, cut))
    assert of_whole.abs().max() > 1e-6
    # For a log Z of each turn the reference's log-probabilities of tokens are kept in float32.
    assert torch.allclose(of_cut, of_whole, atol=1e-5 if turn else 1e-12, rtol=0)
    same = [n for n in expected.metrics if n not in ("tokens", "grad_cosine")]
    assert {n: found.metrics[n] for n in same} == pytest.approx(
        {n: expected.metrics[n] for n in same}, abs=1e-5 if turn else 1e-8
    )
    for field in ("logprob", "log_ratio", "advantage", "weight", "mismatch"):
        assert getattr(found.rows, field) == pytest.approx(getattr(expected.rows, field), abs=1e-5 if turn else 1e-8)
    mean = sum(int(row.loss_mask.sum()) for row in whole.rows) / len(whole.rows)
    assert found.metrics["response_tokens_mean"] == mean


def test_passes_of_a_plan_hold_sequences_within_the_limit():
    rows = [row_of(EPISODE, n) for n in range(4)]
    learner = make_learner(model=MODEL, micro_batch_tokens=30)
    for micro_batch in learner.plan(rows, 2):
        for chunk in micro_batch.chunks:
            lengths = [one.tokens for n in micro_batch.rows[chunk.rows] for one in rows[n].sequences]
            assert sorted(index for part in chunk.passes for index in part) == list(range(len(lengths)))
            assert sum(lengths) <= 30
    with torch.no_grad():
        found = sequence_logprobs(learner.scorer.score(rows).logprob_R, rows)
    assert len(set(found.tolist())) == 1


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


def test_a_row_without_segments_is_its_only_sequence():
    (row,) = random_batch(1, prompts=1, samples=1).rows
    assert row.sequences[0] is row
    assert replace(row_of(EPISODE), segments=np.zeros(0, np.int32)).tokens == row_of(EPISODE).tokens
