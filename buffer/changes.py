"""Which prompts changed since somebody last looked."""

from array import array


class Changes:
    """A queue of places, each at most once however often it changed. 5 bytes a prompt at the most."""

    def __init__(self, places: int) -> None:
        self._noted = bytearray(places)
        self._queue = array("i")

    def note(self, place: int) -> None:
        """This place changed."""
        if place >= len(self._noted):
            self._noted.extend(bytes(place + 1 - len(self._noted)))
        if not self._noted[place]:
            self._noted[place] = 1
            self._queue.append(place)

    def drain(self) -> "array[int]":
        """The places that changed since the last call, in the order of their first change."""
        queue, self._queue = self._queue, array("i")
        for place in queue:
            self._noted[place] = 0
        return queue
