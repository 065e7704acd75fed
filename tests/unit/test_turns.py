"""Whoever waits for a lock gets it before who had it last."""

import threading
import time

from tba.searcher.turns import Turns


def test_who_takes_the_lock_again_at_once_comes_after_who_waited():
    turns, order = Turns(), []

    def wait() -> None:
        with turns:
            order.append("waited")

    waiting = threading.Thread(target=wait)
    with turns:
        waiting.start()
        deadline = time.monotonic() + 10
        while not turns._next.locked():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with turns:
        order.append("again")
    waiting.join()
    assert order == ["waited", "again"]
