"""`tba buffer prune`: what it deletes, what it keeps, and what it needs first."""

import json

import pytest

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.starts import choose_run
from tba.buffer.store.store import Store
from tba.buffer.tools.check import check
from tba.common.errors import UsageError
from tba.tests.helpers.buffer import ask, change

RECENT = {"recency_fraction": 1.0, "recency_window": 0}
ADD_RESCORED = "INSERT INTO rescored_logprobs (trajectory, version, logprob, logprobs) VALUES (?, 0, -1.0, x'00')"
OLD = ("--before-step", 2, "--keep-steps", 2)


@pytest.fixture
def trained(harness, trajectory, tmp_path):
    """A run of four steps. Step n trained on the two trajectories that had come last, 2n + 1 and 2n + 2."""
    (tmp_path / "run").mkdir()
    buffer = harness(tmp_path / "run" / "buffer.sqlite", buffer=RECENT)
    buffer.register(8)
    for step in range(4):
        buffer.announce(step, step)
        visit = buffer.lease(1, version=step).visits[0]
        group = [trajectory(visit.prompt_key, visit.lease, version=step, tokens=[step, k]) for k in range(2)]
        buffer.put(group, first_sequence=2 * step)
        buffer.sample(step, prompts=1, samples=2)
        buffer.report(step, [2 * step + 1], [-1.0])
    buffer.store.database.execute_many(ADD_RESCORED, [(id_,) for id_ in range(1, 9)])
    buffer.store.close()
    return buffer.store.path


@pytest.fixture
def prune(tba_buffer, trained):
    def run(*arguments: object):
        return tba_buffer("prune", "-b", trained, *arguments)

    return run


def test_old_trajectories_and_their_batches_are_deleted(prune, trained):
    done = prune(*OLD, "--yes", "--json").json
    assert (done["trajectories"], done["batches"], done["trajectories_kept"]) == (4, 2, 4)
    assert ask(trained, "SELECT id FROM trajectories") == [(5,), (6,), (7,), (8,)]
    assert ask(trained, "SELECT DISTINCT step FROM consumption") == [(2,), (3,)]
    assert ask(trained, "SELECT trajectory FROM reference_logprobs") == [(5,), (7,)]
    assert ask(trained, "SELECT trajectory FROM rescored_logprobs") == [(5,), (6,), (7,), (8,)]
    assert {finding["result"] for finding in check(trained)} == {"ok"}


def test_a_trajectory_that_a_kept_batch_uses_is_kept(prune, trained):
    change(trained, "UPDATE consumption_rows SET trajectory = 1 WHERE batch = 3 AND slot = 0")
    prune(*OLD, "--yes")
    assert (1,) in ask(trained, "SELECT id FROM trajectories")


def test_after_an_interruption_no_trained_trajectory_looks_untrained_and_the_next_prune_completes(
    prune, trained, monkeypatch
):
    execute = DatabaseFile.execute

    def cut_off(self, statement, *values):
        if statement.startswith("DELETE FROM batches"):
            raise RuntimeError("cut off")
        return execute(self, statement, *values)

    with monkeypatch.context() as patched:
        patched.setattr(DatabaseFile, "execute", cut_off)
        with pytest.raises(RuntimeError, match="cut off"):
            prune(*OLD, "--yes")
    untrained = "SELECT id FROM trajectory_rows WHERE id NOT IN (SELECT trajectory FROM consumption_rows)"
    assert ask(trained, untrained) == []
    prune(*OLD, "--yes")
    assert ask(trained, "SELECT pruned, pruned_slots FROM runs") == [(4, 4)]
    assert {finding["result"] for finding in check(trained)} == {"ok"}


def test_a_pruned_run_repeats_its_kept_steps_and_continues(prune, trained, harness, trajectory):
    before = harness(trained, buffer=RECENT)
    batch = before.sample(2, prompts=1, samples=2)
    received, sampled = before.service.state.trajectories, before.service.state.sampled
    before.store.close()
    prune(*OLD, "--yes")
    after = harness(trained, buffer=RECENT)
    assert after.sample(2, prompts=1, samples=2) == batch
    assert (after.service.state.trajectories, after.service.state.sampled) == (received, sampled) == (8, 8)
    visit = after.lease(1, version=3).visits[0]
    after.put([trajectory(visit.prompt_key, visit.lease, version=3, tokens=[9])], first_sequence=8)
    assert ask(trained, "SELECT MAX(id) FROM trajectories") == [(9,)]


def test_what_is_still_needed_or_not_confirmed_is_not_deleted(prune, trained, harness, tmp_path):
    refused = prune("--before-step", 3, "--keep-steps", 2, "--yes")
    assert (refused.exit_code, "steps from 2 on stay (--keep-steps 2 of 4" in refused.message) == (2, True)
    checkpoint = trained.parent / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    assert "steps from 1 on stay (the oldest checkpoint next to it)" in prune(*OLD, "--yes").message
    checkpoint.rmdir()
    assert "--export FILE keeps" in prune(*OLD).message
    assert "name what to delete" in prune("--yes").message
    (tmp_path / "old.jsonl").write_text("")
    assert "exists" in prune(*OLD, "--export", "old.jsonl").message
    assert prune(*OLD, "--dry-run").output.startswith("would delete 4 trajectories and 2 batches of run test, 4 stay")
    harness(trained)
    assert "a buffer server has" in prune(*OLD, "--yes").message
    assert len(ask(trained, "SELECT id FROM trajectories")) == 8


def test_an_export_holds_what_is_deleted_and_an_import_brings_it_back(prune, trained, tmp_path, tba_buffer):
    done = prune(*OLD, "--export", "old.jsonl", "--json").json
    assert done["exported"] == 4
    lines = [json.loads(line) for line in (tmp_path / "old.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, 2, 3, 4]
    assert tba_buffer("import", "old.jsonl", "-b", trained, "--set", "run.name=test").exit_code == 0
    assert len(ask(trained, "SELECT id FROM trajectories")) == 8


def test_a_whole_run_is_deleted_and_the_others_stay(prune, trained):
    assert "is the only run" in prune("--run", "test", "--yes").message
    store = Store(trained, durability="process")
    store.open_run("second", seed=0, config={}, software={})
    store.close()
    change(trained, "UPDATE trajectory_rows SET run = 2 WHERE id > 6")
    done = prune(*OLD, "--run", "test", "--dry-run", "--json").json
    assert (done["trajectories"], done["trajectories_kept"]) == (4, 2), "only those of the run count as kept"
    change(trained, "UPDATE trajectory_rows SET run = 1")
    assert prune("--run", "test", "--yes").exit_code == 0
    assert ask(trained, "SELECT name FROM runs") == [("second",)]
    for table in ("starts", "senders", "prompts", "visits", "trajectory_rows", "payloads", "kept_tokens", "batches"):
        assert ask(trained, f"SELECT COUNT(*) FROM {table} WHERE rowid != 2") == [(0,)]
    assert {finding["result"] for finding in check(trained)} == {"ok"}


def test_a_run_is_named_or_the_only_one(tmp_path):
    assert choose_run(tmp_path, "a", None, "--run") == choose_run(tmp_path, "ab", "a", "--run") == "a"
    for names, name in (("a", "x"), ("ab", None), ("aa", "a"), ("", None)):
        with pytest.raises(UsageError, match="name one with --run$"):
            choose_run(tmp_path, names, name, "--run")
