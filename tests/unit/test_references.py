"""Reference log-probabilities in the searcher: the trainer's numbers, and nothing lost without them."""

import threading

import numpy as np
import pytest
import torch

from tba.common.trajectory import STOP_ERROR
from tba.common.wire import Visit
from tba.searcher import reference_model
from tba.searcher.groups import Group
from tba.searcher.reference_model import ReferenceModel
from tba.searcher.references import References
from tba.searcher.tasks.task import Prompt
from tba.trainer.batch import Row
from tba.trainer.model import Scorer, load_model, sequence_logprobs


@pytest.fixture
def rows(trajectory):
    """Prompts and responses of many lengths, one response with a mask."""
    random = np.random.default_rng(0)
    made = [
        trajectory(tokens=random.integers(0, 16, length), prompt_ids=random.integers(0, 16, 1 + n % 4).astype(np.int32))
        for n, length in enumerate((1, 40, 3, 7, 7, 60, 2, 15))
    ]
    masked = trajectory(tokens=[3, 4, 5], loss_mask=np.array([1, 0, 1], np.uint8))
    return [*made, masked]


def trainers(model, rows):
    scorer = Scorer(load_model(model, torch.device("cpu")), autocast=False)
    as_sampled = [
        Row(
            n, row.prompt_ids, row.response_ids, row.logprobs,
            loss_mask=row.loss_mask if len(row.loss_mask) else np.ones(len(row.response_ids), np.uint8),
            on_policy=False,
        )
        for n, row in enumerate(rows)
    ]  # fmt: skip
    with torch.no_grad():
        return sequence_logprobs(scorer.score(as_sampled).logprob_R, as_sampled).tolist()


def test_the_searcher_computes_what_the_trainer_would_in_batches_of_any_size(example_model, rows, monkeypatch):
    expected = trainers(example_model, rows)
    assert len(set(expected)) == len(expected)
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    for tokens in (reference_model._BATCH_TOKENS, 100, 1):
        monkeypatch.setattr(reference_model, "_BATCH_TOKENS", tokens)
        assert reference.logprobs(rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_row_that_cannot_be_scored_is_left_to_the_trainer_and_the_others_are_not(example_model, rows, trajectory):
    failed = trajectory(tokens=[], stop_reason=STOP_ERROR, error="not generated")
    foreign = trajectory(tokens=[5, 99_999])
    reference = ReferenceModel(str(example_model), device="cpu", dtype="float32")
    found = reference.logprobs([failed, rows[0], foreign])
    assert (found[0], found[2]) == (None, None)
    assert found[1] == pytest.approx(reference.logprobs(rows[:1])[0])


def group_of(*rows):
    prompt = Prompt("p0", "", "")
    return Group(Visit(lease=1, epoch=0, prompt_key="p0"), prompt, np.zeros(0, np.int32), len(rows), list(rows))


def test_a_reference_that_fails_lets_the_rows_pass_and_is_counted(trajectory):
    entered = threading.Event()

    def broken(rows):
        entered.set()
        raise RuntimeError("out of memory")

    references = References(broken)
    references.submit(group_of(trajectory()))
    assert entered.wait(30)
    (group,) = references.close()
    assert [row.reference_logprob for row in group.done] == [None]
    assert (references.waiting, references.errors) == (0, 1)


def test_groups_that_wait_when_the_searcher_leaves_pass_without_a_reference(trajectory):
    entered, go_on = threading.Event(), threading.Event()

    def slow(rows):
        entered.set()
        assert go_on.wait(30)
        return [-1.0] * len(rows)

    references = References(slow)
    references.submit(group_of(trajectory()))
    assert entered.wait(30)
    references.submit(group_of(trajectory(), trajectory()))
    assert (references.done(), references.waiting) == ([], 3)
    references._closing.set()  # as `close` does first, before it waits for the batch under way
    go_on.set()
    first, second = references.close()
    assert [row.reference_logprob for row in first.done] == [-1.0]
    assert [row.reference_logprob for row in second.done] == [None, None]
    assert references.waiting == 0


def test_without_a_reference_model_groups_pass_as_they_are(trajectory):
    references = References(None)
    group = group_of(trajectory())
    references.submit(group)
    assert references.waiting == 1
    assert references.done() == [group]
    assert references.close() == []
