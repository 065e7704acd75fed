"""Fetch the batch of a step from the buffer, and prefetch the next one during the update.

    step s      fetch(s) ──► prefetch(s + 1) ──► update ──► report(s)
    step s + 1  fetch(s + 1): returns the prefetched reply, or waits for it

The request for s + 1 always goes out before the report of s, so the data that a batch is drawn from does not depend on
the speed of either side, as long as there is enough of it. A prefetched batch is recorded like any other: a trainer
that is killed meanwhile trains on it after its resume.
"""

from collections.abc import Callable

from tba.common.config import Config
from tba.common.wire import messages
from tba.trainer.batch.batch import TrainBatch, decode
from tba.trainer.buffer_link.connection import Client
from tba.trainer.metrics.stopwatch import Stopwatch

_WAIT_SECONDS = 1.0


class BatchFetcher:
    """Fetches batches. `reference_at` names the reference policy of a step; `last` is the step after the last one."""

    def __init__(
        self,
        client: Client,
        config: Config,
        *,
        stop: Callable[[], bool],
        reference_at: Callable[[int], str],
        last: int,
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._client, self._stop = client, stop
        self._config = config.train
        self._reference_at = reference_at
        self._last = last
        # At staleness 0 the data of a step exists only after the previous step was published.
        self._ahead = config.max_staleness != 0
        # Step and request id of the prefetch in progress.
        self._prefetched: tuple[int, int] | None = None

    def prefetch(self, step: int) -> None:
        """Request the batch of the next step without waiting."""
        if self._ahead and step < self._last:
            self._prefetched = step, self._client.ask_ahead(self._request(step))

    def fetch(self, step: int) -> TrainBatch | str:
        """Return the batch of a step, or after about a second the reason why there is none yet."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == step:
            reply, frames = self._client.collect(prefetched[1], messages.Message, self._stop)
        else:
            reply, frames = self._client.call(self._request(step), messages.Message, stop=self._stop)
        if isinstance(reply, messages.Batch):
            train = self._config
            with self._watch.phase("data"):
                return decode(reply, frames, prompts=train.prompts_per_step, samples=train.samples_per_prompt)
        return getattr(reply, "reason", "")

    def _request(self, step: int) -> messages.SampleBatch:
        return messages.SampleBatch(
            step=step,
            prompts=self._config.prompts_per_step,
            samples=self._config.samples_per_prompt,
            reference=self._reference_at(step),
            wait_seconds=_WAIT_SECONDS,
        )
