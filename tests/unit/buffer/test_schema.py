"""The schema: the documentation describes all of it, and views stay fast on large tables."""

import json
import re

import pytest

from tba.common.wire import messages
from tba.tests.conftest import ROOT

VIEWS = (
    "trajectories",
    "groups",
    "consumption",
    "staleness",
    "clients",
    "evaluations",
    "lengths",
    "waste",
    "curriculum",
    "held_out",
)


def documented() -> dict[str, list[str]]:
    """The columns of each view, as docs/database.md names them."""
    page = (ROOT / "docs/database.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### `(\w+)`\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    first_cells = {name: re.findall(r"^\| (`[^|]*`) \|", text, re.M) for name, text in sections}
    return {name: re.findall(r"`(\w+)`", " ".join(cells)) for name, cells in first_cells.items()}


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
        named = {"id", "run", *re.findall(r"`(\w+)`", row)}
        # A row may refer to the view with the same columns.
        of_views = {column for view in re.findall(r"view `(\w+)`", row) for column in documented()[view]}
        for (column,) in buffer.store.database.all("SELECT name FROM pragma_table_info(?)", table):
            assert column in named | of_views, f"{table}.{column}"


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


@pytest.mark.parametrize("sql", SMALL_QUERIES)
def test_a_query_for_few_rows_scans_no_large_table(sql, harness):
    buffer = harness()
    plan = [row[3] for row in buffer.store.database.all(f"EXPLAIN QUERY PLAN {sql}")]
    assert not [line for line in plan if line.startswith("SCAN") and line.split()[1] in ("t", "c", "v")], plan
    assert not [line for line in plan if "TEMP B-TREE" in line and "DISTINCT" not in line], plan


@pytest.mark.parametrize("column", ["reward", "received_at"])
def test_rewards_and_timestamps_are_indexed(column, harness):
    sql = f"EXPLAIN QUERY PLAN SELECT id FROM trajectory_rows WHERE run = 1 AND {column} > 0"
    ((*_, plan),) = harness().store.database.all(sql)
    assert "USING" in plan
    assert column in plan


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_with_limit_is_neither_sorted_nor_materialised(view, harness):
    buffer = harness()
    plan = [row[3] for row in buffer.store.database.all(f"EXPLAIN QUERY PLAN SELECT * FROM {view} LIMIT 10")]
    assert not [line for line in plan if line.startswith(("MATERIALIZE", "USE TEMP B-TREE FOR ORDER"))], plan
    inner = [line for line in plan if line.startswith("SCAN")]
    assert len(inner) == len({line.split()[1] for line in inner}), plan


def test_groups_aggregate_the_rows_of_a_visit(harness, trajectory):
    buffer = harness(fill=(1, 0))
    visit = buffer.lease(1).visits[0]
    group = [trajectory("p0", visit.lease, tokens=[k], reward=float(k)) for k in (1, 3)]
    buffer.put([*group, trajectory("p0", visit.lease, tokens=[5], error="no", stop_reason="error")], 0)
    columns = (
        "prompt, epoch, trajectories, errors, mean_reward, min_reward, max_reward, reward_variance, policy_versions"
    )
    assert buffer.store.database.all(f"SELECT {columns} FROM groups") == [("p0", 0, 3, 1, 2.0, 1.0, 3.0, 1.0, "0")]


def test_staleness_gives_the_age_of_the_data_of_a_step(harness):
    buffer = harness(buffer={"recency_window": 20}, fill=(2, 2))
    buffer.clock.advance(10)
    buffer.sample(3, prompts=2, samples=2)
    row = buffer.store.database.one("SELECT step, slots, trajectories, mean_staleness, max_age_seconds FROM staleness")
    assert row == (3, 4, 4, 3.0, 10.0)


def test_clients_count_the_trajectories_of_each_sender(harness, trajectory):
    buffer = harness(fill=(1, 2))
    buffer.ask(messages.Hello(host="node7", pid=42))
    assert buffer.store.database.one(
        "SELECT sender, role, host, pid, trajectories, errors, response_tokens FROM clients"
    ) == ("s.1", "searcher", "node7", 42, 2, 0, 4)


def test_the_datasette_metadata_name_existing_views_columns_and_queries(harness):
    buffer = harness()
    metadata = json.loads((ROOT / "deploy/datasette/metadata.json").read_text())["databases"]["buffer"]
    for table, about in metadata["tables"].items():
        columns = {row[0] for row in buffer.store.database.all("SELECT name FROM pragma_table_info(?)", table)}
        assert columns >= set(about.get("columns", {}))
        assert columns
    for query in metadata["queries"].values():
        buffer.store.database.all(query["sql"].replace(":run", "?"), *["test"] * query["sql"].count(":run"))
