"""Scores of a second classifier for answers and for the reference answers of the same prompts."""

import itertools
import multiprocessing.connection
import time
from collections.abc import Callable, Mapping, Sequence

from tba.common.errors import TaskError
from tba.common.log import get_logger
from tba.searcher.scoring.model_scorer import ModelScorer
from tba.searcher.scoring.scoring import Item, storable
from tba.searcher.tasks.task import Prompt

log = get_logger(__name__)

_WAIT_SECONDS = 1.0

# A score, or None where the model gave none.
Score = float | None


def check_references(prompts: Sequence[Prompt]) -> None:
    """Raise TaskError if no prompt has a reference answer."""
    if not any(prompt.answer for prompt in prompts):
        raise TaskError("gold_model compares with the answers of the held-out prompts, and none has one: remove it")


class GoldModel:
    """The classifier of `[gold_model]` and the prompts of an evaluation. It closes `scorer` with itself.

    The reference answer of a prompt is its `answer`.
    """

    def __init__(self, scorer: ModelScorer, prompts: Sequence[Prompt]) -> None:
        self._scorer = scorer
        self._prompts = prompts
        self._tickets = itertools.count()
        self._references: list[Score] = [None] * len(prompts)

    def compare(self, texts: Sequence[str], go_on: Callable[[], bool]) -> tuple[list[Score], list[Score]] | None:
        """Return the scores of the texts, one per prompt, and of the reference answers; None if `go_on` is False.

        A prompt without a reference answer has neither. A reference is scored until it has a score.
        """
        missing = [place for place, score in enumerate(self._references) if score is None]
        found = self._score({place: self._prompts[place].answer for place in missing}, go_on)
        scores = self._score(dict(enumerate(texts)), go_on) if found is not None else None
        if found is None or scores is None:
            return None
        for place, score in found.items():
            self._references[place] = score
        return [scores.get(place) for place in range(len(texts))], list(self._references)

    def close(self) -> None:
        """End the process of the classifier."""
        self._scorer.close()

    def _score(self, texts: Mapping[int, str], go_on: Callable[[], bool]) -> dict[int, Score] | None:
        """Return the scores of texts by the numbers of their prompts, without those of prompts without a reference."""
        found: dict[int, Score] = {}
        places: dict[int, int] = {}
        for place, text in texts.items():
            prompt = self._prompts[place]
            if prompt.answer:
                item = Item(next(self._tickets), prompt, storable(text), True, time.monotonic())
                places[item.ticket] = place
                self._scorer.submit(item)
        reasons = []
        while places:
            multiprocessing.connection.wait(self._scorer.channels, _WAIT_SECONDS)
            for result in self._scorer.poll():
                # Of an evaluation that was given up, results may still arrive.
                if result.item.ticket not in places:
                    continue
                found[places.pop(result.item.ticket)] = result.value
                reasons += [result.error] if result.error is not None else []
            if not go_on():
                return None
        if reasons:
            log.warning("the gold model failed", texts=len(reasons), reason=reasons[0])
        return found
