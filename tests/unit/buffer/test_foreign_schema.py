"""A database that someone has changed: nothing of it runs, and the sentence names what is foreign."""

import sqlite3
from contextlib import closing

import pytest

from tba.buffer.store.schema import create
from tba.buffer.store.store import Store
from tba.common.errors import StorageError
from tba.tests.helpers.buffer import ask, change

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
CHANGES = {
    "has the trigger t,": """CREATE TRIGGER t AFTER INSERT ON starts BEGIN DELETE FROM trajectory_rows; END""",
    "has the view v,": f"CREATE VIEW v AS {ENDLESS} i FROM n",
    "has the table t,": "CREATE TABLE t (x)",
    "has the table _litestream_lock,": "CREATE TABLE _litestream_lock (id INTEGER CHECK (abs(id) > 0))",
    "has the index i,": "CREATE INDEX i ON runs (json_set('{}', '$.' || name, 1))",
    "lacks the index visits_open:": "DROP INDEX visits_open",
    "declares the view groups in": f"DROP VIEW groups; CREATE VIEW groups AS {ENDLESS} MAX(i) AS run FROM n",
    "has the view batches,": f"DROP TABLE batches; CREATE VIEW batches AS {ENDLESS} i AS id FROM n",
    "declares the table trajectory_rows in": """PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql =
        replace(sql, ' STRICT', '') WHERE name = 'trajectory_rows'""",
}


@pytest.mark.parametrize(("words", "sql"), CHANGES.items(), ids=CHANGES)
def test_a_database_with_another_schema_is_refused_by_readers_and_writers(filled, tba_buffer, words, sql):
    change(filled, sql)
    before = filled.read_bytes()
    with pytest.raises(StorageError, match=words):
        Store(filled, durability="process")
    done = tba_buffer("check", "-b", filled)
    assert (done.exit_code, words in done.message) == (1, True), done.message
    assert filled.read_bytes() == before


def test_no_command_reads_an_endless_view_of_a_database(filled, tba_buffer):
    change(filled, CHANGES["has the view batches,"])
    for command in (("stats",), ("show", 5), ("export", "x.jsonl"), ("query", "SELECT 1"), ("backup", "x"), ("serve",)):
        done = tba_buffer(*command, "-b", filled)
        assert "has the view batches, which tba does not make" in done.message, command


def test_statistics_of_analyze_and_the_tables_of_litestream_are_no_change_of_the_schema(filled, tba_buffer):
    change(filled, "ANALYZE")
    change(filled, "CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER)")
    change(filled, "CREATE TABLE _litestream_lock (id INTEGER)")
    Store(filled, durability="process").close()
    assert tba_buffer("check", "-b", filled).exit_code == 0


def test_a_database_whose_making_was_interrupted_is_made_to_the_end(tmp_path):
    """The tables are made in one transaction, so an interrupted first start leaves a file without any."""
    path = tmp_path / "new.sqlite"
    change(path, "PRAGMA page_size = 8192; PRAGMA journal_mode = WAL; PRAGMA user_version = 7")
    Store(path, durability="process").close()
    assert ask(path, "SELECT COUNT(*) FROM runs") == [(0,)]


def test_the_tables_of_a_new_database_are_made_in_one_transaction():
    statements: list[str] = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.set_trace_callback(statements.append)
        create(connection)
        create(connection)
    first_words = [sql.split()[0] for sql in statements]
    assert (first_words[0], first_words.count("BEGIN")) == ("BEGIN", 2)
    assert "CREATE" not in first_words[first_words.index("COMMIT") :]
