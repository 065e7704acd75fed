"""Answers of a batch as text, for the trackers that show tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tba.common.wire.trajectory import Int32
from tba.trainer.batch.batch import TrainBatch

COLUMNS = ["trajectory", "prompt", "response", "reward", "staleness"]
# An endless answer must not fill a tracker.
_MAX_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class Answer:
    """A trajectory that was trained on. `staleness` is in optimiser steps."""

    trajectory: int
    prompt_ids: Int32
    response_ids: Int32
    reward: float
    staleness: int


def choose_answers(batch: TrainBatch, count: int) -> list[Answer]:
    """Return `count` answers spread evenly over the batch, or all of a smaller batch.

    Their arrays are copies: those of the batch are views of whole messages.
    """
    rewards, staleness = batch.reward_BK.flatten().tolist(), batch.staleness_BK.flatten().tolist()
    count = min(count, len(batch.rows))
    answers = []
    for slot in (number * len(batch.rows) // count for number in range(count)):
        row = batch.rows[slot]
        ids = row.prompt_ids.copy(), row.response_ids.copy()
        answers.append(Answer(row.id, *ids, reward=rewards[slot], staleness=int(staleness[slot])))
    return answers


class AnswerTexts:
    """Decodes answers to the rows of a table. `tokenizer` is that of the model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def rows(self, answers: Sequence[Answer]) -> list[list[Any]]:
        """Return one row of `COLUMNS` for each answer. Long texts are cut."""
        return [
            [one.trajectory, self._text(one.prompt_ids), self._text(one.response_ids), one.reward, one.staleness]
            for one in answers
        ]

    def _text(self, ids: Int32) -> str:
        text: str = self._tokenizer.decode(ids.tolist())
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
