"""The table `runs`: what a run is, what it works on, and whether it is finished; and `starts`, who served it when."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from tba.buffer.database import DatabaseFile


@dataclass(frozen=True, slots=True)
class Run:
    """The run that this server serves."""

    id: int
    uuid: str
    name: str
    seed: int


class Runs:
    """The runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def open(self, name: str, *, seed: int, config: dict[str, Any], software: dict[str, str], now: float) -> Run:
        """The run of this name, made if it is not there; and a record of this start."""
        self._database.execute(
            "INSERT INTO runs (uuid, name, created_at, seed) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING",
            (uuid.uuid4().hex, name, now, seed),
        )
        run = Run(*self._database.one("SELECT id, uuid, name, seed FROM runs WHERE name = ?", name))
        self._database.execute(
            "INSERT INTO starts (run, started_at, config, software) VALUES (?, ?, ?, ?)",
            (run.id, now, json.dumps(config), json.dumps(software)),
        )
        return run

    def all(self) -> list[Run]:
        """All runs in the file."""
        return [Run(*row) for row in self._database.all("SELECT id, uuid, name, seed FROM runs ORDER BY id")]

    def task(self, run: Run) -> tuple[str | None, str | None, int]:
        """(task, fingerprint, number of prompts) of a run; None before the first registration."""
        task, fingerprint, prompts = self._database.one(
            "SELECT task, fingerprint, prompts FROM runs WHERE id = ?", run.id
        )
        return task, fingerprint, prompts or 0

    def register_task(self, run: Run, task: str, fingerprint: str, prompts: int) -> None:
        """Say what the run's prompts are."""
        self._database.execute(
            "UPDATE runs SET task = ?, fingerprint = ?, prompts = ? WHERE id = ?", (task, fingerprint, prompts, run.id)
        )

    def finish(self, run: Run, step: int | None) -> None:
        """The trainer made its last step, or (None) goes on after it had."""
        self._database.execute("UPDATE runs SET finished_step = ? WHERE id = ?", (step, run.id))

    def finished_step(self, run: Run) -> int | None:
        """The last step, if the trainer is done."""
        step: int | None = self._database.one("SELECT finished_step FROM runs WHERE id = ?", run.id)[0]
        return step
