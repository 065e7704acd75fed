"""A fair (FIFO) lock."""

import threading


class FairLock:
    """A lock for a thread that re-acquires it immediately after releasing it, and others that need it now and then.

    With `threading.Lock` that thread would win again and again, before a waiting thread has woken up.
    """

    def __init__(self) -> None:
        # Held by the first thread in the queue; threads that come later wait for it.
        self._next = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()
