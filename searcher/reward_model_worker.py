"""The reward model's process: `python -m tba.searcher.reward_model_worker FD`, started by `model_rewards.py`.

In: the settings, then lists of [ticket, prompt, response]. Out: `["ready"]`, or the sentence of why not: `["refused",
sentence]` if the files are no reward model, `["failed", sentence]` if it may load another time. Then for each
forward pass `["begin", tickets]` and, of the same and other tickets, `["scores", [[ticket, score, error], ...]]`. So of
a worker that dies it is known which pairs it died of.

An error of the model other than a lack of memory ends the process: a CUDA context does not survive one.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from tba.common.config import RewardModelSection
from tba.common.errors import ConfigError
from tba.common.log import get_logger
from tba.searcher.reward_model import RewardModel
from tba.searcher.tasks.scoring import storable
from tba.searcher.worker_process import Connection

log = get_logger(__name__)


def main() -> None:
    """Serve until the searcher closes the socket."""
    connection = Connection()
    transformers_logging.disable_progress_bar()
    settings = next(iter(connection))
    try:
        config = RewardModelSection.model_validate(settings["config"])
        model = RewardModel(Path(settings["directory"]), config, settings["device"])
    except ConfigError as trouble:
        connection.send(["refused", storable(str(trouble))])
        sys.exit(1)
    except Exception as error:
        log.exception("the reward model was not loaded")
        connection.send(["failed", storable(f"{type(error).__name__}: {error}")])
        sys.exit(1)
    connection.send(["ready"])
    for items in connection:
        _serve(connection, model, items)


def _serve(connection: Connection, model: RewardModel, items: Sequence[Any]) -> None:
    tickets, pairs, refused = [], [], []
    for ticket, prompt, response in items:
        try:
            pairs.append(model.encode(prompt, response))
            tickets.append(ticket)
        except ValueError as error:
            refused.append([ticket, None, storable(f"not scored: {error}")])
    if refused:
        connection.send(["scores", refused])
    for batch in model.cut(pairs):
        batch_tickets = [tickets[n] for n in batch]
        try:
            scores = model.score([pairs[n] for n in batch], partial(_begin, connection, batch_tickets))
        except Exception as error:
            log.exception("the reward model failed", pairs=len(batch))
            reason = storable(f"{type(error).__name__}: {error}")
            connection.send(["scores", [[ticket, None, reason] for ticket in batch_tickets]])
            sys.exit(1)
        connection.send(["scores", [_answer(*pair) for pair in zip(batch_tickets, scores, strict=True)]])


def _begin(connection: Connection, tickets: Sequence[int], start: int, stop: int) -> None:
    connection.send(["begin", tickets[start:stop]])


def _answer(ticket: int, score: float | str) -> list[Any]:
    return [ticket, None, score] if isinstance(score, str) else [ticket, score, None]


if __name__ == "__main__":
    main()
