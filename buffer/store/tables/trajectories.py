"""The tables `trajectory_rows`, `payloads` and `kept_tokens`.

The rows that a transaction adds are collected in memory; `flush` writes them with multi-row statements when it ends.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from tba.buffer.store.archives import Archives
from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.tables.runs import Run
from tba.buffer.store.views import EXPLORED
from tba.common.errors import Refused, quantity
from tba.common.wire.messages import Archive
from tba.common.wire.trajectory import ARRAY_KINDS, KEPT, ROW_FIELDS

# A prompt may have very many trajectories: the index receives them in blocks of at most this size at a start.
_BLOCK_ROWS = 256
# The responses whose mean length is expected of the next one.
_NEWEST = 8
# Bytes of the numbers of a row in the header of a batch.
_NUMBER_BYTES = 128
_TURN_BYTES = 9
TRAJECTORY_COLUMNS = (
    *("id", "run", "prompt", "visit", "sender", "sequence", "policy_version", "prompt_tokens", "response_tokens"),
    *("dedup_hash", "received_at", "payload_bytes", *ROW_FIELDS),
)
_ARRAYS = tuple(kind.name for kind in ARRAY_KINDS[:KEPT])
# The blobs of a trajectory in the order of ARRAY_KINDS: an expression for each, and where they are.
PAYLOAD_COLUMNS = ", ".join([*(f"y.{name}" for name in _ARRAYS), "COALESCE(k.kept, x'')"])
PAYLOADS = "payloads y LEFT JOIN kept_tokens k ON k.trajectory = y.trajectory"
_ADD_DELIVERED = """
UPDATE senders SET trajectories = trajectories + ?, errors = errors + ?, response_tokens = response_tokens + ?,
    reward_sum = reward_sum + ?, first_received_at = COALESCE(first_received_at, ?), last_received_at = ?
WHERE id = ?
"""
# Without ORDER BY: SQLite's sorter would copy every blob, which takes as long as reading them.
_SELECT_PAYLOADS = f"""
SELECT y.trajectory, {PAYLOAD_COLUMNS}
FROM json_each(?) asked CROSS JOIN payloads y ON y.trajectory = asked.value
LEFT JOIN kept_tokens k ON k.trajectory = y.trajectory
"""  # noqa: S608

_SELECT_ARCHIVED = """
SELECT t.id, a.url FROM json_each(?) asked CROSS JOIN trajectory_rows t ON t.id = asked.value
JOIN archives a ON a.id = t.archive WHERE t.compacted_at IS NULL ORDER BY a.url, t.id
"""
_SELECT_OLD = """
SELECT t.id FROM json_each(?) asked CROSS JOIN payloads y ON y.trajectory = asked.value
JOIN trajectory_rows t ON t.id = y.trajectory WHERE t.run = ? AND NOT EXISTS (
    SELECT 1 FROM consumption_rows c JOIN batches b ON b.id = c.batch
    WHERE c.trajectory = t.id AND (b.step >= ? OR b.trained_at IS NULL))
"""


class Trajectories:
    def __init__(self, database: DatabaseFile) -> None:
        self._database = database
        self._next_id: int | None = None
        self._archives = Archives()
        self._forget_new()

    def _forget_new(self) -> None:
        # Columns instead of a tuple per trajectory, which would only be created and freed.
        self._new_rows: dict[str, list[Any]] = {name: [] for name in TRAJECTORY_COLUMNS}
        self._new_payloads: list[list[memoryview]] = [[] for _ in ARRAY_KINDS]

    def new_ids(self, count: int) -> range:
        """Return ids for `count` new trajectories. Ids only grow, also beyond deleted ones that a batch has seen."""
        if self._next_id is None:
            used = "SELECT MAX(id) AS id FROM trajectory_rows UNION ALL SELECT MAX(newest_trajectory) FROM batches"
            self._next_id = int(self._database.one(f"SELECT COALESCE(MAX(id), 0) + 1 FROM ({used})")[0])  # noqa: S608
        first, self._next_id = self._next_id, self._next_id + count
        return range(first, self._next_id)

    def add(self, rows: Mapping[str, Sequence[Any]], payload: Sequence[Sequence[memoryview]]) -> None:
        """Add a column for each of TRAJECTORY_COLUMNS and of blobs for each array kind, to be written by `flush`."""
        for name, column in self._new_rows.items():
            column.extend(rows[name])
        for views, more in zip(self._new_payloads, payload, strict=True):
            views.extend(more)

    def flush(self) -> None:
        """Write the added rows, so that queries in this transaction see them."""
        rows = self._new_rows
        self._database.insert("trajectory_rows", TRAJECTORY_COLUMNS, list(rows.values()))
        self._database.insert("payloads", ("trajectory", *_ARRAYS), [rows["id"], *self._new_payloads[:KEPT]])
        kept = [(id_, view) for id_, view in zip(rows["id"], self._new_payloads[KEPT], strict=True) if view.nbytes]
        if kept:
            self._database.insert("kept_tokens", ("trajectory", "kept"), list(zip(*kept, strict=True)))
        self._count_delivered()
        self._forget_new()

    def _count_delivered(self) -> None:
        """Add the new rows to the counts of their senders, for which a view would have to read all rows."""
        rows, start = self._new_rows, 0
        changes = []
        for sender, same in groupby(rows["sender"]):
            part = slice(start, start + len(list(same)))
            start = part.stop
            errors, rewards = rows["error"][part], rows["reward"][part]
            failed = len(errors) - errors.count(None)
            if failed:
                rewards = [reward for reward, error in zip(rewards, errors, strict=True) if error is None]
            tokens, times = sum(rows["response_tokens"][part]), rows["received_at"][part]
            changes.append((len(errors), failed, tokens, sum(rewards), times[0], times[-1], sender))
        self._database.execute_many(_ADD_DELIVERED, changes)

    def next_sequence(self, sender: int) -> int:
        """Return the sequence number after the largest that is stored of a sender, 0 if there is none."""
        (largest,) = self._database.one("SELECT MAX(sequence) FROM trajectory_rows WHERE sender = ?", sender)
        return 0 if largest is None else int(largest) + 1

    def stored_sequences(self, sender: int, first: int, count: int) -> dict[int, tuple[int, int]]:
        """Return (prompt, dedup_hash) of the stored rows of a sender with these sequence numbers, by number."""
        self.flush()
        query = "SELECT sequence, prompt, dedup_hash FROM trajectory_rows WHERE sender = ? AND sequence BETWEEN ? AND ?"
        rows = self._database.all(query, sender, first, first + count - 1)
        return {sequence: (prompt, dedup_hash) for sequence, prompt, dedup_hash in rows}

    def unknown(self, trajectories: Sequence[int]) -> list[int]:
        """Return which of these ids no trajectory has."""
        self.flush()
        query = """SELECT asked.value FROM json_each(?) asked
                   WHERE NOT EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.id = asked.value)"""
        return [id_ for (id_,) in self._database.all(query, json.dumps(list(trajectories)))]

    def sizes(self, trajectories: Sequence[int]) -> dict[int, tuple[int, int, int]]:
        """Return how many bytes each trajectory takes at most in the header of a batch, and of prompt and response ids.

        A reward part is at most twice as long in msgpack as in JSON. A row has a dozen numbers, and turns' rewards.
        """
        self.flush()
        query = """SELECT t.id, p.key, t.reward_parts, IIF(json_valid(t.turns), json_array_length(t.turns), 0),
                   4 * t.prompt_tokens, 4 * t.response_tokens FROM json_each(?) asked
                   CROSS JOIN trajectory_rows t ON t.id = asked.value JOIN prompts p ON p.id = t.prompt"""
        rows = self._database.all(query, json.dumps(list(set(trajectories))))
        return {
            id_: (_NUMBER_BYTES + _TURN_BYTES * turns + len(key.encode()) + 2 * len(parts.encode()), prompt, response)
            for id_, key, parts, turns, prompt, response in rows
        }

    def blocks(self, run: Run) -> Iterator[tuple[tuple[int, int | None, int | None], tuple[Sequence[Any], ...]]]:
        """Yield ((prompt, guided, phase), columns) of all trajectories that may be sampled, oldest first.

        The columns are id, the version that the staleness counts from, reward, dedup_hash, trained, payload_bytes: at
        most `_BLOCK_ROWS` rows.
        """
        query = f"""
        SELECT t.prompt, json_extract(t.sampling, '$.guided'), json_extract(t.sampling, '$.phase'), t.id,
               CASE WHEN {EXPLORED} AND json_type(t.metadata, '$.newest_version') = 'integer'
                   THEN json_extract(t.metadata, '$.newest_version') ELSE t.policy_version END, t.reward, t.dedup_hash,
               EXISTS (SELECT 1 FROM consumption_rows c WHERE c.trajectory = t.id), t.payload_bytes
        FROM trajectory_rows t WHERE t.run = ? AND t.error IS NULL AND t.compacted_at IS NULL ORDER BY t.id"""  # noqa: S608
        for parts, all_rows in groupby(self._database.each(query, run.id), itemgetter(0, 1, 2)):
            while rows := list(islice(all_rows, _BLOCK_ROWS)):
                _, _, _, *columns = zip(*rows, strict=True)
                yield parts, tuple(columns)

    def answers(self, run: Run) -> Iterator[tuple[int, int, float, int | None]]:
        """Yield (prompt, policy_version, reward, guided) of all trajectories without an error, oldest first."""
        query = """SELECT prompt, policy_version, reward, json_extract(sampling, '$.guided') FROM trajectory_rows
            WHERE run = ? AND error IS NULL ORDER BY id"""
        return self._database.each(query, run.id)

    def newest_lengths(self, prompts: Sequence[int]) -> dict[int, float]:
        """Return the mean tokens of the newest `_NEWEST` responses of the run's policies to each prompt with any."""
        self.flush()
        query = """SELECT asked.value, (SELECT AVG(tokens) FROM (SELECT response_tokens AS tokens FROM trajectory_rows
            WHERE prompt = asked.value AND policy_version >= 0 AND response_tokens > 0
            ORDER BY policy_version DESC, id DESC LIMIT ?)) FROM json_each(?) asked"""
        rows = self._database.all(query, _NEWEST, json.dumps(list(prompts)))
        return {prompt: mean for prompt, mean in rows if mean is not None}

    def counts(self, run: Run) -> tuple[int, int]:
        """Return (number of trajectories that were ever stored, number of those there with an error)."""
        query = """SELECT COUNT(*) + (SELECT pruned FROM runs WHERE id = ?), COUNT(error)
            FROM trajectory_rows WHERE run = ?"""
        return self._database.one(query, run.id, run.id)

    def payloads(self, trajectories: Sequence[int]) -> list[list[bytes]]:
        """Return the blobs of each trajectory in order, one per array kind. Raises Refused if one was compacted."""
        self.flush()
        wanted = list(dict.fromkeys(trajectories))
        found = {id_: blobs for id_, *blobs in self._database.all(_SELECT_PAYLOADS, json.dumps(wanted))}
        if missing := [id_ for id_ in wanted if id_ not in found]:
            # Only offline: there the tokens of these rows count as present. A server waits for no other machine.
            archived = self._database.all(_SELECT_ARCHIVED, json.dumps(missing))
            found |= {id_: list(self._archives.read(id_, url).payload) for id_, url in archived}
        if len(found) < len(wanted):
            gone = quantity(len(wanted) - len(found), "trajectory", "trajectories")
            raise Refused(
                "compacted",
                f"the tokens of {gone} of this batch were dropped by `tba buffer prune --tokens`, or moved by `tba "
                "buffer archive`, so it cannot be repeated: resume from a newer checkpoint",
            )
        return [found[id_] for id_ in trajectories]

    def payload_sizes(self, run: Run) -> dict[int, int]:
        """Return the bytes of the payload of each trajectory that has one."""
        tables = "FROM payloads y JOIN trajectory_rows t ON t.id = y.trajectory"
        return dict(self._database.all(f"SELECT t.id, t.payload_bytes {tables} WHERE t.run = ?", run.id))

    def drop_payloads(self, trajectories: Sequence[int], now: float) -> None:
        """Delete payloads and what else is stored of their tokens, and set `compacted_at` of their trajectories."""
        ids = [(id_,) for id_ in trajectories]
        for table in ("payloads", "kept_tokens"):
            self._database.execute_many(f"DELETE FROM {table} WHERE trajectory = ?", ids)  # noqa: S608
        dropped = [(now, id_) for id_ in trajectories]
        self._database.execute_many("UPDATE trajectory_rows SET compacted_at = ? WHERE id = ?", dropped)
        self._database.execute_many("UPDATE consumption_rows SET token_log_ratios = NULL WHERE trajectory = ?", ids)
        self._database.execute_many("UPDATE rescored_logprobs SET logprobs = NULL WHERE trajectory = ?", ids)

    def with_payload(self, after: int, count: int) -> list[int]:
        """Return the next ids of trajectories with a payload, of all runs, oldest first."""
        query = "SELECT trajectory FROM payloads WHERE trajectory > ? ORDER BY trajectory LIMIT ?"
        return [id_ for (id_,) in self._database.all(query, after, count)]

    def old(self, run: Run, trajectories: Sequence[int], since_step: int) -> list[int]:
        """Return those of a run with a payload, whose batches are all trained and before `since_step`."""
        return [id_ for (id_,) in self._database.all(_SELECT_OLD, json.dumps(trajectories), run.id, since_step)]

    def archive(self, run: Run, file: Archive, ids: Sequence[int], now: float) -> None:
        """Record a file, and drop the payloads that it has of these trajectories."""
        self._database.execute(
            "INSERT INTO archives (run, url, archived_at, complete) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (url) DO UPDATE SET complete = excluded.complete",
            (run.id, file.url, now, file.complete),
        )
        self.drop_payloads(ids, now)
        self._database.execute_many(
            "UPDATE trajectory_rows SET archive = (SELECT id FROM archives WHERE url = ?) WHERE id = ?",
            [(file.url, id_) for id_ in ids],
        )

    def rolled_back(self) -> None:
        """Forget the rows and ids of a transaction that was rolled back."""
        self._forget_new()
        self._next_id = None
