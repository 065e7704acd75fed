"""The reward model's process: `python -m tba.searcher.scoring.model_worker FD`, started by `model_scorer.py`.

Its messages are those of `worker_pool.py`: `begin` before each forward pass, and one `results` after each batch. An
error of the model other than a lack of memory ends the process: a CUDA context does not survive one.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from tba.common.config import ScoringModelSection
from tba.common.errors import ConfigError
from tba.common.log import get_logger
from tba.searcher.scoring.classifier import RewardModel
from tba.searcher.scoring.scoring import storable
from tba.searcher.scoring.worker_process import Connection
from tba.searcher.tasks.task import Prompt

log = get_logger(__name__)


def main() -> None:
    """Serve until the searcher closes the socket."""
    connection = Connection()
    transformers_logging.disable_progress_bar()
    settings = next(connection.messages)
    try:
        config = ScoringModelSection.model_validate(settings["config"])
        model = RewardModel(Path(settings["directory"]), config, settings["device"], settings["section"])
    except ConfigError as error:
        connection.send(["refused", storable(str(error))])
        sys.exit(1)
    except Exception as error:
        log.exception("the model was not loaded")
        connection.send(["failed", storable(f"{type(error).__name__}: {error}")])
        sys.exit(1)
    connection.send(["ready"])
    for items in connection.messages:
        _score(connection, model, items)


def _score(connection: Connection, model: RewardModel, items: Sequence[Any]) -> None:
    # A process that ends while it tokenizes may have ended because of any of these.
    _begin(connection, [item[0] for item in items], 0, len(items))
    tickets, pairs, refused = [], [], []
    for ticket, fields, response, _ in items:
        prompt = Prompt(*fields)
        try:
            pairs.append(model.encode(prompt.text, response, prompt.messages))
            tickets.append(ticket)
        except ValueError as error:
            refused.append([ticket, None, storable(f"not scored: {error}")])
    if refused:
        connection.send(["results", refused])
    for batch in model.batches(pairs):
        batch_tickets = [tickets[n] for n in batch]
        try:
            scores = model.score([pairs[n] for n in batch], partial(_begin, connection, batch_tickets))
        except Exception as error:
            log.exception("the model failed", pairs=len(batch))
            reason = storable(f"{type(error).__name__}: {error}")
            connection.send(["results", [[ticket, None, reason] for ticket in batch_tickets]])
            sys.exit(1)
        results = [
            [ticket, None, score] if isinstance(score, str) else [ticket, score, None]
            for ticket, score in zip(batch_tickets, scores, strict=True)
        ]
        connection.send(["results", results])


def _begin(connection: Connection, tickets: Sequence[int], start: int, stop: int) -> None:
    connection.send(["begin", tickets[start:stop]])


if __name__ == "__main__":
    main()
