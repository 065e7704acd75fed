"""A token store for NeMo Gym over a real buffer passes the conformance suite that NeMo Gym ships to other transports.

The suite needs `nemo-gym` 0.7, pydantic and orjson. The wheel names a newer Python than this package and has many
dependencies, of which the suite imports none; its folder is enough:

    pip download nemo-gym==0.7.0 --no-deps --python-version 3.14 --only-binary :all: && unzip nemo_gym-*.whl -d gym
    pip install orjson
    PYTHONPATH=gym python -m pytest tests/process/test_nemo_gym.py
"""

import asyncio

import pytest

from tba.common.wire.client import BufferClient, make_hello
from tba.common.wire.messages import PutAck, Welcome
from tba.tests.helpers.buffer import ask
from tba.tests.helpers.checks import PATIENCE_SECONDS
from tba.tests.helpers.puts import make_trajectory, put_message

pytest.importorskip("orjson", reason="NeMo Gym's conformance suite needs orjson")
gym = pytest.importorskip("nemo_gym.token_id_capture", reason="nemo-gym is not on the path")
conformance = pytest.importorskip("nemo_gym.token_id_capture.conformance")


def rows_of(database, rollout, after=0):
    """Return (id, text, error) of the rows of a rollout, in the order of their commits."""
    query = "SELECT id, text, error FROM trajectories WHERE prompt = ? AND id > ? ORDER BY id"
    return ask(database, query, rollout, after)


class BufferCapture:
    """A sink and source: a model call is a row of its rollout's prompt, and a lost or begun call is an error row.

    The buffer keeps log-probabilities in float32, so the exact entry is in the text of its row. There is no delete: a
    dropped snapshot stays. The version of a rollout is its number of rows, which any late write changes.
    """

    def __init__(self, run):
        self._database = run.database
        self._client = BufferClient(run.address, role="importer", name="gym")
        self._client.call(make_hello(), Welcome, deadline_seconds=PATIENCE_SECONDS)
        self._sequence = 0

    async def put(self, entry):
        text = entry.model_dump_json()
        known = {
            gym.TokenEntry.model_validate_json(row[1]).model_call_id: row[1] for row in self._entries(entry.rollout_id)
        }
        if entry.model_call_id not in known:
            tokens = {"prompt_ids": entry.prompt_token_ids, "tokens": entry.generation_token_ids}
            self._store(entry.rollout_id, **tokens, logprobs=entry.generation_log_probs, text=text)
        elif known[entry.model_call_id] != text:
            raise ValueError(f"call {entry.model_call_id} is stored with another content")

    async def begin_call(self, rollout, call):
        self._store(rollout, tokens=[], stop_reason="error", error="begun", text=call)

    async def mark_incomplete(self, rollout, call=""):
        self._store(rollout, tokens=[], stop_reason="error", error="lost", text=call)

    async def freeze(self, rollout):
        rows = rows_of(self._database, rollout)
        entries = [gym.TokenEntry.model_validate_json(row[1]) for row in self._entries(rollout)]
        unfinished = {text for _, text, error in rows if error == "begun"} - {entry.model_call_id for entry in entries}
        incomplete = bool(unfinished) or any(error == "lost" for *_, error in rows)
        return gym.TokenCaptureSnapshot(rollout, tuple(entries), incomplete, snapshot_id=rollout, version=len(rows))

    async def drop(self, rollout, *, snapshot_id, version):
        return (snapshot_id, version) == (rollout, len(rows_of(self._database, rollout)))

    async def close(self):
        self._client.close()

    def _entries(self, rollout):
        return [row for row in rows_of(self._database, rollout) if row[2] is None]

    def _store(self, rollout, **fields):
        message, frames = put_message([make_trajectory(rollout, 0, **fields)], self._sequence)
        self._sequence += 1
        # The acknowledgement follows the commit, so every reader of the database sees the row from here on.
        self._client.call(message, PutAck, frames=frames, deadline_seconds=PATIENCE_SECONDS)


# The package is not installed where types are checked.
class BufferLineage(gym.IncrementalLineageStore):  # type: ignore[misc, name-defined]
    """Gym's own matcher of continuations, over the rows of the buffer."""

    def __init__(self, run):
        super().__init__()
        self._database = run.database

    def _fetch_new_entries(self, rollout, cursor):
        rows = rows_of(self._database, rollout, after=cursor or 0)
        entries = [(gym.TokenEntry.model_validate_json(text), id_) for id_, text, error in rows if error is None]
        return entries, rows[-1][0] if rows else cursor

    def _load_entry(self, rollout, ref):
        return gym.TokenEntry.model_validate_json(rows_of(self._database, rollout, after=ref - 1)[0][1])


def test_a_token_store_over_the_buffer_passes_nemo_gyms_conformance_suite(start_tba, run_config):
    start_tba("buffer", "serve", "--config", run_config.file)
    stores = (lambda: BufferCapture(run_config), lambda: BufferCapture(run_config), lambda: BufferLineage(run_config))
    assert asyncio.run(conformance.run_conformance(*stores)) == [
        "put_then_freeze_visibility",
        "idempotent_reput",
        "conflicting_reput",
        "mark_incomplete_durability",
        "freeze_idempotency",
        "post_freeze_write_safety",
        "conditional_retirement",
        "lineage_visibility",
        "fresh_client_lineage_visibility",
        "begin_call_custody",
    ]
