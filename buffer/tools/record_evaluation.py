"""Store an evaluation, through the server that has the database open or else in the file; and read what is wrong."""

from contextlib import closing
from pathlib import Path
from typing import Any

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.common.config import Config
from tba.common.errors import BufferFault, LockTaken, TbaError, UsageError
from tba.common.evaluations import Row, as_message
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import Done

_REPLY_SECONDS = 5.0
_WRONG = """SELECT version, prompt_text AS prompt, answer, response, reward, error FROM held_out h
    WHERE evaluation = (SELECT evaluation FROM held_out WHERE run = ? ORDER BY step DESC, evaluated_at DESC LIMIT 1)
    AND NOT passed ORDER BY h.prompt"""
_STORED = "SELECT 1 FROM held_out WHERE run = ? LIMIT 1"


def record_evaluation(config: Config, row: Row) -> str:
    """Store an evaluation of a run. Returns "", or a sentence that says why it is not in the database."""
    if not config.database.is_file():
        return _send(config, row)
    try:
        store = Store(config.database, durability=config.buffer.durability)
    except LockTaken:
        return _send(config, row)
    except TbaError as error:
        return f"not in the database: {error}"
    with closing(store):
        run: Run | None = next((run for run in store.runs.all() if run.name == row["run"]), None)
        if run is None:
            return f"not in the database: {config.database} has no run {row['run']}"
        with store.transaction():
            store.evaluations.put(run, as_message(row))
    return ""


def read_wrong(path: Path, run: str) -> list[dict[str, Any]]:
    """Return what the evaluation of the newest step got wrong. Raises UsageError if there is none, or StorageError."""
    with open_reader(path) as connection:
        if connection.execute(_STORED, (run,)).fetchone() is None:
            raise UsageError(f"{path} has no responses to held-out prompts of run {run}: evaluate it with `tba eval`")
        return read_maps(connection, _WRONG, run)


def _send(config: Config, row: Row) -> str:
    if row["run"] != config.run.name:
        return f"not in the database: it is of run {row['run']}, the configuration of {config.run.name}"
    try:
        keys = buffer_client_keys(config.security.keys, config.address)
        with closing(BufferClient(config.address, role="evaluator", name="eval", keys=keys)) as client:
            client.call(as_message(row), Done, deadline_seconds=_REPLY_SECONDS)
    except BufferFault as error:
        return f"not in the database: {error}"
    return ""
