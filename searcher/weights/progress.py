"""Progress of the snapshot that is being prepared."""

from tba.common.errors import SnapshotOutdated


class Progress:
    """What the preparing thread waits for, and whether it should stop waiting.

    The preparing thread calls `report` and `check`; another thread sets `outdated` and reads `waits_for`.
    """

    def __init__(self) -> None:
        # Set when another snapshot is wanted, or none at all: then only work that makes progress continues.
        self.outdated = False
        # A sentence for people, empty while nothing is waited for.
        self.waits_for = ""

    def report(self, waits_for: str) -> None:
        """Publish what is waited for; an empty string when the wait is over."""
        self.waits_for = waits_for

    def check(self, what: str) -> None:
        """Raise SnapshotOutdated if `what` is not needed any more. Called while waiting, not while progressing."""
        if self.outdated:
            raise SnapshotOutdated(f"{what} is no longer wanted")
