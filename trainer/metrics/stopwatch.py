"""Wall time of a step by phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tba.common.clock import Clock

PHASES = ("wait", "data", "reference", "forward", "backward", "optimizer", "publish", "checkpoint", "other")


class Stopwatch:
    """Measures phases. It is in exactly one phase at any time, so the phases sum to the wall time.

    The time of a nested phase does not count for the outer one. `settle` is called before each reading: on a GPU it
    waits for the kernels, whose time would otherwise count for the phase that first reads a result.
    """

    def __init__(self, clock: Clock, settle: Callable[[], object] = lambda: None) -> None:
        self._clock, self._settle = clock, settle
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "other", clock.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for `name`, one of PHASES."""
        outer = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def take(self) -> dict[str, float]:
        """Return `seconds_PHASE` since the last call and their sum `seconds_step`, and reset them."""
        self._enter(self._phase)
        taken = {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return taken | {"seconds_step": sum(taken.values())}

    def _enter(self, name: str) -> None:
        self._settle()
        now = self._clock.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now


def wait_for_compute(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for queued computation, but not for copies to the host on other streams."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()
