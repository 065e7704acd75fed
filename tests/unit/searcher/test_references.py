"""Reference log-probabilities in the searcher: they equal the trainer's, and no group is lost without them."""

import numpy as np
import pytest
import torch

from tba.common.wire.trajectory import STOP_ERROR
from tba.searcher.evaluation import models as reference_model
from tba.searcher.evaluation.models import ReferenceModel
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.puts import make_episode
from tba.trainer.batch.batch import Row
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs, to_bfloat16
from tba.trainer.publishing.canary import make_canary, skeleton


@pytest.fixture
def rows(trajectory):
    """Prompts and responses of many lengths, one response with a mask."""
    random = np.random.default_rng(0)
    lengths = enumerate((1, 40, 3, 7, 7, 60, 2, 15))
    rows = [
        trajectory(tokens=random.integers(0, 16, length), prompt_ids=random.integers(0, 16, 1 + n % 4).astype(np.int32))
        for n, length in lengths
    ]
    return [*rows, trajectory(tokens=[3, 4, 5], loss_mask=np.array([1, 0, 1], np.uint8))]


def mask_of(row):
    return row.loss_mask if len(row.loss_mask) else np.ones(len(row.response_ids), np.uint8)


def by_trainer(model, rows, *, autocast=False):
    scorer = Scorer(model, autocast=autocast)
    batch = [
        Row(n, row.prompt_ids, row.response_ids, row.logprobs, loss_mask=mask_of(row), on_policy=False)
        for n, row in enumerate(rows)
    ]
    with torch.no_grad():
        return sequence_logprobs(scorer.score(batch).logprob_R, batch).tolist()


def summed(rows, logprobs):
    """Sum what is known of each token of prompt and response over the response tokens that count."""
    return [
        float(np.asarray(one)[len(row.prompt_ids) - 1 :] @ mask_of(row))
        for row, one in zip(rows, logprobs, strict=True)
    ]


@pytest.mark.slow
def test_matrices_in_bfloat16_change_nothing_under_autocast_for_weights_that_bfloat16_represents(example_model, rows):
    exact, trainers, searchers = (load_model(example_model, torch.device("cpu")) for _ in range(3))
    for model in (exact, trainers, searchers):
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.bfloat16().float()
    to_bfloat16(trainers)
    reference_model.to_bfloat16(searchers)
    dtypes = {name: tensor.dtype for name, tensor in searchers.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in trainers.state_dict().items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    expected = by_trainer(exact, rows, autocast=True)
    assert by_trainer(trainers, rows, autocast=True) == by_trainer(searchers, rows, autocast=True) == expected


def test_all_implementations_of_teacher_forcing_agree(example_model, rows, monkeypatch):
    model = load_model(example_model, torch.device("cpu"))
    expected = by_trainer(model, rows)
    assert len(set(expected)) == len(expected)
    sequences = [[*row.prompt_ids.tolist(), *row.response_ids.tolist()] for row in rows]
    canary = make_canary(skeleton(model), model.state_dict(), sequences)
    assert summed(rows, canary.logprobs) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert summed(rows, cpu_engine(example_model).score(sequences)) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    for tokens in (reference_model._BATCH_TOKENS, 100, 1):
        monkeypatch.setattr(reference_model, "_BATCH_TOKENS", tokens)
        assert reference.logprobs(rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_an_episode_is_the_sum_over_its_sequences_in_searcher_and_trainer(example_model, rows):
    model = load_model(example_model, torch.device("cpu"))
    episode = make_episode()
    batch = [Row(0, episode.prompt_ids, episode.response_ids, episode.logprobs, episode.loss_mask, False,
                 segments=episode.segments)]  # fmt: skip
    with torch.no_grad():
        (expected,) = sequence_logprobs(Scorer(model).score(batch).logprob_R, batch).tolist()
    found = ReferenceModel(str(example_model), device="cpu", dtype="float32").logprobs([rows[1], episode, rows[0]])
    assert found == pytest.approx(
        [by_trainer(model, rows)[1], expected, by_trainer(model, rows)[0]], rel=1e-5, abs=1e-5
    )


def test_a_row_that_cannot_be_scored_gets_none_and_the_others_are_scored(example_model, rows, trajectory):
    failed = trajectory(tokens=[], stop_reason=STOP_ERROR, error="not generated")
    foreign = trajectory(tokens=[5, 99_999])
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    found = reference.logprobs([failed, rows[0], foreign])
    assert (found[0], found[2]) == (None, None)
    assert found[1] == pytest.approx(reference.logprobs(rows[:1])[0])
