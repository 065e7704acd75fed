"""Getting the batch of a step from the buffer, and asking for the next one while this one trains.

    step s      take(s) ──► ask_ahead(s + 1) ──► update ──► report(s)
    step s + 1  take(s + 1): the reply is here, or is waited for

The request for s + 1 goes out before the report of s, always: which data a batch is drawn from does not depend on
how fast either side is, as long as there is enough of it. What is drawn ahead is recorded like any batch, so a trainer
that is killed in between trains on it after its resume.
"""

from collections.abc import Callable

from tba.common import wire
from tba.common.config import Config
from tba.trainer.batch import TrainBatch, decode
from tba.trainer.connection import Connection
from tba.trainer.stopwatch import Stopwatch

_WAIT_SECONDS = 1.0


class Batches:
    """`reference_at` names the reference policy of a step, `last` is the step after the last one."""

    def __init__(
        self,
        connection: Connection,
        config: Config,
        *,
        reference_at: Callable[[int], str],
        last: int,
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._connection = connection
        self._config = config.train
        self._reference_at = reference_at
        self._last = last
        # At staleness 0 the data of a step exists only after the step before was published.
        self._ahead = config.train.prefetch and config.max_staleness != 0
        self._asked: tuple[int, int] | None = None  # (step, id of the request)

    def ask_ahead(self, step: int) -> None:
        """Ask for the batch of a step that comes next, and do not wait."""
        if self._ahead and step < self._last:
            self._asked = step, self._connection.ask_ahead(self._request(step))

    def take(self, step: int) -> TrainBatch | str:
        """The batch of a step, or after about a second why there is none yet."""
        asked, self._asked = self._asked, None
        if asked is not None and asked[0] == step:
            reply, frames = self._connection.collect(asked[1], wire.Message)
        else:
            reply, frames = self._connection.ask(self._request(step), wire.Message)
        if isinstance(reply, wire.Batch):
            train = self._config
            with self._watch.phase("data"):
                return decode(reply, frames, prompts=train.prompts_per_step, samples=train.samples_per_prompt)
        return getattr(reply, "reason", "")

    def _request(self, step: int) -> wire.SampleBatch:
        return wire.SampleBatch(
            step=step,
            prompts=self._config.prompts_per_step,
            samples=self._config.samples_per_prompt,
            reference=self._reference_at(step),
            wait_seconds=_WAIT_SECONDS,
        )
