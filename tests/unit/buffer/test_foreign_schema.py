"""A database that someone has changed: nothing of it runs, and the sentence names what is foreign."""

import shutil
import sqlite3
from contextlib import closing

import pytest

from tba.buffer.store.store import Store
from tba.common.errors import StorageError

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
CHANGES = {
    "has the trigger t,": """CREATE TRIGGER t AFTER INSERT ON starts BEGIN DELETE FROM trajectory_rows; END""",
    "has the view v,": f"CREATE VIEW v AS {ENDLESS} i FROM n",
    "has the table t,": "CREATE TABLE t (x)",
    "has the index i,": "CREATE INDEX i ON runs (json_set('{}', '$.' || name, 1))",
    "lacks the index visits_open:": "DROP INDEX visits_open",
    "declares the view groups in": f"DROP VIEW groups; CREATE VIEW groups AS {ENDLESS} MAX(i) AS run FROM n",
    "has the view batches,": f"DROP TABLE batches; CREATE VIEW batches AS {ENDLESS} i AS id FROM n",
    "has the table _sqlite_migrations,": """DROP TABLE _sqlite_migrations;
        CREATE TABLE _sqlite_migrations (id, migration_set AS ('tba'), name AS (hex(zeroblob(id))) , applied_at);
        INSERT INTO _sqlite_migrations (id) VALUES (1)""",
    "has the view _sqlite_migrations,": f"""DROP TABLE _sqlite_migrations;
        CREATE VIEW _sqlite_migrations AS {ENDLESS} 'tba' AS migration_set, '0001_initial' AS name FROM n""",
    "declares the table trajectory_rows in": """PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql =
        replace(sql, ' STRICT', '') WHERE name = 'trajectory_rows'""",
}
READERS = (
    ("stats",),
    ("show", "5"),
    ("check",),
    ("export", "OUT.jsonl"),
    ("query", "SELECT 1"),
    ("search", "word"),
    ("backup", "OUT.sqlite"),
    ("serve",),
)


@pytest.mark.parametrize(("words", "sql"), CHANGES.items(), ids=CHANGES)
def test_a_database_with_another_schema_is_refused_by_readers_and_writers(filled, tba_buffer, words, sql):
    with closing(sqlite3.connect(filled)) as connection:
        connection.executescript(sql)
    before = filled.read_bytes()
    with pytest.raises(StorageError, match=words):
        Store(filled, durability="process")
    done = tba_buffer("check", "-b", filled)
    assert (done.exit_code, words in done.message) == (1, True), done.message
    assert filled.read_bytes() == before


def test_no_command_reads_an_endless_view_of_a_database(filled, tba_buffer, tmp_path):
    with closing(sqlite3.connect(filled)) as connection:
        connection.executescript(CHANGES["has the view batches,"])
    for command in READERS:
        done = tba_buffer(*command, "-b", filled)
        assert "has the view batches, which tba does not make" in done.message, command
    done = tba_buffer("restore", filled, "--to", tmp_path / "other.sqlite")
    assert "has the view batches, which tba does not make" in done.message


def test_an_endless_view_in_the_place_of_a_restore_is_set_aside_unread(filled, tba_buffer, tmp_path):
    hostile = tmp_path / "hostile.sqlite"
    shutil.copy(filled, hostile)
    with closing(sqlite3.connect(hostile)) as connection:
        connection.executescript(f"DROP TABLE runs; CREATE VIEW runs AS {ENDLESS} i AS uuid, i AS name FROM n")
    done = tba_buffer("restore", filled, "--to", hostile)
    assert done.exit_code == 0, done.message
    assert hostile.read_bytes()[:16] == b"SQLite format 3\0"
    assert len(list(tmp_path.glob("hostile.sqlite.replaced-*Z"))) == 1


def test_statistics_of_analyze_are_no_change_of_the_schema(filled):
    with closing(sqlite3.connect(filled)) as connection:
        connection.executescript("ANALYZE")
    Store(filled, durability="process").close()


def test_a_database_whose_making_was_interrupted_is_made_to_the_end(filled, tmp_path):
    """Whichever statements of the first start were committed, the next start makes the rest."""
    with closing(sqlite3.connect(filled)) as connection:
        where = "name LIKE '%\\_sqlite\\_migrations%' ESCAPE '\\'"
        made = [sql for (sql,) in connection.execute(f"SELECT sql FROM sqlite_master WHERE {where}") if sql]
    assert made
    for count in range(len(made) + 1):
        path = tmp_path / f"{count}.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(";".join(made[:count]))
        Store(path, durability="process").close()
