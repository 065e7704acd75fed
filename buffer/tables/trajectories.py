"""The tables `trajectory_rows`, `payloads` and `reference_logprobs`: what was generated.

What a transaction adds is gathered, and written at its end in statements of many rows: `flush`.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tba.buffer.database import DatabaseFile
from tba.buffer.index import Entry
from tba.buffer.tables.runs import Run
from tba.common.errors import Refused
from tba.common.quantity import quantity
from tba.common.trajectory import ARRAY_KINDS

_ROW_BYTES = 1024  # of a trajectory without its payload, in the log, roughly
TRAJECTORY_COLUMNS = (
    "id",
    "run",
    "prompt",
    "visit",
    "sender",
    "sequence",
    "policy_version",
    "reward",
    "reward_parts",
    "stop_reason",
    "prompt_tokens",
    "response_tokens",
    "dedup_hash",
    "sampling",
    "created_at",
    "received_at",
    "generation_seconds",
    "text",
    "error",
    "metadata",
    "payload_bytes",
)
_PAYLOAD_COLUMNS = ("trajectory", "prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")
_SELECT_PAYLOADS = """
SELECT p.prompt_ids, p.response_ids, p.logprobs, p.version_runs, p.loss_mask
FROM json_each(?) asked CROSS JOIN payloads p ON p.trajectory = asked.value
ORDER BY asked.key
"""


class Trajectories:
    """The trajectories of the runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database
        self._new_rows: list[Sequence[Any]] = []  # of this transaction, not yet written
        self._new_payloads: list[Sequence[Any]] = []
        self._new_references: list[tuple[int, str, float]] = []
        self._unlogged = 0  # bytes that this transaction will have put into the log, roughly
        self._next_id: int | None = None

    def new_ids(self, count: int) -> range:
        """Ids for so many new trajectories. They only grow: nothing is ever deleted."""
        if self._next_id is None:
            self._next_id = int(self._database.one("SELECT COALESCE(MAX(id), 0) + 1 FROM trajectory_rows")[0])
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, self._next_id)

    def add(self, rows: Sequence[Sequence[Any]], payloads: Sequence[Sequence[memoryview]]) -> None:
        """Add rows (see `TRAJECTORY_COLUMNS`) with their payloads; they are written with the transaction's end."""
        self._new_rows.extend(rows)
        self._new_payloads.extend((row[0], *payload) for row, payload in zip(rows, payloads, strict=True))

    def add_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Add (trajectory, reference, log-probability); they are written after the trajectories."""
        self._new_references.extend(rows)

    def flush(self) -> None:
        """Write what was added, so that queries of this transaction see it."""
        self._database.insert("OR ROLLBACK", "trajectory_rows", TRAJECTORY_COLUMNS, self._new_rows)
        self._database.insert("OR ROLLBACK", "payloads", _PAYLOAD_COLUMNS, self._new_payloads)
        self._unlogged += sum(row[-1] + _ROW_BYTES for row in self._new_rows)
        self.insert_references(self._new_references)
        self._new_rows, self._new_payloads, self._new_references = [], [], []

    def insert_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Write (trajectory, reference, log-probability) now, each that is not there."""
        self._database.insert("OR IGNORE", "reference_logprobs", ("trajectory", "reference", "logprob"), rows)

    def sequence_ranges(self, sender: int) -> list[tuple[int, int]]:
        """The half-open ranges of sequence numbers that are there from a sender."""
        query = """
        SELECT MIN(sequence), MAX(sequence) + 1
        FROM (SELECT sequence, sequence - ROW_NUMBER() OVER (ORDER BY sequence) AS island
              FROM trajectory_rows WHERE sender = ?)
        GROUP BY island"""
        return self._database.all(query, sender)

    def entries(self, run: Run, steps: dict[int, int]) -> Iterator[Entry]:
        """All sampleable trajectories, oldest first, for the index. `steps` maps versions to steps."""
        query = (
            "SELECT t.id, t.prompt, t.policy_version, t.reward, t.dedup_hash, COALESCE(t.payload_bytes, 0), "
            "EXISTS (SELECT 1 FROM consumption_rows c WHERE c.trajectory = t.id) "
            "FROM trajectory_rows t WHERE t.run = ? AND t.error IS NULL AND t.compacted_at IS NULL ORDER BY t.id"
        )
        for id_, prompt, version, reward, dedup_hash, size, taken in self._database.each(query, run.id):
            yield Entry(id_, prompt, steps.get(version, 0), reward, dedup_hash, bool(taken), size)

    def counts(self, run: Run) -> tuple[int, int]:
        """(trajectories, of these with an error)."""
        return self._database.one("SELECT COUNT(*), COUNT(error) FROM trajectory_rows WHERE run = ?", run.id)

    def payloads(self, trajectories: Sequence[int]) -> list[tuple[bytes, ...]]:
        """The blobs of trajectories, in the order asked, one per array kind. Raises Refused if one was compacted."""
        self.flush()
        found = self._database.all(_SELECT_PAYLOADS, json.dumps(trajectories))
        if len(found) < len(trajectories):
            gone = quantity(len(trajectories) - len(found), "trajectory", "trajectories")
            raise Refused(
                "compacted",
                f"the tokens of {gone} of this batch are gone: `tba buffer compact` dropped them, so it cannot be "
                "repeated; resume from a newer checkpoint",
            )
        return found

    def tokens(self, trajectories: Sequence[int]) -> tuple[int, int]:
        """(prompt tokens, response tokens) of these trajectories, each counted as often as it is named."""
        self.flush()
        query = """SELECT COALESCE(SUM(t.prompt_tokens), 0), COALESCE(SUM(t.response_tokens), 0)
                   FROM json_each(?) asked CROSS JOIN trajectory_rows t ON t.id = asked.value"""
        return self._database.one(query, json.dumps(trajectories))

    def payload_sizes(self, run: Run) -> Iterator[tuple[int, int]]:
        """(trajectory, bytes of its payload) for all that have one, oldest first."""
        size = " + ".join(f"LENGTH(y.{kind.name})" for kind in ARRAY_KINDS)
        tables = "FROM trajectory_rows t JOIN payloads y ON y.trajectory = t.id"
        yield from self._database.execute(
            f"SELECT t.id, {size} {tables} WHERE t.run = ? ORDER BY t.id",
            (run.id,),
        )

    def drop_payloads(self, trajectories: Sequence[int], now: float) -> None:
        """Delete tokens; the rows say when."""
        ids = [(id_,) for id_ in trajectories]
        self._database.execute_many("DELETE FROM payloads WHERE trajectory = ?", ids)
        dropped = [(now, id_) for id_ in trajectories]
        self._database.execute_many("UPDATE trajectory_rows SET compacted_at = ? WHERE id = ?", dropped)

    def committed(self) -> int:
        """The transaction was. Returns how many bytes it has put into the log, roughly."""
        logged, self._unlogged = self._unlogged, 0
        return logged

    def rolled_back(self) -> None:
        """Forget what the transaction added."""
        self._new_rows, self._new_payloads, self._new_references, self._next_id = [], [], [], None
        self._unlogged = 0
