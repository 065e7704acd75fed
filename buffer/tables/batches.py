"""The tables `batches` and `consumption_rows`: which step trains, or has trained, on which trajectories."""

import json
from collections.abc import Sequence
from typing import Any

from tba.buffer.database import DatabaseFile
from tba.buffer.index import Entry
from tba.buffer.tables.runs import Run
from tba.buffer.tables.trajectories import Trajectories
from tba.common.wire import ReportStep

_CONSUMPTION_COLUMNS = ("run", "step", "slot", "trajectory", "staleness")
_BATCH_COLUMNS = (
    "id",
    "prompt_key",
    "reward",
    "reward_parts",
    "policy_version",
    "staleness",
    "plain_sampling",
    "reference_logprob",
)
_SELECT_BATCH = """
SELECT t.id, p.key, t.reward, t.reward_parts, t.policy_version, c.staleness,
       t.policy_version >= 0 AND json_extract(t.sampling, '$.temperature') = 1
           AND json_extract(t.sampling, '$.top_p') = 1,
       r.logprob
FROM consumption_rows c
JOIN trajectory_rows t ON t.id = c.trajectory
JOIN prompts p ON p.id = t.prompt
LEFT JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = ?
WHERE c.run = ? AND c.step = ?
ORDER BY c.slot
"""


class Batches:
    """The batches of the runs of a database."""

    def __init__(self, database: DatabaseFile, trajectories: Trajectories) -> None:
        self._database = database
        self._trajectories = trajectories

    def has(self, run: Run, step: int) -> bool:
        """Whether the batch of a step is recorded."""
        return bool(self._database.all("SELECT 1 FROM batches WHERE run = ? AND step = ?", run.id, step))

    def record(self, run: Run, step: int, groups: Sequence[Sequence[Entry]], now: float, *, stale_from: int) -> None:
        """Record what a step trains on, before it is handed out. Staleness counts from the step `stale_from`."""
        self._trajectories.flush()
        self._database.execute(
            "INSERT INTO batches (run, step, prompts, samples, handed_out_at, newest_trajectory) "
            "VALUES (?, ?, ?, ?, ?, (SELECT MAX(id) FROM trajectory_rows))",
            (run.id, step, len(groups), len(groups[0]), now),
        )
        slots = [entry for group in groups for entry in group]
        count, ids = len(slots), [entry.id for entry in slots]
        staleness = [stale_from - entry.step for entry in slots]
        columns = ([run.id] * count, [step] * count, range(count), ids, staleness)
        self._database.insert("OR ROLLBACK", "consumption_rows", _CONSUMPTION_COLUMNS, columns)

    def rows(self, run: Run, step: int, reference: str) -> dict[str, list[Any]]:
        """The recorded batch of a step as columns, in slot order."""
        rows = self._database.all(_SELECT_BATCH, reference, run.id, step)
        return dict(zip(_BATCH_COLUMNS, map(list, zip(*rows, strict=True)), strict=True))

    def report(self, run: Run, message: ReportStep, now: float) -> None:
        """The optimiser step was made. A second report of a step changes nothing but the metrics."""
        self._database.execute(
            "UPDATE batches SET trained_at = COALESCE(trained_at, ?), metrics = ? WHERE run = ? AND step = ?",
            (now, json.dumps(message.metrics), run.id, message.step),
        )
        rows = [
            (trajectory, message.reference, logprob)
            for trajectory, logprob in zip(message.trajectory_ids, message.reference_logprobs, strict=True)
        ]
        self._trajectories.insert_references(rows)

    def steps_done(self, run: Run) -> int:
        """Optimiser steps that were reported."""
        query = "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ? AND trained_at IS NOT NULL"
        return int(self._database.one(query, run.id)[0])

    def recorded_steps(self, run: Run) -> int:
        """Steps whose batch is recorded, trained on or not."""
        return int(self._database.one("SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ?", run.id)[0])

    def consumed(self, run: Run) -> int:
        """Slots of all recorded batches."""
        return int(self._database.one("SELECT COUNT(*) FROM consumption_rows WHERE run = ?", run.id)[0])

    def losses(self, run: Run) -> dict[int, float]:
        """The loss of each step that was reported with one."""
        query = """SELECT step, json_extract(metrics, '$.loss') FROM batches
                   WHERE run = ? AND trained_at IS NOT NULL AND json_extract(metrics, '$.loss') IS NOT NULL"""
        return dict(self._database.all(query, run.id))

    def trajectories(self, run: Run, *, since_step: int) -> set[int]:
        """Trajectories of batches that are not trained on yet, and of those from a step on."""
        query = (
            "SELECT DISTINCT c.trajectory FROM batches b JOIN consumption_rows c ON c.run = b.run AND c.step = b.step"
            " WHERE b.run = ? AND (b.step >= ? OR b.trained_at IS NULL)"
        )
        return {row[0] for row in self._database.all(query, run.id, since_step)}
