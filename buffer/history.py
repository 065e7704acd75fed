"""The history that batches are sampled from."""

from collections.abc import Callable, Mapping

from tba.buffer.policy import Shortage
from tba.common import wire

Choose = Callable[[wire.SampleBatch], Shortage | None]


class History:
    """The run's own: it grows while the run trains, and the batch of a step is sampled when it is asked for."""

    grows = True

    def step(self, step: int) -> int:
        """The step that the age of data counts from, for the batch of a step."""
        return step

    def policy_steps(self, versions: Mapping[int, wire.WeightsRef]) -> dict[int, int]:
        """The optimiser step of each policy version, of which these were announced in this run."""
        return {version: ref.step for version, ref in versions.items()}

    def batch(self, message: wire.SampleBatch, choose: Choose) -> Shortage | None:
        """Record a batch, or say what is missing. `choose` samples one and records it."""
        return choose(message)
