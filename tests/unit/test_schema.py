"""Databases of every released schema open, keep their content and go on; views are what the documentation says."""

import json
import re
import sqlite3
from contextlib import closing

import pytest

from tba.buffer.schema import schema_names
from tba.buffer.store import Store
from tba.common import wire
from tba.common.errors import StorageError
from tba.tests.conftest import ROOT

DUMPS = sorted((ROOT / "tests/data").glob("schema-*.sql"))
VIEWS = ("trajectories", "groups", "consumption", "staleness", "clients")


@pytest.fixture(params=DUMPS, ids=lambda path: path.stem)
def old_database(request, tmp_path):
    """A database as an earlier release left it."""
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(request.param.read_text(encoding="utf-8"))
    connection.close()
    return path


@pytest.fixture
def ask(tmp_path):
    """Runs SQL on a file."""

    def run(path, sql, *values):
        connection = sqlite3.connect(path)
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()

    return run


def test_every_schema_since_the_first_release_has_its_dump():
    released = [name[:4] for name in schema_names() if name >= "0004"]
    assert [path.stem.removeprefix("schema-") for path in DUMPS] == released


def test_an_old_database_keeps_its_content(old_database, ask):
    Store(old_database, durability="process").close()
    rows = ask(old_database, "SELECT id, prompt, reward, times_trained, error IS NULL FROM trajectories ORDER BY id")
    assert len(rows) == 11
    assert [row[2] for row in rows[:3]] == [0.0, 0.5, 1.0]
    assert sum(row[3] for row in rows) == 6
    assert [row[4] for row in rows] == [1] * 10 + [0]
    assert ask(old_database, "SELECT response_ids FROM payloads WHERE trajectory = 1")[0][0] == bytes(8) + b"\x09\0\0\0"


def test_every_view_of_an_old_database_has_rows(old_database, ask):
    Store(old_database, durability="process").close()
    counts = {view: ask(old_database, f"SELECT COUNT(*) FROM {view}")[0][0] for view in VIEWS}
    assert counts == {"trajectories": 11, "groups": 4, "consumption": 12, "staleness": 2, "clients": 1}


def test_a_server_goes_on_with_an_old_database(old_database, harness, trajectory):
    buffer = harness(old_database, train={"prompts_per_step": 2})
    before = buffer.service.status()
    assert (before.step, before.trajectories, before.sampleable, before.epoch) == (1, 11, 10, 1)
    recorded = buffer.sample(1, prompts=2, samples=3).message
    assert len(recorded.trajectory_ids) == 6
    buffer.report(1)
    visit = buffer.lease(1, version=1).visits[0]
    assert buffer.put([trajectory(visit.prompt_key, visit.lease, version=1)], first_sequence=11).stored == 1
    assert buffer.sample(2, prompts=2, samples=3) is not None


def test_the_sampler_knows_the_size_of_every_row_of_an_old_database(old_database, harness):
    buffer = harness(old_database, train={"prompts_per_step": 2})
    served, trajectories = buffer.service._served, buffer.service._store.trajectories
    for prompt in served.index.prompts():
        for entry in served.index.entries(prompt):
            assert entry.payload_bytes >= 4 * max(trajectories.tokens([entry.id]))


def test_migrating_twice_changes_nothing(old_database, ask):
    Store(old_database, durability="process").close()
    first = ask(old_database, "SELECT name, sql FROM sqlite_master ORDER BY name")
    Store(old_database, durability="process").close()
    assert ask(old_database, "SELECT name, sql FROM sqlite_master ORDER BY name") == first


def test_an_old_database_has_the_schema_of_a_new_one(old_database, ask, tmp_path):
    new = tmp_path / "new.sqlite"
    Store(new, durability="process").close()
    Store(old_database, durability="process").close()
    names = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type, name"
    assert ask(old_database, names) == ask(new, names)
    for (name,) in ask(new, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"):
        columns = f"SELECT name, type FROM pragma_table_info('{name}')"
        assert ask(old_database, columns) == ask(new, columns)


# ---------------------------------------------------------------- views


def documented() -> dict[str, list[str]]:
    """The columns of each view, as docs/database.md names them."""
    page = (ROOT / "docs/database.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    return {name: re.findall(r"^\| `(\w+)` \|", text, re.M) for name, text in sections}


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_of_a_view_is_documented_and_no_other(view, harness):
    buffer = harness()
    columns = [row[0] for row in buffer.store.database.all("SELECT name FROM pragma_table_info(?)", view)]
    assert documented()[view] == columns


def test_every_column_of_a_table_is_documented(harness):
    page = (ROOT / "docs/database.md").read_text(encoding="utf-8")
    buffer = harness()
    tables = [row[0] for row in buffer.store.database.all("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        if table.startswith(("_", "sqlite_")):
            continue
        row = next(line for line in page.splitlines() if line.startswith(f"| `{table}` |"))
        for (column,) in buffer.store.database.all("SELECT name FROM pragma_table_info(?)", table):
            assert column in ("id", "run") or f"`{column}`" in row, f"{table}.{column}"


# Whole tables may be read only where somebody asks for everything; these ask for little.
SMALL_QUESTIONS = [
    "SELECT * FROM trajectories WHERE id = 7",
    "SELECT * FROM trajectories WHERE id > 100 ORDER BY id LIMIT 10",
    "SELECT * FROM consumption WHERE trajectory = 7",
    "SELECT * FROM groups WHERE visit = 7",
    "SELECT * FROM clients WHERE id = 1",
]


@pytest.mark.parametrize("sql", SMALL_QUESTIONS)
def test_a_small_question_reads_no_whole_table_of_rows(sql, harness):
    buffer = harness()
    plan = [row[3] for row in buffer.store.database.all(f"EXPLAIN QUERY PLAN {sql}")]
    assert not [line for line in plan if line.startswith("SCAN") and line.split()[1] in ("t", "c", "v")], plan
    assert not [line for line in plan if "TEMP B-TREE" in line and "DISTINCT" not in line], plan


@pytest.mark.parametrize("view", VIEWS)
def test_the_first_ten_rows_of_a_view_are_not_sorted_or_stored_first(view, harness):
    buffer = harness()
    plan = [row[3] for row in buffer.store.database.all(f"EXPLAIN QUERY PLAN SELECT * FROM {view} LIMIT 10")]
    assert not [line for line in plan if line.startswith(("MATERIALIZE", "USE TEMP B-TREE FOR ORDER"))], plan
    inner = [line for line in plan if line.startswith("SCAN")]
    assert len(inner) == len({line.split()[1] for line in inner}), plan


def test_groups_sum_up_the_rows_of_a_visit(harness, trajectory):
    buffer = harness()
    buffer.register(1)
    buffer.announce(0, 0)
    visit = buffer.lease(1).visits[0]
    group = [trajectory("p0", visit.lease, tokens=[k], reward=float(k)) for k in (1, 3)]
    buffer.put([*group, trajectory("p0", visit.lease, tokens=[5], error="no", stop_reason="error")], 0)
    columns = (
        "prompt, epoch, trajectories, errors, mean_reward, min_reward, max_reward, reward_variance, policy_versions"
    )
    assert buffer.store.database.all(f"SELECT {columns} FROM groups") == [("p0", 0, 3, 1, 2.0, 1.0, 3.0, 1.0, "0")]


def test_staleness_says_how_old_the_data_of_a_step_was(harness):
    buffer = harness(buffer={"recency_window": 20})
    buffer.fill(2, 2)
    buffer.clock.advance(10)
    buffer.sample(3, prompts=2, samples=2)
    row = buffer.store.database.one("SELECT step, slots, trajectories, mean_staleness, max_age_seconds FROM staleness")
    assert row == (3, 4, 4, 3.0, 10.0)


def test_clients_count_what_each_sender_delivered(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 2)
    buffer.ask(wire.Hello(host="node7", pid=42, software="x"))
    assert buffer.store.database.one(
        "SELECT sender, role, host, pid, trajectories, errors, response_tokens FROM clients"
    ) == (
        "s.1",
        "searcher",
        "node7",
        42,
        2,
        0,
        4,
    )


def test_datasette_is_told_of_views_columns_and_queries_that_exist(harness):
    buffer = harness()
    metadata = json.loads((ROOT / "deploy/datasette/metadata.json").read_text())["databases"]["buffer"]
    for table, about in metadata["tables"].items():
        columns = {row[0] for row in buffer.store.database.all("SELECT name FROM pragma_table_info(?)", table)}
        assert columns >= set(about.get("columns", {}))
        assert columns
    for query in metadata["queries"].values():
        buffer.store.database.all(query["sql"].replace(":run", "?"), *["test"] * query["sql"].count(":run"))


def test_the_database_of_another_program_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "bookmarks.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.executescript("CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 7; PRAGMA journal_mode = DELETE")
    before = path.read_bytes()
    with pytest.raises(StorageError, match="database of another program, with tables such as bookmarks"):
        Store(path, durability="process")
    assert path.read_bytes() == before
