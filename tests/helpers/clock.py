"""A clock that tests move."""


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self.now += seconds
