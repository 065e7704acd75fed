"""Migration 0002: foreign keys, NOT NULL and STRICT in the database of the release before."""

import contextlib
import sqlite3
from pathlib import Path

import msgpack
import pytest
from sqlite_utils import Database

from tba.buffer.store.schema import migrations
from tba.buffer.store.store import Store
from tba.buffer.tools.check import check
from tba.common.errors import WireError
from tba.common.wire import fields, messages
from tba.common.wire.codec import decode_request, encode_request
from tba.tests.conftest import ROOT

ROWS = """
INSERT INTO runs VALUES (3, 'u', 'demo', 1.0, 0, 't', 'f', 2, NULL);
INSERT INTO starts VALUES (1, 3, 1.0, '{}', '{}');
INSERT INTO senders VALUES (5, 3, 's.1', 'searcher', 'h', 7);
INSERT INTO prompts VALUES (4, 3, 0, 'p0'), (6, 3, 1, 'p1');
INSERT INTO visits VALUES (8, 3, 0, 0, 6, 's.1', 1.0, 2.0), (9, 3, 0, 1, 4, 'forgotten.1', 1.0, NULL);
INSERT INTO trajectory_rows VALUES
    (11, 3, 6, 8, 5, 0, 0, 0.5, '{}', 'eos', 1, 1, 12, '{"temperature":1.0,"top_p":1.0}', 1.0, 2.0, 0.1, 'a', NULL,
     '{}', 20, NULL),
    (12, 3, 4, 0, 5, 1, 0, 0.7, '{}', 'eos', 1, 1, 13, '{"temperature":1.0,"top_p":1.0}', 1.0, 2.0, 0.1, 'b', NULL,
     '{}', 20, NULL),
    (13, 3, 4, 99, 5, 2, 0, 0.7, '{}', 'eos', 1, 1, 14, '{"temperature":1.0,"top_p":1.0}', 1.0, 2.0, 0.1, 'c', NULL,
     '{}', 20, 5.0);
INSERT INTO payloads VALUES (11, x'00000000', x'00000000', x'00000000', x'0000000001000000', x''),
    (12, x'00000000', x'00000000', x'00000000', x'0000000001000000', x'');
INSERT INTO snapshots VALUES (3, 0, 0, '/v0', 'm', 1, 1.0, NULL);
INSERT INTO batches VALUES (3, 0, 2, 1, 3.0, 4.0, '{"loss": 1.5}', 12, 2, 1, 0);
INSERT INTO consumption_rows VALUES (3, 0, 0, 12, 0), (3, 0, 1, 11, 0);
INSERT INTO reference_logprobs VALUES (11, 'initial', -1.0);
"""
TABLES = {
    "runs": set(),
    "starts": {"runs"},
    "senders": {"runs"},
    "prompts": {"runs"},
    "visits": {"runs", "prompts", "senders"},
    "trajectory_rows": {"runs", "prompts", "visits", "senders"},
    "payloads": {"trajectory_rows"},
    "snapshots": {"runs"},
    "batches": {"runs"},
    "consumption_rows": {"batches", "trajectory_rows"},
    "reference_logprobs": {"trajectory_rows"},
}


@pytest.fixture
def old_file(tmp_path) -> Path:
    """A database that the release with migration 0001 has written."""
    path = tmp_path / "old.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript((ROOT / "tests/data/schema_0001.sql").read_text() + ROWS)
        db = Database(connection)
        migrations.ensure_migrations_table(db)
        record = {"migration_set": "tba", "name": "0001_initial", "applied_at": "2026-01-01"}
        db.table("_sqlite_migrations").insert(record)
        connection.commit()
    return path


@pytest.fixture
def migrated(old_file):
    Store(old_file, durability="process").close()
    with contextlib.closing(sqlite3.connect(old_file)) as connection:
        yield connection


def test_a_migrated_file_passes_every_check(migrated, old_file):
    assert {finding["result"] for finding in check(old_file)} == {"ok"}


def test_ids_and_contents_stay(migrated):
    assert migrated.execute("SELECT id, run, prompt, visit, text FROM trajectory_rows").fetchall() == [
        (11, 3, 6, 8, "a"),
        (12, 3, 4, None, "b"),
        # Its visit was of a newer copy of the file.
        (13, 3, 4, None, "c"),
    ]
    assert migrated.execute("SELECT id, key, text FROM prompts").fetchall() == [(4, "p0", None), (6, "p1", None)]
    # A lease of a sender that is not in the table belongs to none, and is handed out again.
    assert migrated.execute("SELECT id, sender FROM visits").fetchall() == [(8, 5), (9, None)]
    assert migrated.execute("SELECT step, slot, trajectory FROM consumption").fetchall() == [(0, 0, 12), (0, 1, 11)]
    assert migrated.execute("SELECT trajectory, trained_at FROM consumption").fetchone() == (12, 4.0)
    assert migrated.execute("SELECT visit, mean_reward FROM groups").fetchall() == [(8, 0.5), (9, None), (None, 0.7)]


def test_a_migrated_file_has_the_schema_of_a_new_one(migrated, tmp_path):
    def schema(connection: sqlite3.Connection) -> set[tuple[str, str]]:
        return set(connection.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%sqlite_migrations%'"))

    Store(tmp_path / "new.sqlite", durability="process").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "new.sqlite")) as new:
        assert schema(migrated) == schema(new)


def test_a_failed_migration_leaves_the_old_file_as_it_was(old_file):
    with contextlib.closing(sqlite3.connect(old_file)) as connection:
        connection.execute("UPDATE batches SET prompts = NULL")
        connection.commit()
        before = list(connection.iterdump())
    with pytest.raises(sqlite3.IntegrityError, match="prompts"):
        Store(old_file, durability="process")
    with contextlib.closing(sqlite3.connect(old_file)) as connection:
        assert list(connection.iterdump()) == before


def test_every_reference_is_a_foreign_key_of_one_column(migrated):
    keys = {table: migrated.execute(f"PRAGMA foreign_key_list({table})").fetchall() for table in TABLES}
    assert {table: {key[2] for key in keys[table]} for table in TABLES} == TABLES
    # Datasette follows only those to the id of a table.
    assert {(key[1], key[4]) for table in TABLES for key in keys[table]} <= {(0, "id")}


def test_every_table_is_strict(migrated):
    tables = {row[1]: row[5] for row in migrated.execute("PRAGMA table_list") if row[2] == "table"}
    assert {name: tables[name] for name in TABLES} == dict.fromkeys(TABLES, 1)


def test_a_lease_and_a_put_that_refer_to_nothing_known_violate_no_foreign_key(harness, trajectory):
    buffer = harness()
    buffer.register(2)
    buffer.announce(0, 0)
    buffer.lease(1, sender="never.said.hello")
    buffer.put([trajectory("p1", lease=77, tokens=[1])], 0)
    assert buffer.store.database.all("PRAGMA foreign_key_check") == []
    assert buffer.store.database.all("SELECT visit FROM trajectory_rows") == [(None,)]


# ---------------------------------------------------------------- the text of prompts


def test_text_and_answer_of_a_prompt_are_stored_once_and_shown_with_each_trajectory(harness, trajectory, tba_buffer):
    buffer = harness()
    known = {"texts": ["What is 1+1?", None], "answers": ["2", None]}
    buffer.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=2, offset=0, keys=["p0", "p1"], **known))
    buffer.announce(0, 0)
    buffer.put([trajectory("p0", lease=0, tokens=[1]), trajectory("p1", lease=0, tokens=[2])], 0)
    buffer.store.close()
    path = buffer.store.path
    sql = "SELECT prompt, prompt_text, answer FROM trajectories ORDER BY id"
    found = tba_buffer("query", "-b", path, sql, "--json").json
    assert [tuple(row.values()) for row in found] == [("p0", "What is 1+1?", "2"), ("p1", None, None)]
    assert "prompt:\nWhat is 1+1?\n" in tba_buffer("show", 1, "-b", path).output
    assert "prompt:\ntoken ids [1, 2]\n" in tba_buffer("show", 2, "-b", path).output


def test_an_imported_prompt_gets_the_text_of_the_task(harness):
    buffer = harness()
    buffer.store.prompts.add_imported(buffer.run, ["p0"])
    buffer.store.prompts.add(buffer.run, 0, ["p0"], ["text"])
    assert buffer.store.database.all("SELECT position, text FROM prompts") == [(0, "text")]


@pytest.mark.parametrize("column", ["texts", "answers"])
@pytest.mark.parametrize("texts", [["one"], ["x" * (fields.MAX_PROMPT_TEXT + 1), None]])
def test_texts_have_a_limit_and_are_as_many_as_the_keys(texts, column):
    message = messages.RegisterPrompts(
        task="t", fingerprint="0" * 64, total=2, offset=0, keys=["p0", "p1"], texts=["one", "two"]
    )
    header = msgpack.unpackb(encode_request(message, id=1, role="searcher", sender="s.1", run="")[0])
    header["body"][column] = texts
    with pytest.raises(WireError):
        decode_request([memoryview(msgpack.packb(header))])
