"""The table `curriculum_rows`: the prompts that an epoch skips or postpones."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from tba.buffer.store.database import Table
from tba.buffer.store.tables.runs import Run


class Decision(NamedTuple):
    """What an epoch does with a prompt, because `passed` of its newest `answers` answers passed."""

    prompt: int
    decision: Literal["skipped", "postponed"]
    passed: int
    answers: int


class CurriculumRows(Table):
    """The decisions of the runs of a database."""

    def add(self, run: Run, epoch: int, decisions: Sequence[Decision]) -> None:
        """Record the decisions for an epoch. Call it in the transaction that opens its first visit."""
        # In the order of the key: each row is then appended to the table.
        self._database.execute_many(
            "INSERT INTO curriculum_rows (run, epoch, prompt, decision, passed, answers) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (run.id, epoch, one.prompt, one.decision, one.passed, one.answers)
                for one in sorted(decisions, key=attrgetter("prompt"))
            ],
        )

    def of(self, run: Run, epoch: int) -> list[Decision]:
        """Return the decisions for an epoch."""
        rows = self._database.all(
            "SELECT prompt, decision, passed, answers FROM curriculum_rows WHERE run = ? AND epoch = ?", run.id, epoch
        )
        return [Decision(*row) for row in rows]
