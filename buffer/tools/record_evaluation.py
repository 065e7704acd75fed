"""Store an evaluation: through the server that has the database open, or else in the file."""

from contextlib import closing

from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.common.config import Config
from tba.common.errors import BufferFault, LockTaken, TbaError
from tba.common.evaluations import Row, as_message
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.messages import Done

_REPLY_SECONDS = 5.0


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
        store.log.sync()
        store.log.checkpoint()
    return ""


def _send(config: Config, row: Row) -> str:
    if row["run"] != config.run.name:
        return f"not in the database: it is of run {row['run']}, the configuration of {config.run.name}"
    try:
        keys = buffer_client_keys(config.security, config.address)
        with closing(BufferClient(config.address, role="evaluator", name="eval", keys=keys)) as client:
            client.call(as_message(row), Done, deadline_seconds=_REPLY_SECONDS)
    except BufferFault as error:
        return f"not in the database: {error}"
    return ""
