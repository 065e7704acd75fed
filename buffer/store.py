"""What the buffer keeps: the tables of one database file, and the transactions on them.

    Store ──► runs, senders, prompts, visits, trajectories, batches, snapshots ──► DatabaseFile ──► WriteAheadLog

Invariant: nothing is acknowledged before the transaction that holds it has committed. One writer, one
transaction for whatever arrived while the last one committed.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.buffer.database import DatabaseFile
from tba.buffer.tables.batches import Batches
from tba.buffer.tables.prompts import Prompts, Visits
from tba.buffer.tables.runs import Run, Runs
from tba.buffer.tables.senders import Senders
from tba.buffer.tables.snapshots import Snapshots
from tba.buffer.tables.trajectories import Trajectories
from tba.buffer.write_ahead_log import WriteAheadLog

_TRANSACTION_BYTES = 32 << 10  # in the log, beside those of its trajectories: pages of tables and indexes; measured


class Store:
    """One open database. Not thread-safe.

    Raises LockTaken if another server has the file, StorageError if it is not a usable database.
    """

    def __init__(self, path: Path, *, durability: str) -> None:
        self.database = DatabaseFile(path, durability=durability)
        self.runs = Runs(self.database)
        self.senders = Senders(self.database)
        self.prompts = Prompts(self.database)
        self.visits = Visits(self.database)
        self.trajectories = Trajectories(self.database)
        self.batches = Batches(self.database, self.trajectories)
        self.snapshots = Snapshots(self.database)

    @property
    def path(self) -> Path:
        """The file."""
        return self.database.path

    @property
    def log(self) -> WriteAheadLog:
        """What has to be synced before an acknowledgement, and copied now and then."""
        return self.database.log

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or nothing at all. Raises StorageError if the disk refuses."""
        try:
            with self.database.transaction():
                yield
                self.trajectories.flush()
        except BaseException:
            self.trajectories.rolled_back()
            raise
        self.log.written += _TRANSACTION_BYTES + self.trajectories.committed()

    def open_run(self, name: str, *, seed: int, config: dict[str, Any], software: dict[str, str]) -> Run:
        """The run of this name, made if it is not there; and a record of this start.

        A run keeps the seed that it was made with: the order of its prompts follows from it.
        """
        with self.transaction():
            return self.runs.open(name, seed=seed, config=config, software=software, now=time.time())

    def close(self) -> None:
        """Close the file; what was committed stays."""
        self.database.close()
