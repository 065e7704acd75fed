"""The schema: the documentation describes all of it, views are fast on large tables, and another one is refused."""

import json
import re
import sqlite3
from contextlib import closing

import pytest

from tba.buffer.store.schema import create
from tba.buffer.store.store import Store
from tba.common.errors import StorageError
from tba.common.wire import messages
from tba.tests.conftest import ROOT
from tba.tests.helpers.buffer import ask, change

PAGE = (ROOT / "docs/database.md").read_text(encoding="utf-8")


def documented() -> dict[str, list[str]]:
    """The columns of each view, as docs/database.md names them."""
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    first_cells = {name: re.findall(r"^\| (`[^|]*`) \|", text, re.M) for name, text in sections}
    return {name: re.findall(r"`(\w+)`", " ".join(cells)) for name, cells in first_cells.items()}


def declared(buffer, kind: str) -> dict[str, list[str]]:
    """The columns of each view or table of a database."""
    query = """SELECT s.name, c.name FROM sqlite_master s JOIN pragma_table_info(s.name) c WHERE s.type = ?
        AND s.name NOT LIKE 'sqlite%'"""
    columns: dict[str, list[str]] = {}
    for name, column in buffer.store.database.all(query, kind):
        columns.setdefault(name, []).append(column)
    return columns


def test_every_column_of_a_view_is_documented_and_no_other(harness):
    views = declared(harness(), "view")
    assert {view: documented()[view] for view in views} == views


def test_every_column_of_a_table_is_documented(harness):
    for table, columns in declared(harness(), "table").items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{table}` |"))
        # A row may refer to the view with the same columns.
        of_views = {column for view in re.findall(r"view `(\w+)`", row) for column in documented()[view]}
        assert {*columns} <= {"id", "run", *re.findall(r"`(\w+)`", row)} | of_views, table


# These queries select few rows, so they must not scan large tables.
SMALL_QUERIES = [
    "SELECT * FROM trajectories WHERE id = 7",
    "SELECT * FROM trajectories WHERE id > 100 ORDER BY id LIMIT 10",
    "SELECT * FROM consumption WHERE trajectory = 7",
    "SELECT * FROM groups WHERE visit = 7",
    "SELECT * FROM clients WHERE id = 1",
    "SELECT * FROM turns WHERE trajectory = 7",
    "SELECT * FROM turns WHERE run = 'test'",
]


def plan_of(buffer, sql: str) -> list[str]:
    return [row[3] for row in buffer.store.database.all(f"EXPLAIN QUERY PLAN {sql}")]


@pytest.mark.parametrize("sql", SMALL_QUERIES)
def test_a_query_for_few_rows_scans_no_large_table(sql, harness):
    plan = plan_of(harness(), sql)
    assert not [line for line in plan if line.startswith("SCAN") and line.split()[1] in ("t", "c", "v")], plan
    assert not [line for line in plan if "TEMP B-TREE" in line and "DISTINCT" not in line], plan


def test_rewards_timestamps_and_episodes_are_indexed(harness):
    buffer = harness()
    for column in ("reward", "received_at"):
        (plan,) = plan_of(buffer, f"SELECT id FROM trajectory_rows WHERE run = 1 AND {column} > 0")
        assert "USING" in plan
        assert column in plan
    assert "SCAN t USING INDEX trajectories_episodes" in plan_of(buffer, "SELECT * FROM turns LIMIT 10")


def test_a_view_with_limit_is_neither_sorted_nor_materialised(harness):
    buffer = harness()
    for view in declared(buffer, "view"):
        plan = plan_of(buffer, f"SELECT * FROM {view} LIMIT 10")
        assert not [line for line in plan if line.startswith(("MATERIALIZE", "USE TEMP B-TREE FOR ORDER"))], (
            view,
            plan,
        )
        inner = [line for line in plan if line.startswith("SCAN")]
        assert len(inner) == len({line.split()[1] for line in inner}), (view, plan)


def test_groups_aggregate_the_rows_of_a_visit_and_clients_those_of_a_sender(harness, trajectory):
    buffer = harness(fill=(1, 0))
    visit = buffer.lease(1).visits[0]
    group = [trajectory("p0", visit.lease, tokens=[k], reward=float(k)) for k in (1, 3)]
    buffer.put([*group, trajectory("p0", visit.lease, tokens=[5], error="no", stop_reason="error")], 0)
    columns = (
        "prompt, epoch, trajectories, errors, mean_reward, min_reward, max_reward, reward_variance, policy_versions"
    )
    assert buffer.store.database.all(f"SELECT {columns} FROM groups") == [("p0", 0, 3, 1, 2.0, 1.0, 3.0, 1.0, "0")]
    buffer.ask(messages.Hello(host="node7", pid=42))
    columns = "sender, role, host, pid, trajectories, errors, response_tokens, mean_reward"
    assert buffer.store.database.one(f"SELECT {columns} FROM clients") == ("s.1", "searcher", "node7", 42, 3, 1, 3, 2.0)


def test_staleness_gives_the_age_of_the_data_of_a_step(harness):
    buffer = harness(buffer={"recency_window": 20}, fill=(2, 2))
    buffer.clock.advance(10)
    buffer.sample(3, prompts=2, samples=2)
    row = buffer.store.database.one("SELECT step, slots, trajectories, mean_staleness, max_age_seconds FROM staleness")
    assert row == (3, 4, 4, 3.0, 10.0)


def test_the_datasette_metadata_name_existing_views_columns_and_queries(harness):
    buffer = harness()
    metadata = json.loads((ROOT / "deploy/datasette/metadata.json").read_text())["databases"]["buffer"]
    known = declared(buffer, "view") | declared(buffer, "table")
    for table, about in metadata["tables"].items():
        assert {*known[table]} >= {*about.get("columns", {})}
    for query in metadata["queries"].values():
        buffer.store.database.all(query["sql"].replace(":run", "?"), *["test"] * query["sql"].count(":run"))


# ---------------------------------------------------------------- another schema


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
