"""The life cycle of a background thread, and the pauses between tries."""

import threading

import pytest

from tba.common.system.background import Background, backoff


def test_stop_ends_a_thread_that_waits_on_stopping():
    def work():
        thread.stopping.wait()

    thread = Background("waits", work)
    thread.start()
    assert thread.running
    assert thread.stop(timeout_seconds=10)
    thread.check()


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


def test_stop_says_that_a_thread_did_not_end_in_time():
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    thread = Background("stuck", hang)
    thread.start()
    assert not thread.stop(timeout_seconds=0.01)
    release.set()
    assert thread.stop(10)


def test_a_thread_that_was_never_started_can_be_stopped():
    thread = Background("idle", lambda: None)
    assert thread.stop()
    assert not thread.running


def test_backoff_doubles_from_the_first_pause_up_to_the_longest():
    assert [backoff(failures, 1.0, 5.0) for failures in (0, 1, 2, 3, 4, 5_000)] == [1.0, 1.0, 2.0, 4.0, 5.0, 5.0]
