"""The tables `prompts`, `visits` (each time one was handed out) and `curriculum_rows` (what an epoch skips)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tba.buffer.store.database import Table
from tba.buffer.store.tables.runs import Run


@dataclass(slots=True)
class OpenVisit:
    """A visit whose last trajectories have not arrived. `sender` is None if no searcher holds its lease.

    `stored` counts those that have (`search.put`).
    """

    id: int
    epoch: int
    prompt: int
    sender: str | None
    stored: int = 0


class Prompts(Table):
    def add(
        self,
        run: Run,
        offset: int,
        keys: Sequence[str],
        texts: Sequence[str | None],
        answers: Sequence[str | None] = (),
    ) -> None:
        """Add prompts at positions from `offset` on: keys, and as many texts and reference answers or none.

        Existing prompts stay; an imported one gets its position, its text and its answer.
        """
        unknown = [None] * len(keys)
        rows = zip(range(offset, offset + len(keys)), keys, texts or unknown, answers or unknown, strict=True)
        self._database.execute_many(
            "INSERT INTO prompts (run, position, key, text, answer) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run, key) "
            "DO UPDATE SET position = excluded.position, text = excluded.text, answer = excluded.answer "
            "WHERE prompts.position IS NULL ON CONFLICT DO NOTHING",
            [(run.id, *row) for row in rows],
        )

    def add_imported(self, run: Run, keys: Sequence[str]) -> dict[str, int]:
        """Return ids of prompts by key. Prompts outside the task are added without a position and are never leased."""
        ids = {}
        for key in keys:
            self._database.execute("INSERT INTO prompts (run, key) VALUES (?, ?) ON CONFLICT DO NOTHING", (run.id, key))
            ids[key] = int(self._database.one("SELECT id FROM prompts WHERE run = ? AND key = ?", run.id, key)[0])
        return ids

    def ids(self, run: Run, offset: int = 0) -> dict[str, int]:
        """Return ids of the task's prompts from a position on by key, in order. Imported ones have no position."""
        query = "SELECT key, id FROM prompts WHERE run = ? AND position >= ? ORDER BY position"
        return dict(self._database.all(query, run.id, offset))


class Decision(NamedTuple):
    """What an epoch does with a prompt, because `passed` of its newest `answers` answers passed."""

    prompt: int
    decision: Literal["skipped", "postponed"]
    passed: int
    answers: int


class Visits(Table):
    """The visits of prompts, each open from its lease to the commit of its trajectories, and what epochs decided."""

    def newest_epoch(self, run: Run) -> tuple[int, list[int]]:
        """Return the newest epoch, 0 before the first visit, and the prompts of its visits in their order."""
        (epoch,) = self._database.one("SELECT COALESCE(MAX(epoch), 0) FROM visits WHERE run = ?", run.id)
        query = "SELECT prompt FROM visits WHERE run = ? AND epoch = ? ORDER BY place"
        return epoch, [prompt for (prompt,) in self._database.all(query, run.id, epoch)]

    def open(self, run: Run) -> list[OpenVisit]:
        """Return the visits whose trajectories have not arrived."""
        rows = self._database.all(
            "SELECT v.id, v.epoch, v.prompt, s.sender, "
            "(SELECT COUNT(*) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id) "
            "FROM visits v LEFT JOIN senders s ON s.id = v.sender WHERE v.run = ? AND v.done_at IS NULL",
            run.id,
        )
        return [OpenVisit(*row) for row in rows]

    def newest(self) -> int:
        """Return the largest id of a visit of any run, 0 without one."""
        return int(self._database.one("SELECT COALESCE(MAX(id), 0) FROM visits")[0])

    def add(self, run: Run, epoch: int, position: int, prompt: int, sender: int, now: float) -> int:
        """Record a new visit with its lease, at a position of an epoch. Returns the id of the visit."""
        cursor = self._database.execute(
            "INSERT INTO visits (run, epoch, place, prompt, sender, leased_at) VALUES (?, ?, ?, ?, ?, ?)",
            (run.id, epoch, position, prompt, sender, now),
        )
        return int(cursor.lastrowid or 0)

    def lease_again(self, visit: int, sender: int, now: float) -> None:
        self._database.execute("UPDATE visits SET sender = ?, leased_at = ? WHERE id = ?", (sender, now, visit))

    def close(self, visits: Sequence[int], now: float) -> None:
        """Close visits. Call it in the transaction that adds their trajectories."""
        self._database.execute(
            "UPDATE visits SET done_at = ? WHERE id IN (SELECT value FROM json_each(?)) AND done_at IS NULL",
            (now, json.dumps(visits)),
        )

    def decide(self, run: Run, epoch: int, decisions: Sequence[Decision]) -> None:
        """Record the decisions for an epoch. Call it in the transaction that opens its first visit."""
        # In the order of the key: each row is then appended to the table.
        self._database.execute_many(
            "INSERT INTO curriculum_rows (run, epoch, prompt, decision, passed, answers) VALUES (?, ?, ?, ?, ?, ?)",
            [(run.id, epoch, *one) for one in sorted(decisions)],
        )

    def decisions(self, run: Run, epoch: int) -> list[Decision]:
        rows = self._database.all(
            "SELECT prompt, decision, passed, answers FROM curriculum_rows WHERE run = ? AND epoch = ?", run.id, epoch
        )
        return [Decision(*row) for row in rows]
