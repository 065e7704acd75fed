"""The third stage: replies wait here until what they acknowledge is on the disk.

    writer ──► (replies of a transaction) ──► one sync for all that were committed before it began ──► network

Invariant: no reply leaves before a sync that began after its transaction's commit has ended. While the disk
syncs, the writer is in the next transaction.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

from tba.buffer.mailbox import Mailbox
from tba.buffer.write_ahead_log import WriteAheadLog
from tba.common.channels import Peer
from tba.common.codec import Frames

Replies = Sequence[tuple[Peer, Frames]]
_CHECKPOINT_SECONDS = 0.02
_FAILURE_POLL_SECONDS = 0.1
_AHEAD = 8  # transactions that the writer may be ahead of the disk


class Syncer:
    """Calls `sync`, then `send` with the replies of one or more transactions."""

    def __init__(self, sync: Callable[[], None], send: Callable[[Replies], None]) -> None:
        self._sync = sync
        self._send = send
        self._waiting: queue.Queue[Replies | None] = queue.Queue(_AHEAD)
        self._thread = threading.Thread(target=self._run, name="syncer", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Sync and send what waits, and end the thread."""
        self.add(None)
        self._thread.join()

    def add(self, replies: Replies | None) -> None:
        """The replies of a committed transaction. Waits while the disk is too far behind."""
        while self.failure is None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(replies, timeout=_FAILURE_POLL_SECONDS)
                return

    def _run(self) -> None:
        try:
            while True:
                taken = [self._waiting.get()]
                while not self._waiting.empty():
                    taken.append(self._waiting.get_nowait())
                self._sync()
                self._send([reply for replies in taken if replies is not None for reply in replies])
                if taken[-1] is None:
                    return
        except BaseException as error:  # noqa: BLE001  # the writer raises it: nothing more can be acknowledged
            self.failure = error


class Checkpointer:
    """Copies the log into the database now and then, so that neither the writer nor an acknowledgement waits for it.

    It leaves disk and cores to a batch that is under way, unless much has been written since the last time. When the
    log has become very long the puts wait until all of it is copied; who asks for a batch does not.
    """

    def __init__(self, log: WriteAheadLog, mailbox: Mailbox) -> None:
        self._log = log
        self._mailbox = mailbox
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_CHECKPOINT_SECONDS):
                if self._log.copy(unless_short=self._mailbox.held):
                    with self._mailbox.holding():
                        self._log.finish()
        except BaseException as error:  # noqa: BLE001  # the writer raises it: without us the log grows for ever
            self.failure = error
