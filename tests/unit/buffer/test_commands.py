"""Output and error sentences of `tba buffer query`, `show`, `tail`, and `stats`."""

import csv
import json

import numpy as np
import pytest

from tba.tests.helpers.buffer import change
from tba.tests.helpers.puts import make_episode, make_trajectory


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT id, reward FROM trajectories WHERE id < 3", ["id", "reward", "1", "0", "2", "0.25"]),
        ("SELECT prompt_ids AS b FROM payloads WHERE trajectory = 1", ["b", "<8", "bytes>"]),
        ("SELECT 12345.678 AS n, 99999.5 AS n", ["n", "n", "12345.678", "99999.5"]),
        ("SELECT 28020.0 AS n, 0.123456 AS n, 1e18 AS n", ["n", "n", "n", "28020", "0.1235", "1e+18"]),
        ('SELECT 1 AS "[/b]", 2 AS "[bold]a", 3 AS ":smile:"', ["[/b]", "[bold]a", ":smile:", "1", "2", "3"]),
    ],
)
def test_query_prints_a_table_for_people(tba_buffer, filled, sql, words):
    assert tba_buffer("query", sql, "-b", filled).output.split() == words


def test_a_table_has_its_numbers_on_the_right_and_the_start_of_a_long_text(tba_buffer, filled):
    sql = "SELECT id * 100 AS id, 'x' AS text FROM trajectories WHERE id IN (1, 2) UNION ALL SELECT 7, NULL"
    assert tba_buffer("query", sql, "-b", filled).output.splitlines() == [" id  text", "100  x", "200  x", "  7"]
    # Laid out in full, it would take half a minute.
    long = tba_buffer("query", "SELECT 7, printf('%.*c', 16000000, 'x')", "-b", filled).output
    assert (long.count("x") < 20_000, "… (16000000 characters)" in long.replace("\n", "")) == (True, True)
    machine = tba_buffer("query", "SELECT printf('%.*c', 16000000, 'x') AS text", "-b", filled, "--json").json
    assert len(machine[0]["text"]) == 16_000_000


def test_query_prints_json_and_csv_for_machines(tba_buffer, filled):
    sql = "SELECT id, reward, error FROM trajectories WHERE id IN (1, 7)"
    assert tba_buffer("query", sql, "-b", filled, "--json").json == [
        {"id": 1, "reward": 0.0, "error": None},
        {"id": 7, "reward": 0.0, "error": "reward: no number"},
    ]
    assert (
        tba_buffer("query", sql, "-b", filled, "--csv").output == "id,reward,error\n1,0.0,\n7,0.0,reward: no number\n"
    )


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT 1 WHERE 0", []),
        (
            "SELECT value FROM json_each('[1,2]') UNION SELECT value FROM json_tree('3')",
            [{"value": n} for n in (1, 2, 3)],
        ),
        ("SELECT prompt_ids FROM payloads WHERE trajectory = 1", [{"prompt_ids": "0100000002000000"}]),
        ("SELECT 9e999 AS a, -9e999 AS b", [{"a": "inf", "b": "-inf"}]),
    ],
)
def test_values_that_json_lacks_print_as_text(tba_buffer, filled, sql, rows):
    assert tba_buffer("query", sql, "-b", filled, "--json").json == rows


def test_a_note_reports_that_rows_were_left_out_or_to_people_that_there_are_none(tba_buffer, filled):
    cut = tba_buffer("query", "SELECT id FROM trajectories", "-b", filled, "--limit", 2)
    assert len(cut.output.splitlines()) == 3
    assert cut.message == "first 2 rows only: --limit 0 shows all\n"
    assert tba_buffer("query", "SELECT id FROM trajectories", "-b", filled, "--limit", 7).message == ""
    nothing = ("query", "SELECT id FROM trajectories WHERE reward > 9", "-b", filled)
    done = tba_buffer(*nothing)
    assert (done.exit_code, done.output.split(), done.message.strip()) == (0, ["id"], "no rows")
    assert tba_buffer(*nothing, "--json").output.strip() == "[]"
    assert "no rows" not in tba_buffer(*nothing, "--csv").message


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM trajectory_rows",
        "DELETE FROM trajectories",
        "UPDATE trajectories SET reward = 1",
        "INSERT INTO runs (uuid, name, created_at, seed) VALUES ('u', 'n', 0, 0)",
        "ATTACH 'other.sqlite' AS other",
        "CREATE TEMP TABLE t (a)",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA query_only = OFF",
        "PRAGMA hard_heap_limit = 0",
        "VACUUM INTO 'copy.sqlite'",
        "SELECT load_extension('x')",
        "BEGIN",
    ],
)
def test_query_only_reads(sql, tba_buffer, filled, tmp_path):
    before = filled.read_bytes()
    refused = tba_buffer("query", sql, "-b", filled)
    assert (refused.exit_code, refused.output) == (2, "")
    assert "only reads" in refused.message
    assert filled.read_bytes() == before
    assert not list(tmp_path.glob("other*")) + list(tmp_path.glob("copy*"))


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT * FROM nope", "no such table: nope: docs/database.md lists the views"),
        ("SELECT nope FROM trajectories", "no such column: nope: docs/database.md"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("", "returns no rows"),
        ("SELECT json('{')", "malformed JSON"),
        ("SELECT zeroblob(2000000000)", "too big"),
        ("SELECT 1 AS a, 2 AS a", "two columns are named 'a'"),
    ],
)
def test_wrong_sql_gives_one_sentence(sql, words, tba_buffer, filled):
    refused = tba_buffer("query", sql, "-b", filled, "--json")
    assert (refused.exit_code, refused.output) == (2, "")
    assert words in refused.message
    assert tba_buffer("query", sql, "-b", filled, "--json", "--csv").exit_code == 2


READERS = [
    ("stats",),
    ("query", "SELECT 1"),
    ("show", 1),
    ("tail",),
    ("check",),
    ("export", "x.jsonl"),
    ("backup", "x"),
]


def test_the_directory_of_a_run_and_a_file_instead_of_a_configuration_stand_for_the_database(
    tba_buffer, filled, tmp_path
):
    (tmp_path / "run").mkdir()
    path = filled.rename(tmp_path / "run/buffer.sqlite")
    outcome = tba_buffer("stats", "-b", "run")
    assert outcome.exit_code == 0
    assert outcome.output == tba_buffer("stats", "-b", path).output == tba_buffer("stats", path).output
    assert tba_buffer("check", path).exit_code == 0
    assert "exclude each other" in tba_buffer("stats", path, "-b", path).message


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_file_that_is_no_buffer_of_this_build_is_refused(command, tba_buffer, filled, tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to look like one" * 20)
    change(tmp_path / "empty", "CREATE TABLE a (b)")
    missing = tba_buffer(*command, "--buffer", "nowhere.sqlite")
    assert (missing.exit_code, "nowhere.sqlite does not exist" in missing.message) == (2, True)
    assert "is not a readable buffer database" in tba_buffer(*command, "-b", "text").message
    assert "is the database of another program, with the table a:" in tba_buffer(*command, "-b", "empty").message
    change(filled, f"PRAGMA application_id = {int.from_bytes(b'tba') << 8}")
    refused = tba_buffer(*command, "-b", filled)
    assert refused.exit_code == 1
    assert "was made by another build of tba" in refused.message
    assert "continue the run with that build, or export its trajectories there" in refused.message
    # Of a build that had migrations.
    change(filled, "PRAGMA application_id = 0", "CREATE TABLE _sqlite_migrations (name)")
    assert "was made by another build of tba" in tba_buffer(*command, "-b", filled).message


def test_a_directory_in_which_sqlite_cannot_read_is_explained(tba_buffer, filled):
    """A directory named like the -shm file prevents SQLite from creating it, as a read-only directory does."""
    for name in (f"{filled.name}-shm", f"{filled.name}-wal"):
        filled.with_name(name).unlink(missing_ok=True)
        filled.with_name(name).mkdir()
    refused = tba_buffer("query", "SELECT 1 FROM runs", "-b", filled)
    assert refused.exit_code == 1
    assert "needs write access to its directory" in refused.message
    assert "tba buffer backup" in refused.message


# ---------------------------------------------------------------- show


def test_show_prints_everything_about_a_trajectory(tba_buffer, filled):
    known = tba_buffer("show", 2, "-b", filled, "--json").json
    assert (known["reward"], known["reward_parts"], known["text"]) == (0.25, {"correct": 1.0}, "answer 01")
    assert (known["prompt_ids"], known["response_ids"], known["version_runs"]) == ([1, 2], [0, 1, 9], [[0, 3]])
    assert [(row["step"], row["staleness"]) for row in known["trained_by"]] == [(0, 0)]
    assert known["reference_logprobs"] == {"initial": -1.5}
    shown = tba_buffer("show", 2, "-b", filled).output
    for words in ("reward part correct", "v0 x 3 tokens", "answer 01", "token ids [1, 2]", "staleness"):
        assert words in shown
    assert "no step has trained on it" in tba_buffer("show", 7, "-b", filled).output
    refused = tba_buffer("show", 99, "-b", filled)
    assert refused.exit_code == 2
    assert "has no trajectory 99: ids go up to 7" in refused.message
    assert tba_buffer("show", 10**20, "-b", filled).exit_code == 2


@pytest.mark.needs("transformers")
def test_show_decodes_with_the_recorded_model_and_tells_sampled_text_of_turns_apart(tba_buffer, harness, example_model):
    buffer = harness()
    buffer.store.open_run("test", seed=0, config={"model": {"path": str(example_model)}}, software={})
    buffer.fill(1, 0)
    runs = np.array([[0, 3], [0, 9]], np.int32)
    first, *others = make_episode().turns
    buffer.put([make_trajectory(lease=0, tokens=[4, 5])], 1)
    shown = tba_buffer("show", 1, "-b", buffer.store.path).output
    assert "response:\n12\n" in shown
    assert "1970-01-01 00:16:40.000 UTC" in shown
    assert "at text" not in shown
    # Nothing is between the first two turns.
    turns = [first | {"tokens": 1}, first | {"start": 1, "tokens": 1}, *others]
    buffer.put([make_episode(version_runs=runs, turns=turns)], 0)
    shown = tba_buffer("show", 2, "-b", buffer.store.path).output
    assert shown.count("not sampled") == 3
    assert shown.count("a new context") == 2
    for words in (
        "turn 0, 1 token by v0 in 0.5 s, reward 0.25:\n2\n",
        "turn 4, 1 token by v0 in 0.5 s, reward 1:\n1\n",
    ):
        assert words in shown
    known = tba_buffer("show", 2, "-b", buffer.store.path, "--json").json
    assert known["turns"] == turns
    sampled = [(piece["start"], piece["tokens"]) for piece in known["pieces"] if piece["sampled"]]
    assert sampled == [(turn["start"], turn["tokens"]) for turn in turns]
    change(buffer.store.path, "DELETE FROM payloads")
    assert "Its tokens were dropped" in tba_buffer("show", 2, "-b", buffer.store.path).output


# ---------------------------------------------------------------- tail and stats


def test_control_characters_in_responses_are_escaped_for_the_terminal(tba_buffer, harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(lease=0, text="1\n\x1b]0;title\x07\r2\u2028é")], 0)
    path = buffer.store.path
    assert tba_buffer("tail", "-b", path).output.endswith("p0: 1\\n\\x1b]0;title\\x07\\r2\\u2028é\n")
    assert "\nresponse:\n1\n\\x1b]0;title\\x07\\r2\\u2028é\n" in tba_buffer("show", 1, "-b", path).output
    assert "\x1b" not in tba_buffer("query", "SELECT text FROM trajectories", "-b", path).output
    assert tba_buffer("tail", "-b", path, "--json").json["text"] == "1\n\x1b]0;title\x07\r2\u2028é"
    change(path, "UPDATE senders SET sender = 'a' || char(27) || '[2J'")
    assert "a\\x1b[2J" in tba_buffer("tail", "-n", 1, "-b", path).output


def test_stats_tail_and_check_print_for_people_json_and_csv(tba_buffer, filled):
    (numbers,) = tba_buffer("stats", "--json", "-b", filled).json
    assert (numbers["trajectories"], numbers["with_error"], numbers["steps_trained"]) == (7, 1, 1)
    assert "mean reward" in tba_buffer("stats", "-b", filled).output
    (numbers,) = csv.DictReader(tba_buffer("stats", "--csv", "-b", filled).output.splitlines())
    assert (numbers["trajectories"], numbers["with_error"]) == ("7", "1")
    lines = tba_buffer("tail", "-n", 2, "-b", filled).output.splitlines()
    for line, words in zip(lines, (("#6 ", "answer 12"), ("#7 ", "reward: no number")), strict=True):
        assert all(word in line for word in words)
    as_json = tba_buffer("tail", "-n", 3, "--json", "-b", filled).output.splitlines()
    assert [json.loads(line)["id"] for line in as_json] == [5, 6, 7]
    tail = list(csv.DictReader(tba_buffer("tail", "-n", 2, "--csv", "-b", filled).output.splitlines()))
    assert [(row["id"], row["error"]) for row in tail] == [("6", ""), ("7", "reward: no number")]
    checks = list(csv.DictReader(tba_buffer("check", "--csv", "-b", filled).output.splitlines()))
    assert {row["result"] for row in checks} == {"ok"}


def test_stats_count_only_reported_steps_as_training(tba_buffer, harness):
    buffer = harness(fill=(2, 2))
    buffer.sample(0, prompts=1, samples=1)
    buffer.sample(1, prompts=2, samples=2)
    buffer.report(0)
    (numbers,) = tba_buffer("stats", "--json", "-b", buffer.store.path).json
    assert (numbers["steps_trained"], numbers["trajectories_trained_on"], numbers["mean_staleness"]) == (1, 1, 0)
    assert numbers["file_mib"] + numbers["wal_mib"] == buffer.store.database.size_bytes() / 2**20
    assert numbers["wal_mib"] > 0
