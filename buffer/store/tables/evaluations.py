"""The table of evaluations of snapshots on held-out prompts."""

import json

from tba.buffer.store.database import Table
from tba.buffer.store.tables.runs import Run
from tba.common.wire.messages import PutEvaluation


class Evaluations(Table):
    """The evaluations of the runs of a database."""

    def put(self, run: Run, message: PutEvaluation) -> None:
        """Store an evaluation, in place of one of the same version, prompts and settings.

        One that measured nothing does not replace one that did.
        """
        stored = self._database.all(
            "INSERT INTO evaluation_rows (run, version, step, prompts, prompt_set, settings, evaluated_at, seconds, "
            "metrics, intervals, not_measured) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run, version, prompt_set, settings)"
            " DO UPDATE SET step = excluded.step, prompts = excluded.prompts, evaluated_at = excluded.evaluated_at,"
            " seconds = excluded.seconds, metrics = excluded.metrics, intervals = excluded.intervals,"
            " not_measured = excluded.not_measured"
            " WHERE excluded.not_measured IS NULL OR evaluation_rows.not_measured IS NOT NULL RETURNING id",
            run.id,
            message.version,
            message.step,
            message.prompts,
            message.prompt_set,
            message.settings,
            message.evaluated_at,
            message.seconds,
            json.dumps(message.metrics),
            json.dumps(message.intervals),
            message.not_measured or None,
        )
        for (evaluation,) in stored:
            self._database.execute("DELETE FROM held_out_rows WHERE evaluation = ?", (evaluation,))
            self._database.execute_many(
                "INSERT OR REPLACE INTO held_out_rows (evaluation, run, prompt, prompt_text, answer, response, reward, "
                "reward_parts, error) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (evaluation, run.id, one.prompt, one.prompt_text, one.answer, one.response, one.reward,
                     json.dumps(one.reward_parts), one.error)
                    for one in message.responses
                ],
            )  # fmt: skip
