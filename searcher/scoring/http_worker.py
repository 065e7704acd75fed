"""The process that asks the server of a reward model: `python -m tba.searcher.scoring.http_worker FD`.

`model_scorer.py` starts it. Its messages are those of `worker_pool.py`. A failure of the server is an error of the
responses that waited for it, never the end of the process.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from tba.common.config import ScoringModelSection
from tba.common.errors import HttpRefused, HttpUnavailable
from tba.searcher.scoring.http_model import HttpModel
from tba.searcher.scoring.scoring import storable
from tba.searcher.scoring.worker_process import Connection
from tba.searcher.tasks.task import Prompt


def main() -> None:
    """Serve until the searcher closes the socket."""
    connection = Connection()
    settings = next(connection.messages)
    config = ScoringModelSection.model_validate(settings["config"])
    # One event loop for all batches: connections belong to a loop.
    with asyncio.Runner() as runner:
        model = HttpModel(config, settings["key"], settings["section"])
        try:
            runner.run(model.try_out(seconds=settings["load_seconds"]))
        except (HttpRefused, HttpUnavailable) as error:
            connection.send(["refused" if isinstance(error, HttpRefused) else "failed", storable(str(error))])
            sys.exit(1)
        connection.send(["ready"])
        for items in connection.messages:
            runner.run(_score(connection, model, config, items))


async def _score(connection: Connection, model: HttpModel, config: ScoringModelSection, items: Sequence[Any]) -> None:
    free = asyncio.Semaphore(config.concurrency)

    async def score_one(ticket: int, fields: Sequence[Any], response: str) -> None:
        async with free:
            outcome: list[float | str | None]
            try:
                outcome = [await model.score(Prompt(*fields), response, seconds=config.time_limit_seconds), None]
            except (HttpRefused, HttpUnavailable, ValueError) as error:
                outcome = [None, storable(f"not scored: {error}")]
        connection.send(["results", [[ticket, *outcome]]])

    await asyncio.gather(*(score_one(*item[:3]) for item in items))


if __name__ == "__main__":
    main()
