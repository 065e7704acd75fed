"""A waiting thread gets a fair lock before the thread that released it."""

import threading
import time

from tba.searcher.engines.vllm.running import FairLock


def test_a_thread_that_reacquires_the_lock_comes_after_one_that_waited():
    lock, order = FairLock(), []

    def wait() -> None:
        with lock:
            order.append("waited")

    waiting = threading.Thread(target=wait)
    with lock:
        waiting.start()
        deadline = time.monotonic() + 60
        while not lock._next.locked():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with lock:
        order.append("again")
    waiting.join()
    assert order == ["waited", "again"]
