"""The life cycle of a background thread, and the pauses between tries."""

import threading

import pytest

from tba.common.system.background import Background, backoff


def test_stop_wakes_a_blocked_thread_once():
    woken = threading.Semaphore(0)
    calls = []

    def wake():
        calls.append(1)
        woken.release()

    def block() -> None:
        woken.acquire()

    thread = Background("blocked", block, wake=wake)
    thread.start()
    assert thread.stop(10)
    assert thread.stop(10)
    assert calls == [1]


def test_check_raises_what_ended_the_thread():
    def fail():
        raise ValueError("no disk")

    thread = Background("fails", fail)
    thread.start()
    thread.join(60)
    assert not thread.running
    with pytest.raises(ValueError, match="no disk"):
        thread.check()


def test_a_thread_that_was_never_started_can_be_stopped():
    thread = Background("idle", lambda: None)
    assert thread.stop()
    assert not thread.running


def test_backoff_doubles_from_the_first_pause_up_to_the_longest():
    assert [backoff(failures, 1.0, 5.0) for failures in (0, 1, 2, 3, 4, 5_000)] == [1.0, 1.0, 2.0, 4.0, 5.0, 5.0]
