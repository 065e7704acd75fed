"""The tables `trajectory_rows`, `payloads` and `reference_logprobs`: what was generated.

What a transaction adds is gathered, and written at its end in statements of many rows: `flush`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from tba.buffer.database import DatabaseFile
from tba.buffer.index import Block
from tba.buffer.tables.runs import Run
from tba.common.errors import Refused
from tba.common.quantity import quantity
from tba.common.trajectory import ARRAY_KINDS

_BLOCK_ROWS = 256  # entered into the index at once, at a start: a prompt may have very many
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
# Not ordered here: SQLite's sorter would copy every blob, which takes as long as to read them.
_SELECT_PAYLOADS = """
SELECT p.trajectory, p.prompt_ids, p.response_ids, p.logprobs, p.version_runs, p.loss_mask
FROM json_each(?) asked CROSS JOIN payloads p ON p.trajectory = asked.value
"""


class Trajectories:
    """The trajectories of the runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database
        self._unlogged = 0  # bytes that this transaction will have put into the log, roughly
        self._next_id: int | None = None
        self._forget_new()

    def _forget_new(self) -> None:
        # Of this transaction, not yet written. Columns, each longer with every put: a row of its own for each
        # trajectory would be made and freed for nothing.
        self._new_rows: dict[str, list[Any]] = {name: [] for name in TRAJECTORY_COLUMNS}
        self._new_payloads: list[list[memoryview]] = [[] for _ in ARRAY_KINDS]
        self._new_references: list[tuple[int, str, float]] = []

    def new_ids(self, count: int) -> range:
        """Ids for so many new trajectories. They only grow: nothing is ever deleted."""
        if self._next_id is None:
            self._next_id = int(self._database.one("SELECT COALESCE(MAX(id), 0) + 1 FROM trajectory_rows")[0])
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, self._next_id)

    def add(self, rows: Mapping[str, Sequence[Any]], payload: Sequence[Sequence[memoryview]]) -> None:
        """Add rows, as `TRAJECTORY_COLUMNS` and a column of each kind of array.

        They are written at the transaction's end.
        """
        for name, column in self._new_rows.items():
            column.extend(rows[name])
        for views, more in zip(self._new_payloads, payload, strict=True):
            views.extend(more)

    def add_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Add (trajectory, reference, log-probability); they are written after the trajectories."""
        self._new_references.extend(rows)

    def flush(self) -> None:
        """Write what was added, so that queries of this transaction see it."""
        rows = self._new_rows
        self._database.insert("OR ROLLBACK", "trajectory_rows", TRAJECTORY_COLUMNS, list(rows.values()))
        self._database.insert("OR ROLLBACK", "payloads", _PAYLOAD_COLUMNS, [rows["id"], *self._new_payloads])
        self._unlogged += sum(rows["payload_bytes"]) + _ROW_BYTES * len(rows["id"])
        self.insert_references(self._new_references)
        self._forget_new()

    def insert_references(self, rows: Sequence[tuple[int, str, float]]) -> None:
        """Write (trajectory, reference, log-probability) now, each that is not there."""
        if rows:
            names, columns = ("trajectory", "reference", "logprob"), list(zip(*rows, strict=True))
            self._database.insert("OR IGNORE", "reference_logprobs", names, columns)

    def sequence_ranges(self, sender: int) -> list[tuple[int, int]]:
        """The half-open ranges of sequence numbers that are there from a sender."""
        query = """
        SELECT MIN(sequence), MAX(sequence) + 1
        FROM (SELECT sequence, sequence - ROW_NUMBER() OVER (ORDER BY sequence) AS island
              FROM trajectory_rows WHERE sender = ?)
        GROUP BY island"""
        return self._database.all(query, sender)

    def blocks(self, run: Run, steps: dict[int, int]) -> Iterator[Block]:
        """All sampleable trajectories, oldest first, for the index. `steps` maps versions to steps."""
        query = (
            "SELECT t.prompt, t.id, t.policy_version, t.reward, t.dedup_hash, "
            "EXISTS (SELECT 1 FROM consumption_rows c WHERE c.trajectory = t.id), "
            # Rows of older releases have no size: that of their ids and log-probabilities is nearly all of it.
            "COALESCE(t.payload_bytes, 4 * (t.prompt_tokens + 2 * t.response_tokens)) "
            "FROM trajectory_rows t WHERE t.run = ? AND t.error IS NULL AND t.compacted_at IS NULL ORDER BY t.id"
        )
        for prompt, all_rows in groupby(self._database.each(query, run.id), itemgetter(0)):
            while rows := list(islice(all_rows, _BLOCK_ROWS)):
                _, ids, versions, rewards, hashes, taken, sizes = zip(*rows, strict=True)
                yield Block(
                    prompt=prompt,
                    id=ids,
                    step=[steps.get(version, 0) for version in versions],
                    reward=rewards,
                    dedup_hash=hashes,
                    taken=taken,
                    payload_bytes=sizes,
                )

    def counts(self, run: Run) -> tuple[int, int]:
        """(trajectories, of these with an error)."""
        return self._database.one("SELECT COUNT(*), COUNT(error) FROM trajectory_rows WHERE run = ?", run.id)

    def payloads(self, trajectories: Sequence[int]) -> list[list[bytes]]:
        """The blobs of trajectories, in the order asked, one per array kind. Raises Refused if one was compacted."""
        self.flush()
        wanted = list(dict.fromkeys(trajectories))
        found = {id_: blobs for id_, *blobs in self._database.all(_SELECT_PAYLOADS, json.dumps(wanted))}
        if len(found) < len(wanted):
            gone = quantity(len(wanted) - len(found), "trajectory", "trajectories")
            raise Refused(
                "compacted",
                f"the tokens of {gone} of this batch are gone: `tba buffer compact` dropped them, so it cannot be "
                "repeated; resume from a newer checkpoint",
            )
        return [found[id_] for id_ in trajectories]

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
        self._forget_new()
        self._next_id, self._unlogged = None, 0
