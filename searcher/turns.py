"""A lock that is handed on to who waits for it."""

import threading


class Turns:
    """A lock for a thread that takes it again as soon as it has let it go, and others that want it now and then.

    Of `threading.Lock` that thread would be the owner again before another one is awake, many times in a row.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()  # held by the first who waits: whoever comes later waits for this
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()
