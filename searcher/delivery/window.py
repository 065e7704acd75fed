"""The window of puts that are on the wire: it bounds memory, however long the buffer is away."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tba.common.wire.client import BufferClient
from tba.common.wire.codec import Frames
from tba.common.wire.fields import NO_VISIT

# Enough for one searcher to keep every stage of the buffer busy while it delivers what was spooled during an outage.
_MAX_PUTS = 64
_MAX_BYTES = 32 << 20


@dataclass(slots=True)
class Put:
    """An unacknowledged put: its request id, its size in bytes and the lease it closes."""

    id: int
    size: int
    lease: int = NO_VISIT
    frames: Frames | None = None
    """The request, until it is posted; None if it has to be read from the spool."""
    spooled: bool = True


class Window:
    """Puts in order: those in the window are posted, the others wait.

        add ──► waiting ──► post, while there is room ──► posted ──► acknowledge

    A put larger than the window is posted alone.
    """

    def __init__(self, client: BufferClient, puts: Iterable[Put] = ()) -> None:
        self._client = client
        self._waiting = deque(puts)
        self._posted: dict[int, Put] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._posted)

    def __iter__(self) -> Iterator[Put]:
        """All unacknowledged puts, in order."""
        yield from self._posted.values()
        yield from self._waiting

    def add(self, put: Put) -> None:
        """Append a put."""
        self._waiting.append(put)

    def post(self, read: Callable[[Put], Frames | None]) -> None:
        """Post waiting puts while there is room.

        `read` returns the frames of the put, or None if it is lost, which drops it. If it raises, the put stays first.
        """
        while self._waiting and self._has_room(self._waiting[0].size):
            frames = read(self._waiting[0])
            put = self._waiting.popleft()
            if frames is None:
                continue
            self._client.post_encoded(put.id, frames)
            # From here on the client keeps the frames until the reply.
            put.frames = None
            self._posted[put.id] = put

    def acknowledge(self, id_: int) -> Put:
        """Remove the posted put that a reply belongs to. Raises KeyError for any other id."""
        return self._posted.pop(id_)

    def _has_room(self, size: int) -> bool:
        posted_bytes = sum(put.size for put in self._posted.values())
        return not self._posted or (len(self._posted) < _MAX_PUTS and posted_bytes + size <= _MAX_BYTES)
