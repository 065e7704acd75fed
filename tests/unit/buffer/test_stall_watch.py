"""What the buffer server does about a stall: a line in the log."""

from tba.buffer.server.stall_watch import StallWatch
from tba.common.stall.facts import Stall
from tba.tests.helpers.clock import ManualClock

_SILENT = Stall("searcher_silent", 'searcher "gpu3" has been silent; $(echo unquoted)')
_SLOW = Stall("rewards", "96 rewards")


def test_a_stall_is_logged_once_for_each_reason(caplog):
    clock = ManualClock()
    watch = StallWatch(clock)

    def spend(seconds: int, stall: Stall | None) -> None:
        for _ in range(seconds):
            clock.advance(1)
            watch.update(stall)

    with caplog.at_level("INFO", "tba"):
        spend(3, _SLOW)
        spend(20, None)
        assert (caplog.messages, watch.seconds) == ([], 0)
        spend(20, _SILENT)
        # A moment without it does not end it.
        spend(2, None)
        spend(60, _SLOW)
        assert watch.seconds > 80
        spend(10, None)
    assert caplog.messages == ["the run stands still", "the run stands still", "the run moves again"]
