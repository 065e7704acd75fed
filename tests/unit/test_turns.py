"""Whoever waits for a lock gets it before who had it last."""

import threading
import time

from tba.searcher.turns import Turns


def test_a_thread_that_takes_the_lock_again_at_once_keeps_nobody_waiting():
    turns, stop, taken, waited = Turns(), threading.Event(), 0, []

    def step() -> None:
        nonlocal taken
        while not stop.is_set():
            with turns:
                taken += 1
                time.sleep(0.002)

    stepping = threading.Thread(target=step)
    stepping.start()
    for _ in range(50):
        before = taken
        with turns:
            waited.append(taken - before)
        time.sleep(0.003)
    stop.set()
    stepping.join()
    assert max(waited) <= 2, "the turn under way, and one that was about to begin"
