"""The tables `batches`, `consumption_rows` and `reference_logprobs`: the trajectories of each training step."""

import json
from collections.abc import Sequence
from itertools import repeat
from typing import Any

from msgspec.structs import astuple

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.tables.runs import Run
from tba.buffer.store.tables.trajectories import Trajectories
from tba.buffer.store.views import EXPLORED
from tba.common.wire.messages import ReportStep

STEPS_DONE = "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ? AND trained_at IS NOT NULL"
SUMMARY = "trajectories, min_staleness, mean_staleness, max_staleness, mean_age_seconds, max_age_seconds, mean_reward"
_SUMMARISE = f"""
UPDATE batches SET ({SUMMARY}) =
    (SELECT COUNT(DISTINCT c.trajectory), MIN(c.staleness), AVG(c.staleness), MAX(c.staleness),
            AVG(handed_out_at - t.received_at), MAX(handed_out_at - t.received_at), AVG(t.reward)
     FROM consumption_rows c LEFT JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.batch = batches.id)
WHERE id = ?
"""  # noqa: S608
_CONSUMPTION_COLUMNS = ("batch", "slot", "trajectory", "staleness")
_SET_NUMBERS = """
UPDATE consumption_rows
SET (logprob, log_ratio, advantage, weight, mismatch, skipped, token_log_ratios) = (?, ?, ?, ?, ?, ?, ?)
WHERE batch = ? AND slot = ?
"""
_SELECT_BATCH = f"""
SELECT t.id, p.key AS prompt_key, t.reward, t.reward_parts, t.policy_version, c.staleness,
       json_extract(t.sampling, '$.temperature') AS temperature,
       json_extract(t.sampling, '$.top_p') IS NOT 1 OR json_extract(t.sampling, '$.top_k') IS NOT NULL
           OR json_extract(t.sampling, '$.min_p') IS NOT NULL AS is_cut,
       b.recency_window, b.recency_groups, b.recency_missed,
       {EXPLORED} AS explored, json_type(t.sampling, '$.guided') IS NOT NULL AS guided,
       r.logprob AS reference_logprob,
       (SELECT COUNT(*) FROM consumption_rows e WHERE e.trajectory = t.id AND e.batch < b.id) AS times_used,
       CASE WHEN t.turns = '[]' OR NOT json_valid(t.turns) THEN t.turns
           ELSE (SELECT json_group_array(json_extract(value, '$.reward')) FROM json_each(t.turns)) END AS turn_rewards
FROM batches b
JOIN consumption_rows c ON c.batch = b.id
JOIN trajectory_rows t ON t.id = c.trajectory
JOIN prompts p ON p.id = t.prompt
LEFT JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = ?
WHERE b.run = ? AND b.step = ?
ORDER BY c.slot
"""  # noqa: S608


class Batches:
    def __init__(self, database: DatabaseFile, trajectories: Trajectories) -> None:
        self._database = database
        self._trajectories = trajectories

    def has(self, run: Run, step: int) -> bool:
        return bool(self._database.all("SELECT 1 FROM batches WHERE run = ? AND step = ?", run.id, step))

    def response_tokens(self, run: Run, step: int) -> list[int]:
        """Return the number of response tokens of each slot of the recorded batch of a step."""
        query = """SELECT t.response_tokens FROM batches b JOIN consumption_rows c ON c.batch = b.id
                   JOIN trajectory_rows t ON t.id = c.trajectory WHERE b.run = ? AND b.step = ? ORDER BY c.slot"""
        return [tokens for (tokens,) in self._database.all(query, run.id, step)]

    def record(
        self,
        run: Run,
        step: int,
        *,
        trajectories: Sequence[int],
        staleness: Sequence[int],
        recency: tuple[int, int, int],
        prompts: int,
        now: float,
    ) -> None:
        """Record the batch of a step before it is handed out: trajectory ids, group by group, and their staleness.

        `recency` has the window in steps, the groups drawn by recency, and those without data in it.
        """
        self._trajectories.flush()
        cursor = self._database.execute(
            "INSERT INTO batches (run, step, prompts, samples, handed_out_at, newest_trajectory, recency_window, "
            "recency_groups, recency_missed) VALUES (?, ?, ?, ?, ?, (SELECT MAX(id) FROM trajectory_rows), ?, ?, ?)",
            (run.id, step, prompts, len(trajectories) // prompts, now, *recency),
        )
        count = len(trajectories)
        columns = ([cursor.lastrowid] * count, range(count), trajectories, staleness)
        self._database.insert("consumption_rows", _CONSUMPTION_COLUMNS, columns)
        self._database.execute(_SUMMARISE, (cursor.lastrowid,))

    def rows(self, run: Run, step: int, reference: str) -> dict[str, list[Any]]:
        """Return the recorded batch of a step as columns in slot order; `is_cut`: a part of the vocabulary was left."""
        cursor = self._database.execute(_SELECT_BATCH, (reference, run.id, step))
        columns = map(list, zip(*cursor, strict=True))
        return {name: column for (name, *_), column in zip(cursor.description, columns, strict=True)}

    def report(self, run: Run, message: ReportStep, now: float) -> None:
        """Record a trained step, the numbers of its rows, and reference log-probabilities that are not there yet."""
        self._database.execute(
            "UPDATE batches SET trained_at = COALESCE(trained_at, ?), metrics = ? WHERE run = ? AND step = ?",
            (now, json.dumps(message.metrics), run.id, message.step),
        )
        if message.rows is not None:
            (batch,) = self._database.one("SELECT id FROM batches WHERE run = ? AND step = ?", run.id, message.step)
            *columns, log_ratios = astuple(message.rows)
            count = len(message.rows.skipped)
            numbers = zip(*columns, log_ratios or [None] * count, repeat(batch), range(count), strict=False)
            self._database.execute_many(_SET_NUMBERS, list(numbers))
        rows = [
            (trajectory, message.reference, logprob)
            for trajectory, logprob in zip(message.trajectory_ids, message.reference_logprobs, strict=True)
        ]
        self._database.execute_many(
            "INSERT INTO reference_logprobs (trajectory, reference, logprob) VALUES (?, ?, ?) "
            "ON CONFLICT (trajectory, reference) DO NOTHING",
            rows,
        )

    def steps_done(self, run: Run) -> int:
        return int(self._database.one(STEPS_DONE, run.id)[0])

    def recorded_steps(self, run: Run) -> int:
        """Return the number of steps whose batch is recorded, trained or not."""
        return int(self._database.one("SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ?", run.id)[0])

    def consumed(self, run: Run) -> int:
        """Return the number of slots of all batches that were ever recorded."""
        slots = "SELECT COUNT(*) FROM batches b JOIN consumption_rows c ON c.batch = b.id WHERE b.run = r.id"
        query = f"SELECT ({slots}) + r.pruned_slots FROM runs r WHERE r.id = ?"  # noqa: S608
        return int(self._database.one(query, run.id)[0])
