"""The tables of a run as a whole.

`runs` (identity, task and state), `starts` (configuration of each start), `senders`, `snapshots`, and evaluations on
held-out prompts (`evaluation_rows`, `held_out_rows`).
"""

import json
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from tba.buffer.store.database import Table
from tba.common.wire.messages import AnnounceSnapshot, PutEvaluation, WeightsRef

# What an evaluation is of, with its run, and what it measured.
_OF_KEY = ("version", "prompt_set", "settings")
_MEASURED = ("step", "prompts", "evaluated_at", "seconds", "metrics", "intervals", "not_measured")
_PUT_EVALUATION = f"""
INSERT INTO evaluation_rows ({", ".join(("run", *_OF_KEY, *_MEASURED))}) VALUES ({", ".join("?" * 11)})
ON CONFLICT (run, {", ".join(_OF_KEY)}) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _MEASURED)}
WHERE excluded.not_measured IS NULL OR evaluation_rows.not_measured IS NOT NULL RETURNING id
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Run:
    id: int
    uuid: str
    name: str
    seed: int


class Task(NamedTuple):
    """What a run works on: no name before the first registration, and the number of prompts."""

    name: str | None
    fingerprint: str | None
    prompts: int


class Runs(Table):
    def open(self, name: str, seed: int, now: float, start: tuple[str, str, str | None]) -> Run:
        """Return the run of this name, created if it does not exist, and record a start: config, software, origins."""
        self._database.execute(
            "INSERT INTO runs (uuid, name, created_at, seed) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING",
            (uuid.uuid4().hex, name, now, seed),
        )
        run = Run(*self._database.one("SELECT id, uuid, name, seed FROM runs WHERE name = ?", name))
        self._database.execute(
            "INSERT INTO starts (run, started_at, config, software, origins) VALUES (?, ?, ?, ?, ?)",
            (run.id, now, *start),
        )
        return run

    def all(self) -> list[Run]:
        return [Run(*row) for row in self._database.all("SELECT id, uuid, name, seed FROM runs ORDER BY id")]

    def task(self, run: Run) -> Task:
        query = "SELECT task, fingerprint, COALESCE(prompts, 0) FROM runs WHERE id = ?"
        return Task(*self._database.one(query, run.id))

    def register_task(self, run: Run, task: Task) -> None:
        self._database.execute("UPDATE runs SET task = ?, fingerprint = ?, prompts = ? WHERE id = ?", (*task, run.id))

    def finish(self, run: Run, step: int | None) -> None:
        """Set the last step of a finished run. None marks it as unfinished, when training continues."""
        self._database.execute("UPDATE runs SET finished_step = ? WHERE id = ?", (step, run.id))

    def finished_step(self, run: Run) -> int | None:
        step: int | None = self._database.one("SELECT finished_step FROM runs WHERE id = ?", run.id)[0]
        return step


class Senders(Table):
    def number(self, run: Run, sender: str, role: str) -> int:
        """Return the id of a sender, inserted if it is new."""
        self._database.execute(
            "INSERT INTO senders (run, sender, role) VALUES (?, ?, ?) ON CONFLICT (sender) DO NOTHING",
            (run.id, sender, role),
        )
        return int(self._database.one("SELECT id FROM senders WHERE sender = ?", sender)[0])

    def describe(self, sender: str, host: str, pid: int) -> None:
        self._database.execute("UPDATE senders SET host = ?, pid = ? WHERE sender = ?", (host, pid, sender))

    def trainers(self, run: Run) -> list[tuple[str, str]]:
        """Return (sender, host) of the trainers that were admitted, oldest first."""
        query = "SELECT sender, COALESCE(host, '') FROM senders WHERE run = ? AND role = 'trainer' ORDER BY id"
        return self._database.all(query, run.id)


class Snapshots(Table):
    def add(self, run: Run, message: AnnounceSnapshot, now: float) -> None:
        """Record an announced snapshot. A version that exists is not changed."""
        ref = message.weights
        self._database.execute(
            "INSERT INTO snapshots (run, version, step, path, manifest_sha256, bytes, announced_at, address) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (run.id, ref.version, ref.step, ref.path, ref.manifest_sha256, message.bytes, now, ref.address or None),
        )

    def all(self, run: Run) -> list[WeightsRef]:
        """Return all announced snapshots, oldest first."""
        rows = self._database.all(
            "SELECT version, step, path, manifest_sha256, coalesce(address, '') FROM snapshots WHERE run = ? "
            "ORDER BY version",
            run.id,
        )
        return [WeightsRef(version=v, step=s, path=p, manifest_sha256=h, address=a) for v, s, p, h, a in rows]


class Evaluations(Table):
    def put(self, run: Run, message: PutEvaluation) -> None:
        """Store an evaluation in place of one of the same key, unless it measured nothing and that one did."""
        row = {name: getattr(message, name) for name in (*_OF_KEY, *_MEASURED)}
        row |= {name: json.dumps(row[name]) for name in ("metrics", "intervals")}
        row["not_measured"] = message.not_measured or None
        for (evaluation,) in self._database.all(_PUT_EVALUATION, run.id, *row.values()):
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
