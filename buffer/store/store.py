"""The buffer's storage: the tables of one database file, and transactions on them.

    Store ──► runs, senders, prompts, visits, trajectories, batches, snapshots, ... ──► DatabaseFile

Invariant: nothing is acknowledged before its transaction has committed. There is one writer.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.tables.batches import Batches
from tba.buffer.store.tables.prompts import Prompts, Visits
from tba.buffer.store.tables.runs import Evaluations, Run, Runs, Senders, Snapshots
from tba.buffer.store.tables.trajectories import Trajectories


class Store:
    """One open database with its tables. Not thread-safe. Raises as `DatabaseFile`."""

    def __init__(self, path: Path, *, durability: str) -> None:
        self.path = path
        self.database = DatabaseFile(path, durability=durability)
        self.runs = Runs(self.database)
        self.senders = Senders(self.database)
        self.prompts = Prompts(self.database)
        self.visits = Visits(self.database)
        self.trajectories = Trajectories(self.database)
        self.batches = Batches(self.database, self.trajectories)
        self.snapshots = Snapshots(self.database)
        self.evaluations = Evaluations(self.database)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the block's writes, or none of them. Raises StorageError if the disk fails."""
        try:
            with self.database.transaction():
                yield
                self.trajectories.flush()
        except BaseException:
            self.trajectories.rolled_back()
            raise

    def open_run(
        self,
        name: str,
        *,
        seed: int,
        config: dict[str, Any],
        software: dict[str, str],
        origins: Mapping[str, str] | None = None,
    ) -> Run:
        """Return the run of this name, made if needed, and record this start. A run keeps its first seed.

        `origins` says what set each dotted key of `config`; None if that is not known.
        """
        start = json.dumps(config), json.dumps(software), None if origins is None else json.dumps(origins)
        with self.transaction():
            return self.runs.open(name, seed, time.time(), start)

    def close(self) -> None:
        self.database.close()
