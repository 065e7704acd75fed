"""Export and import of trajectories: nothing is lost, and nothing is added twice."""

import json
from typing import Any

import numpy as np
import pytest

from tba.buffer.offline.offline_buffer import OfflineBuffer, read_recorded_run
from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.buffer.tools import import_file
from tba.common.config import Config
from tba.common.errors import StorageError
from tba.tests.helpers.buffer import ask as ask_file
from tba.tests.helpers.buffer import change
from tba.tests.helpers.puts import make_episode
from tba.tests.runner import slow

FILES = ["rows.jsonl", *slow("rows.parquet")]


@pytest.fixture(autouse=True)
def _parquet_needs_its_extra(request):
    if "parquet" in request.node.name and "extra" not in request.node.name:
        pytest.importorskip("pyarrow")


@pytest.fixture
def target(tmp_path, example_model):
    """Options that select a run without a database."""
    settings = [f"run.dir={tmp_path / 'other'}", "run.name=other", f"model.path={example_model}"]
    return [part for setting in settings for part in ("--set", setting)]


@pytest.fixture
def ask(tmp_path):
    """Runs SQL on the target's database."""

    return lambda sql, path=None: ask_file(path or tmp_path / "other/buffer.sqlite", sql)


PAYLOADS = (
    "SELECT prompt_ids, response_ids, logprobs, version_runs, loss_mask, segments, kept FROM payloads"
    " LEFT JOIN kept_tokens USING (trajectory) ORDER BY trajectory"
)
KEPT = (
    "SELECT prompt, reward, reward_parts, stop_reason, temperature, top_p, created_at, generation_seconds, text, error,"
    " error_kind, turns FROM trajectories ORDER BY id"
)
TURNS = (
    "SELECT turn, start, tokens, seconds, environment_seconds, reward, parts, messages FROM turns ORDER BY trajectory"
)


@pytest.mark.parametrize("name", FILES)
def test_an_exported_trajectory_is_imported_unchanged(name, tba_buffer, harness, trajectory, target, ask, tmp_path):
    buffer = harness(fill=(2, 2))
    logprobs = np.array([-0.1, -1e-7, -3.3333333], np.float32)
    odd = {"text": 'a "b"\n\u2028é', "metadata": {"deep": [{"x": 1.5}]}, "loss_mask": np.array([1, 0, 1], np.uint8)}
    runs, kept = np.array([[0, 1], [0, 2]], np.int32), np.array([1, 4, 0, 0, 9, 0], np.int32)
    buffer.put(
        [trajectory("p1", tokens=[7, 8, 2**31 - 1], logprobs=logprobs, version_runs=runs, kept=kept, **odd)], 100
    )
    buffer.put([trajectory("p0", tokens=[], error="no", stop_reason="error", error_kind="worker")], 200)
    buffer.put([make_episode(turns=[turn | {"environment_seconds": 0.1} for turn in make_episode().turns])], 300)
    path = buffer.store.path
    assert tba_buffer("export", name, "-b", path, "--json").json["trajectories"] == 7
    # The vocabulary of a model that is not here is not known.
    elsewhere = [*target, "--set", "model.path=elsewhere/model"]
    counts = {"rows": 7, "new": 7, "there_already": 0, "warnings": {}}
    assert tba_buffer("import", name, *elsewhere, "--json").json == {"file": name, "run": "other", **counts}
    assert ask(PAYLOADS) == ask(PAYLOADS, path)
    assert len(ask(TURNS)) == 4
    assert ask(TURNS) == ask(TURNS, path)
    assert ask(KEPT) == ask(KEPT, path)
    metadata = json.loads(ask("SELECT metadata FROM trajectories WHERE text IS NOT NULL")[0][0])
    assert metadata == {"deep": [{"x": 1.5}], "imported_version": 0, "imported_run": buffer.run.uuid}


def test_imports_belong_to_no_policy_of_the_run_and_are_leased_only_if_the_task_has_their_prompts(
    tba_buffer, filled, target, harness, tmp_path, ask
):
    tba_buffer("import", filled, *target)
    columns = "policy_version, policy_step, epoch, searcher LIKE 'import.%'"
    assert set(ask(f"SELECT {columns} FROM trajectories")) == {(-1, None, None, 1)}
    buffer = harness(tmp_path / "other/buffer.sqlite")
    buffer.run = buffer.store.open_run("other", seed=0, config={}, software={})
    buffer.service = BufferService(buffer.store, buffer.run, buffer.config, buffer.clock)
    status = buffer.service.status()
    assert (status.prompts, status.sampleable) == (0, 6)
    # p0, which was also imported.
    buffer.register(1)
    assert buffer.service.status().prompts == 1
    buffer.announce(0, 0)
    assert {visit.prompt_key for visit in buffer.lease(3).visits} == {"p0"}
    batch = buffer.sample(0, prompts=2, samples=3).message
    facts = zip(batch.policy_version, batch.staleness, batch.temperature, strict=True)
    assert (len(batch.trajectory_ids), {*facts}) == (6, {(-1, 0, 1.0)})


@pytest.mark.parametrize("name", [*FILES, "backup.sqlite"])
def test_a_run_imports_its_own_rows_only_if_it_lost_them(name, tba_buffer, filled, ask):
    tba_buffer("backup" if name == "backup.sqlite" else "export", name, "-b", filled)
    arguments = ["import", name, "-b", filled, "--set", "run.name=test"]
    assert tba_buffer(*arguments).output == f"7 rows in {name}: 0 new in run test, 7 already present\n"
    change(filled, "DELETE FROM payloads WHERE trajectory IN (2, 3)", "DELETE FROM trajectory_rows WHERE id IN (2, 3)")
    assert tba_buffer(*arguments, "--json").json["new"] == 2
    assert tba_buffer(*arguments, "--json").json["new"] == 0
    assert ask("SELECT policy_version, COUNT(*) FROM trajectories GROUP BY 1", filled) == [(0, 7)]


@pytest.mark.slow
def test_rows_are_recognised_across_jsonl_parquet_and_database(tba_buffer, filled, target, ask):
    tba_buffer("export", "some.jsonl", "-b", filled, "--where", "id > 4")
    tba_buffer("export", "rows.parquet", "-b", filled)
    new = [tba_buffer("import", source, *target, "--json").json["new"] for source in ("some.jsonl", "rows.parquet")]
    assert [*new, tba_buffer("import", filled, *target, "--json").json["new"]] == [3, 4, 0]
    assert ask("SELECT COUNT(*) FROM trajectories") == [(7,)]


def test_a_file_that_has_grown_adds_its_new_rows(tba_buffer, target, tmp_path, ask):
    one, two, three = (f'{{"prompt": "{n}+1=", "response": "{n + 1}"}}' for n in (1, 2, 3))
    # The line end of a last line may come with the next line.
    for lines, new in (([one], 1), ([one, two, two, ""], 2), ([one, two, two, three], 1), ([one, two, two, ""], 0)):
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        assert tba_buffer("import", "rows.jsonl", *target, "--json").json["new"] == new
    assert ask("SELECT text FROM trajectories ORDER BY id") == [("2",), ("3",), ("3",), ("4",)]


def test_each_run_of_a_database_has_its_own_imports(tba_buffer, filled, target, tmp_path, ask):
    (tmp_path / "demos.jsonl").write_text(json.dumps(GOOD))
    for source, rows in (("demos.jsonl", 1), (filled, 7)):
        for name in ("other", "another"):
            assert tba_buffer("import", source, *target, "--set", f"run.name={name}", "--json").json["new"] == rows
    assert ask("SELECT run, COUNT(*) FROM trajectories GROUP BY 1") == [("another", 8), ("other", 8)]


def test_a_run_that_may_not_get_the_rows_and_a_row_that_occurs_twice_are_refused(tba_buffer, filled, target, tmp_path):
    tba_buffer("export", "rows.jsonl", "-b", filled)
    refused = tba_buffer("import", "rows.jsonl", "-b", filled)
    assert refused.exit_code == 78
    assert 'belongs to run test, and run.name is run: set run.name = "test"' in refused.message
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "twice.jsonl").write_text("\n".join([*lines, lines[3]]))
    refused = tba_buffer("import", "twice.jsonl", "-b", "new.sqlite")
    assert (refused.exit_code, "twice.jsonl:8: trajectory 4 of run" in refused.message) == (2, True)
    config = Config.model_validate({"run": {"dir": tmp_path / "other", "name": "other"}})
    OfflineBuffer(config, read_recorded_run(filled, run=None, as_of=None), replay=False).close()
    refused = tba_buffer("import", "rows.jsonl", *target)
    assert refused.exit_code == 78
    assert "belongs to run other, which was trained offline from" in refused.message


# ---------------------------------------------------------------- export


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.jsonl", "--where", "rewad > 1"], "no such column: rewad"),
        (["x.jsonl", "--where", "1); DELETE FROM runs; --"], "one statement at a time"),
        (["x.csv"], "set --format jsonl or --format parquet"),
        (["x.jsonl", "--format", "xml"], "set --format jsonl or --format parquet"),
        (["nowhere/x.jsonl"], "nowhere is not a directory"),
    ],
)
def test_a_refused_export_gives_one_sentence_and_leaves_no_file(arguments, words, tba_buffer, filled, tmp_path):
    before = set(tmp_path.iterdir())
    refused = tba_buffer("export", *arguments, "-b", filled)
    assert refused.exit_code == 2
    assert words in refused.message
    assert {path for path in tmp_path.iterdir() if not path.name.startswith(filled.name)} <= before


@pytest.mark.parametrize(("command", "done"), [("export", "7 trajectories"), ("backup", "integrity ok")])
def test_an_export_or_a_backup_replaces_a_file_only_with_force(command, done, tba_buffer, filled, tmp_path):
    (tmp_path / "x.jsonl").write_text("precious")
    refused = tba_buffer(command, "x.jsonl", "-b", filled)
    assert (refused.exit_code, "exists: choose another name" in refused.message) == (2, True)
    assert (tmp_path / "x.jsonl").read_text() == "precious"
    assert done in tba_buffer(command, "x.jsonl", "-b", filled, "--force").output
    itself = filled.rename(tmp_path / "filled.jsonl")
    assert "is the database itself" in tba_buffer(command, itself, "-b", itself, "--force").message


def test_an_export_has_what_where_selects_and_reports_compacted_trajectories(tba_buffer, filled, tmp_path):
    tba_buffer("export", "good.jsonl", "-b", filled, "--where", "reward > 0.3 AND error IS NULL")
    rows = [json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.5, 0.5]
    tba_buffer("prune", "--tokens", "-b", filled, "--set", "run.name=test", "--keep-steps", 0)
    done = tba_buffer("export", "x.jsonl", "-b", filled, "--json").json
    assert (done["trajectories"], done["without_tokens"]) == (6, 1)


# ---------------------------------------------------------------- import


def test_demonstrations_are_imported_as_text_and_as_tokens(tba_buffer, target, tmp_path, ask):
    lines = [
        {"prompt": "47+38=", "response": "85", "prompt_key": "47+38"},
        {"prompt_ids": [7, 10], "response_ids": [11, 8], "reward": 0.5, "metadata": {"by": "hand"}},
        {"prompt": "1+1=", "response": "2", "stop_reason": "length"},
    ]
    (tmp_path / "demos.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert tba_buffer("import", "demos.jsonl", *target, "--json").json["new"] == 3
    columns = "prompt, reward, text, response_tokens, temperature, policy_version"
    rows = ask(f"SELECT {columns} FROM trajectories ORDER BY id")
    # Three tokens: two digits and the end token.
    assert rows[0] == ("47+38", 1.0, "85", 3, 0.0, -1)
    assert rows[1][0].startswith("sha256:")
    assert rows[1][1:] == (0.5, None, 2, 0.0, -1)
    assert rows[2] == ("1+1=", 1.0, "2", 1, 0.0, -1)
    metadata = [json.loads(row[0]) for row in ask("SELECT metadata FROM trajectories ORDER BY id")]
    assert metadata[1] == {"by": "hand", "imported_version": None, "logprobs": "absent"}
    assert ask("SELECT logprobs FROM payloads WHERE trajectory = 1") == [(bytes(12),)]


GOOD = {"prompt_ids": [1], "response_ids": [2]}
FULL = GOOD | {"logprobs": [-1.0], "version_runs": [[0, 1]], "sampling": {"temperature": 1.0, "top_p": 1.0}}


TURN = make_episode().turns[1] | {"start": 0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "it must be"),
        ({}, "it has neither prompt nor prompt_ids"),
        ({"prompt_ids": [1]}, "it has neither response nor response_ids"),
        (GOOD | {"rewrad": 1}, "unknown key 'rewrad': did you mean reward?"),
        (GOOD | {"colour": 1}, "unknown key 'colour': other data goes into metadata"),
        (GOOD | {"reward": "1"}, "reward: it must be a valid number"),
        (GOOD | {"reward": float("nan")}, "reward: it must be a finite number"),
        (GOOD | {"created_at": 1e300}, "rows.created_at[0]: Expected `float` < 253402300800"),
        (GOOD | {"prompt_ids": [-1]}, "prompt_ids.0: it must be greater than or equal to 0"),
        (GOOD | {"response_ids": []}, "a trajectory without an error has empty response_ids"),
        (GOOD | {"prompt_key": ""}, "rows.prompt_key[0]: Expected `str` of length >= 1"),
        (GOOD | {"metadata": {"x": float("inf")}}, "Out of range float values are not JSON compliant"),
        (GOOD | {"text": "\ud800"}, "half of a character"),
        (FULL | {"logprobs": [-1.0, -1.0]}, "logprobs and response_ids differ in length"),
        (FULL | {"version_runs": [[0, 2]]}, "the version runs of row 0 do not cover its 1 response token"),
        (FULL | {"version_runs": []}, "version_runs must be pairs"),
        (FULL | {"version_runs": None}, "it has logprobs and no version_runs"),
        (FULL | {"sampling": None}, "it has logprobs and no sampling"),
        (FULL | {"loss_mask": [1, 1]}, "a loss mask has 2 entries for 1 response token"),
        (GOOD | {"metadata": {"n": 2**70}}, "can't serialize ints"),
        (GOOD | {"prompt_ids": [15, 16]}, "prompt_ids has 16, and the run's model has token ids below 16"),
        (FULL | {"kept": [17, 0]}, "kept has 16, and the run's model has token ids below 16"),
        (GOOD | {"metadata": {"x": json.loads("[" * 100 + "]" * 100)}}, "nested more than 100 deep"),
        (GOOD | {"metadata": {"x": "y" * (200 << 10)}}, "metadata of row 0 has"),
        (GOOD | {"text": "x" * (17 << 20)}, "header of"),
        (GOOD | {"turns": [{"start": 0}]}, "rows.turns[0][0]: Object missing required field"),
        (GOOD | {"turns": [TURN | {"tokens": 2}]}, "turn 0 of row 0 is not after the one before it and inside"),
        (GOOD | {"segments": [0]}, "the segments [0] of row 0"),
        (GOOD | {"error": "no", "error_kind": "boredom"}, "error_kind: it must be"),
        (GOOD | {"error_kind": "reward"}, "row 0 has error None, error_kind 'reward'"),
    ],
)
def test_an_invalid_line_gives_one_sentence_and_nothing_is_imported(line, words, tba_buffer, target, tmp_path, ask):
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "bad.jsonl").write_text(json.dumps(GOOD) + "\n" + text + "\n")
    refused = tba_buffer("import", "bad.jsonl", *target)
    assert refused.exit_code == 2
    assert refused.message.startswith("bad.jsonl:2")
    assert words in refused.message
    assert ask("SELECT COUNT(*) FROM trajectories") == [(0,)]


@pytest.mark.slow
def test_rows_with_long_texts_are_split_into_messages_below_the_limit(tba_buffer, target, tmp_path, ask):
    turn = TURN | {"messages": [["user", "x" * (1 << 16)]] * 16}
    long: list[dict[str, Any]] = [{"text": "x" * (1 << 20)}, {"turns": [turn]}]
    rows = [GOOD | long[n // 20] | {"reward": n} for n in range(40)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tba_buffer("import", "long.jsonl", *target, "--json").json["new"] == 40


def test_an_invalid_parquet_row_is_located(tba_buffer, target, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([GOOD, {"prompt_ids": [1]}]), tmp_path / "bad.parquet")
    assert "bad.parquet row 2: it has neither response" in tba_buffer("import", "bad.parquet", *target).message
    pq.write_table(pa.Table.from_pylist([GOOD | {"metadata": "{"}]), tmp_path / "map.parquet")
    assert "map.parquet is not a readable parquet file: Expecting" in (
        tba_buffer("import", "map.parquet", *target).message
    )
    # A null is not the default reward.
    pq.write_table(pa.Table.from_pylist([GOOD | {"reward": 0.5}, GOOD | {"reward": None}]), tmp_path / "null.parquet")
    assert tba_buffer("import", "null.parquet", *target).message.endswith(" row 2: reward: it must be a valid number")
    (tmp_path / "none.parquet").write_text("no parquet")
    assert "none.parquet is not a readable parquet file" in tba_buffer("import", "none.parquet", *target).message


def test_an_imported_error_without_a_kind_is_of_the_kind_imported_and_text_needs_a_model(
    tba_buffer, target, tmp_path, ask
):
    lines = [GOOD | {"error": "no"}, GOOD | {"error": "late", "error_kind": "worker"}, GOOD]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tba_buffer("import", "rows.jsonl", *target).exit_code == 0
    kinds = ask("SELECT error_kind FROM trajectories ORDER BY id")
    assert kinds == [("imported",), ("worker",), (None,)]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    refused = tba_buffer("import", "rows.jsonl", "--set", f"run.dir={tmp_path / 'o'}")
    assert (refused.exit_code, "model.path is not set" in refused.message) == (78, True)


@pytest.mark.parametrize(
    ("source", "words"), [("nowhere.jsonl", "does not exist"), ("rows.csv", "set --format"), ("self", "of this run")]
)
def test_a_refused_source_creates_no_database(source, words, tba_buffer, target, filled, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n")
    arguments = [filled, "-b", filled] if source == "self" else [source, *target]
    refused = tba_buffer("import", *arguments)
    assert (refused.exit_code, words in refused.message) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_failure_during_an_import_reports_the_rows_imported_so_far(tba_buffer, target, tmp_path, monkeypatch, ask):
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(GOOD | {"reward": n}) + "\n" for n in range(100)))
    put = import_file.ImportTarget.put

    def full(self, sender, message, frames):
        if message.first_sequence:
            raise StorageError("the disk is full")
        return put(self, sender, message, frames)

    monkeypatch.setattr(import_file.ImportTarget, "put", full)
    refused = tba_buffer("import", "many.jsonl", *target)
    assert refused.exit_code == 1
    assert refused.message == "the disk is full; 64 of 100 rows are imported, and running the import again is safe"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert tba_buffer("import", "many.jsonl", *target, "--json").json["new"] == 36
    assert ask("SELECT COUNT(*), COUNT(DISTINCT reward) FROM trajectories") == [(100, 100)]


def test_a_database_in_use_without_a_server_is_reported(tba_buffer, target, tmp_path, monkeypatch):
    monkeypatch.setattr("tba.buffer.tools.import_file._REPLY_SECONDS", 0.3)
    (tmp_path / "demos.jsonl").write_text(json.dumps(GOOD))
    store = Store(tmp_path / "other/buffer.sqlite", durability="process")
    refused = tba_buffer("import", "demos.jsonl", *target, "--set", "buffer.address=tcp://127.0.0.1:1")
    store.close()
    assert refused.exit_code == 1
    assert "another process has the database open, and no server replies" in refused.message
