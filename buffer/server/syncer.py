"""The threads that write to the disk: one syncs commits and releases their replies, one checkpoints the WAL.

    replies of a committed transaction ──► one sync for all commits before it ──► network

Invariant: a reply leaves only after a sync that began after its transaction's commit. While the disk syncs, the
writer is in the next transaction.
"""

import contextlib
import queue
from collections.abc import Callable, Sequence

from tba.buffer.server.mailbox import Mailbox
from tba.buffer.store.write_ahead_log import WriteAheadLog
from tba.common.system.background import Background
from tba.common.wire.channels import Peer
from tba.common.wire.codec import Frames

Replies = Sequence[tuple[Peer, Frames]]
_CHECKPOINT_SECONDS = 0.02
_FAILURE_POLL_SECONDS = 0.1
# Transactions that the writer may be ahead of the disk.
_QUEUE_LENGTH = 8


class Syncer:
    """Calls `sync`, then `send` with the replies of one or more transactions.

    After a failure nothing is sent: `thread.check()` raises it, and the server ends.
    """

    def __init__(self, sync: Callable[[], None], send: Callable[[Replies], None]) -> None:
        # `stop` queues None behind the last replies: they are synced and sent before the thread ends.
        self.thread = Background("syncer", self._run, wake=lambda: self.add(None))
        self._sync = sync
        self._send = send
        self._waiting: queue.Queue[Replies | None] = queue.Queue(_QUEUE_LENGTH)

    def add(self, replies: Replies | None) -> None:
        """Queue the replies of a committed transaction. Blocks while the disk is too far behind."""
        while self.thread.failure is None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(replies, timeout=_FAILURE_POLL_SECONDS)
                return

    def _run(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get_nowait())
            self._sync()
            self._send([reply for replies in taken if replies is not None for reply in replies])
            if taken[-1] is None:
                return


class Checkpointer:
    """Checkpoints the WAL periodically, so that neither the writer nor an acknowledgement waits for it.

    If the WAL has become very long, puts wait until all of it is in the database file; urgent requests do not.
    """

    def __init__(self, log: WriteAheadLog, mailbox: Mailbox) -> None:
        self.thread = Background("checkpointer", self._run)
        self._log = log
        self._mailbox = mailbox

    def _run(self) -> None:
        while not self.thread.stopping.wait(_CHECKPOINT_SECONDS):
            if self._log.checkpoint():
                with self._mailbox.paused():
                    self._log.checkpoint_all()
