"""`tba buffer query`, `show`, `tail`, `stats`, `migrate`: what they print, and one sentence for each mistake."""

import csv
import itertools
import json
import sqlite3

import pytest

from tba.buffer.show import follow


def test_query_prints_a_table_for_people(tba_buffer, filled):
    lines = tba_buffer("query", "SELECT id, reward FROM trajectories WHERE id < 3", "-b", filled).output.splitlines()
    assert [line.split() for line in lines] == [["id", "reward"], ["1", "0"], ["2", "0.25"]]


def test_query_prints_json_and_csv_for_machines(tba_buffer, filled):
    sql = "SELECT id, reward, error FROM trajectories WHERE id IN (1, 7)"
    assert tba_buffer("query", sql, "-b", filled, "--json").json == [
        {"id": 1, "reward": 0.0, "error": None},
        {"id": 7, "reward": 0.0, "error": "reward: no number"},
    ]
    assert (
        tba_buffer("query", sql, "-b", filled, "--csv").output == "id,reward,error\n1,0.0,\n7,0.0,reward: no number\n"
    )


def test_no_rows_are_an_empty_json_list(tba_buffer, filled):
    assert tba_buffer("query", "SELECT 1 WHERE 0", "-b", filled, "--json").json == []


def test_a_table_shows_blobs_by_their_size_and_json_in_hexadecimal(tba_buffer, filled):
    sql = "SELECT prompt_ids FROM payloads WHERE trajectory = 1"
    assert "<8 bytes>" in tba_buffer("query", sql, "-b", filled).output
    assert tba_buffer("query", sql, "-b", filled, "--json").json == [{"prompt_ids": "0100000002000000"}]


def test_rows_that_were_cut_are_mentioned(tba_buffer, filled):
    cut = tba_buffer("query", "SELECT id FROM trajectories", "-b", filled, "--limit", 2)
    assert len(cut.output.splitlines()) == 3
    assert cut.said == "the first 2 rows: --limit 0 shows all\n"
    assert tba_buffer("query", "SELECT id FROM trajectories", "-b", filled, "--limit", 7).said == ""


def test_two_columns_of_one_name_are_no_json(tba_buffer, filled):
    refused = tba_buffer("query", "SELECT 1 AS a, 2 AS a", "-b", filled, "--json")
    assert (refused.exit_code, refused.output) == (2, "")
    assert "two columns are named 'a'" in refused.said


def test_what_json_cannot_hold_is_text(tba_buffer, filled):
    assert tba_buffer("query", "SELECT 9e999 AS a, -9e999 AS b", "-b", filled, "--json").json == [
        {"a": "inf", "b": "-inf"}
    ]


def test_two_columns_of_one_name_are_both_shown(tba_buffer, filled):
    assert tba_buffer("query", "SELECT 1 AS a, 2 AS a", "-b", filled).output.split() == ["a", "a", "1", "2"]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM trajectory_rows",
        "INSERT INTO runs (uuid, name, created_at, seed) VALUES ('u', 'n', 0, 0)",
        "ATTACH 'other.sqlite' AS other",
        "CREATE TEMP TABLE t (a)",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA query_only = OFF",
        "VACUUM INTO 'copy.sqlite'",
        "SELECT load_extension('x')",
        "BEGIN",
    ],
)
def test_query_only_reads(sql, tba_buffer, filled, tmp_path):
    before = filled.read_bytes()
    refused = tba_buffer("query", sql, "-b", filled)
    assert (refused.exit_code, refused.output) == (2, "")
    assert "only reads" in refused.said
    assert filled.read_bytes() == before
    assert not list(tmp_path.glob("other*")) + list(tmp_path.glob("copy*"))


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT * FROM nope", "no such table: nope: docs/database.md lists the views"),
        ("SELECT nope FROM trajectories", "no such column: nope: docs/database.md"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("", "gives no rows"),
        ("SELECT json('{')", "malformed JSON"),
    ],
)
def test_a_mistake_in_sql_is_one_sentence(sql, words, tba_buffer, filled):
    refused = tba_buffer("query", sql, "-b", filled)
    assert refused.exit_code == 2
    assert words in refused.said


def test_json_and_csv_exclude_each_other(tba_buffer, filled):
    assert tba_buffer("query", "SELECT 1", "-b", filled, "--json", "--csv").exit_code == 2


READERS = [
    ("stats",),
    ("query", "SELECT 1"),
    ("show", 1),
    ("tail",),
    ("check",),
    ("export", "x.jsonl"),
    ("backup", "x"),
]


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_missing_file_is_wrong_usage(command, tba_buffer):
    refused = tba_buffer(*command, "--buffer", "nowhere.sqlite")
    assert refused.exit_code == 2
    assert "nowhere.sqlite does not exist" in refused.said


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_file_that_is_no_buffer_says_so(command, tba_buffer, tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to look like one" * 20)
    sqlite3.connect(tmp_path / "empty").execute("CREATE TABLE a (b)").connection.close()
    assert "is not a readable buffer database" in tba_buffer(*command, "-b", "text").said
    assert "is not a buffer database: it has no tables of tba" in tba_buffer(*command, "-b", "empty").said


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_database_of_a_newer_release_is_refused(command, tba_buffer, filled):
    _record_migration(filled, "INSERT INTO _sqlite_migrations VALUES (99, 'tba', '9999_future', 'now')")
    refused = tba_buffer(*command, "-b", filled)
    assert refused.exit_code == 1
    assert "has schema 9999_future, which this release does not know: upgrade tba" in refused.said


def test_a_database_of_an_older_release_is_migrated_on_request(tba_buffer, filled):
    _record_migration(filled, "DELETE FROM _sqlite_migrations WHERE name = '0006_views'")
    for view in ("trajectories", "groups", "consumption", "staleness", "clients"):
        _record_migration(filled, f"DROP VIEW {view}")
    assert "`tba buffer migrate` brings it up to date" in tba_buffer("query", "SELECT 1", "-b", filled).said
    assert "0007_snapshot_address" in tba_buffer("migrate", "-b", filled).output
    assert tba_buffer("query", "SELECT COUNT(*) AS n FROM trajectories", "-b", filled, "--json").json == [{"n": 7}]


def test_migrating_nothing_is_wrong_usage(tba_buffer):
    assert tba_buffer("migrate", "-b", "nowhere.sqlite").exit_code == 2


def test_a_place_where_sqlite_cannot_read_is_explained(tba_buffer, filled):
    """A directory in the place of the -shm file is what a read-only directory is: SQLite cannot make it."""
    for name in (f"{filled.name}-shm", f"{filled.name}-wal"):
        filled.with_name(name).unlink(missing_ok=True)
        filled.with_name(name).mkdir()
    refused = tba_buffer("query", "SELECT 1 FROM runs", "-b", filled)
    assert refused.exit_code == 1
    assert "needs write access to its directory" in refused.said
    assert "tba buffer backup" in refused.said


def _record_migration(path, sql: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql)
    connection.close()


# ---------------------------------------------------------------- show


def test_show_has_everything_about_a_trajectory(tba_buffer, filled):
    known = tba_buffer("show", 2, "-b", filled, "--json").json
    assert (known["reward"], known["reward_parts"], known["text"]) == (0.25, {"correct": 1.0}, "answer 01")
    assert (known["prompt_ids"], known["response_ids"], known["version_runs"]) == ([1, 2], [0, 1, 9], [[0, 3]])
    assert [(row["step"], row["staleness"]) for row in known["trained_by"]] == [(0, 0)]
    assert known["reference_logprobs"] == {"initial": -1.5}


def test_show_is_readable(tba_buffer, filled):
    shown = tba_buffer("show", 2, "-b", filled).output
    for words in ("reward part correct", "v0 x 3 tokens", "answer 01", "token ids [1, 2]", "staleness"):
        assert words in shown


def test_show_decodes_tokens_with_the_model_of_the_run(tba_buffer, harness, trajectory, example_model):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(tokens=[11, 8, 1])], 0)
    arguments = ("show", 1, "-b", buffer.store.path, "--set", f"model.path={example_model}", "--json")
    assert tba_buffer(*arguments).json["response_text"] == "85"


def test_show_decodes_with_the_model_that_the_server_recorded_and_prints_times_for_people(
    tba_buffer, harness, trajectory, example_model
):
    buffer = harness()
    buffer.store.open_run("test", seed=0, config={"model": {"path": str(example_model)}}, software={})
    buffer.fill(1, 0)
    buffer.put([trajectory(lease=0, tokens=[4, 5])], first_sequence=0)
    shown = tba_buffer("show", 1, "-b", buffer.store.path).output
    assert "response:\n12\n" in shown
    assert "1970-01-01 00:16:40.000 UTC" in shown
    assert "at text" not in shown


@pytest.mark.parametrize("time", [1e300, -1e300, 9e999, None])
def test_a_time_that_no_calendar_has_is_shown_as_it_is(tba_buffer, filled, time):
    """As an older release stored what a searcher said."""
    with sqlite3.connect(filled) as connection:
        connection.execute("UPDATE trajectory_rows SET created_at = ? WHERE id = 2", (time,))
    shown = tba_buffer("show", 2, "-b", filled)
    assert (shown.exit_code, "answer 01" in shown.output) == (0, True)
    assert tba_buffer("show", 2, "-b", filled, "--json").json["created_at"] == time
    assert "answer 01" in tba_buffer("tail", "-b", filled).output


def test_show_of_a_trajectory_that_nobody_trained_on_says_so(tba_buffer, filled):
    assert "no step has trained on it" in tba_buffer("show", 7, "-b", filled).output


def test_show_of_an_unknown_id_says_how_far_they_go(tba_buffer, filled):
    refused = tba_buffer("show", 99, "-b", filled)
    assert refused.exit_code == 2
    assert "has no trajectory 99: ids go up to 7" in refused.said


# ---------------------------------------------------------------- tail and stats


def test_show_of_a_number_that_no_id_can_be_is_wrong_usage(tba_buffer, filled):
    assert tba_buffer("show", 10**20, "-b", filled).exit_code == 2


def test_tail_shows_the_newest_last(tba_buffer, filled):
    lines = tba_buffer("tail", "-n", 2, "-b", filled).output.splitlines()
    assert "#6 " in lines[0]
    assert "answer 12" in lines[0]
    assert "#7 " in lines[1]
    assert "reward: no number" in lines[1]


def test_tail_writes_one_json_object_per_line(tba_buffer, filled):
    lines = tba_buffer("tail", "-n", 3, "--json", "-b", filled).output.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [5, 6, 7]


def test_follow_gives_each_new_trajectory_once(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 2)

    def put_two(_: float) -> None:
        buffer.put([trajectory(tokens=[n]) for n in range(2)], first_sequence=put_two.count)
        put_two.count += 2

    put_two.count = 100
    seen = [row["id"] for row in itertools.islice(follow(buffer.store.path, after=1, sleep=put_two), 5)]
    assert seen == [2, 3, 4, 5, 6]


def test_what_a_model_wrote_sends_nothing_to_the_terminal_but_text(tba_buffer, harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(lease=0, text="1\n\x1b]0;title\x07\r2\u2028é")], 0)
    path = buffer.store.path
    assert tba_buffer("tail", "-b", path).output.endswith("p0: 1\\n\\x1b]0;title\\x07\\r2\\u2028é\n")
    assert "\nresponse:\n1\n\\x1b]0;title\\x07\\r2\\u2028é\n" in tba_buffer("show", 1, "-b", path).output
    assert "\x1b" not in tba_buffer("query", "SELECT text FROM trajectories", "-b", path).output
    assert tba_buffer("tail", "-b", path, "--json").json["text"] == "1\n\x1b]0;title\x07\r2\u2028é"


def test_ctrl_c_ends_tail_without_an_error(tba_buffer, filled, monkeypatch):
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tba.buffer.show.follow.__defaults__", (interrupted,))
    outcome = tba_buffer("tail", "--lines", 1, "--follow", "-b", filled)
    assert outcome.exit_code == 0
    assert len(outcome.output.splitlines()) == 1


def test_stats_count(tba_buffer, filled):
    (numbers,) = tba_buffer("stats", "--json", "-b", filled).json
    assert (numbers["trajectories"], numbers["with_error"], numbers["steps_trained"]) == (7, 1, 1)
    assert "mean reward" in tba_buffer("stats", "-b", filled).output


def test_the_other_tables_are_csv_too(tba_buffer, filled):
    (numbers,) = csv.DictReader(tba_buffer("stats", "--csv", "-b", filled).output.splitlines())
    assert (numbers["trajectories"], numbers["with_error"]) == ("7", "1")
    tail = list(csv.DictReader(tba_buffer("tail", "-n", 2, "--csv", "-b", filled).output.splitlines()))
    assert [(row["id"], row["error"]) for row in tail] == [("6", ""), ("7", "reward: no number")]
    checks = list(csv.DictReader(tba_buffer("check", "--csv", "-b", filled).output.splitlines()))
    assert {row["result"] for row in checks} == {"ok"}


def test_stats_count_as_trained_on_only_what_was_reported(tba_buffer, harness):
    buffer = harness()
    buffer.fill(2, 2)
    buffer.sample(0, prompts=1, samples=1)
    buffer.sample(1, prompts=2, samples=2)
    buffer.report(0)
    (numbers,) = tba_buffer("stats", "--json", "-b", buffer.store.path).json
    assert (numbers["steps_trained"], numbers["trajectories_trained_on"], numbers["mean_staleness"]) == (1, 1, 0)
    assert numbers["file_mib"] + numbers["wal_mib"] == buffer.store.database.size_bytes() / 2**20
    assert numbers["wal_mib"] > 0
