"""A vLLM worker of which, with tensor parallelism, the second one has found no layout."""

from typing import Any

from tba.searcher.engines.vllm import worker


class WeightWorker(worker.WeightWorker):
    """What vLLM's workers are extended with."""

    def tba_start(self) -> Any:
        """Report an obstacle on the second worker."""
        this: Any = self
        obstacle = super().tba_start()
        return obstacle if this.rank == 0 else "no layout on this worker"
