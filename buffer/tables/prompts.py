"""The tables `prompts` and `visits`: what there is to answer, and who has which of it at the moment."""

import json
from collections.abc import Sequence

from tba.buffer.database import DatabaseFile
from tba.buffer.leases import OpenVisit
from tba.buffer.tables.runs import Run


class Prompts:
    """The prompts of the runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def add(self, run: Run, offset: int, keys: Sequence[str]) -> None:
        """Prompt keys at positions from `offset` on; those that are there stay, an imported one gets its position."""
        self._database.execute_many(
            "INSERT INTO prompts (run, position, key) VALUES (?, ?, ?) "
            "ON CONFLICT (run, key) DO UPDATE SET position = excluded.position WHERE prompts.position IS NULL "
            "ON CONFLICT DO NOTHING",
            [(run.id, offset + place, key) for place, key in enumerate(keys)],
        )

    def add_imported(self, run: Run, keys: Sequence[str]) -> dict[str, int]:
        """Ids of prompts by key. Those that the task does not have are made without a position: never leased."""
        ids = {}
        for key in keys:
            self._database.execute("INSERT INTO prompts (run, key) VALUES (?, ?) ON CONFLICT DO NOTHING", (run.id, key))
            ids[key] = int(self._database.one("SELECT id FROM prompts WHERE run = ? AND key = ?", run.id, key)[0])
        return ids

    def ids(self, run: Run) -> dict[str, int]:
        """Ids of the task's prompts by key, in the order of the data set. Imported ones have no place in it."""
        query = "SELECT key, id FROM prompts WHERE run = ? AND position IS NOT NULL ORDER BY position"
        return dict(self._database.all(query, run.id))


class Visits:
    """The visits of prompts: open from their lease to the commit of their trajectories."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def newest_place(self, run: Run) -> tuple[int, int]:
        """(epoch, place after the last visit) to continue from."""
        row = self._database.all(
            "SELECT epoch, MAX(place) + 1 FROM visits WHERE run = ? GROUP BY epoch ORDER BY epoch DESC LIMIT 1", run.id
        )
        return row[0] if row else (0, 0)

    def open(self, run: Run) -> list[OpenVisit]:
        """Visits that were handed out and have not come back."""
        rows = self._database.all(
            "SELECT id, epoch, prompt, sender FROM visits WHERE run = ? AND done_at IS NULL", run.id
        )
        return [OpenVisit(*row) for row in rows]

    def add(self, run: Run, epoch: int, place: int, prompt: int, sender: str, now: float) -> int:
        """Record a new lease. Returns its id."""
        cursor = self._database.execute(
            "INSERT INTO visits (run, epoch, place, prompt, sender, leased_at) VALUES (?, ?, ?, ?, ?, ?)",
            (run.id, epoch, place, prompt, sender, now),
        )
        return int(cursor.lastrowid or 0)

    def lease_again(self, visit: int, sender: str, now: float) -> None:
        """Give an open visit to another sender."""
        self._database.execute("UPDATE visits SET sender = ?, leased_at = ? WHERE id = ?", (sender, now, visit))

    def close(self, visits: Sequence[int], now: float) -> None:
        """The trajectories of these visits are in this transaction."""
        self._database.execute(
            "UPDATE visits SET done_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND done_at IS NULL",
            (now, json.dumps(visits)),
        )
