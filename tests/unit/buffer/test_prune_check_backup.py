"""`tba buffer prune`, `check` and `backup`."""

import json
from contextlib import closing
from typing import Any

import pytest

from tba.buffer.store.database import DatabaseFile
from tba.buffer.store.starts import choose_run
from tba.buffer.store.store import Store
from tba.buffer.tools import check
from tba.buffer.tools.backup import backup
from tba.common.config import Config
from tba.common.errors import Refused, StorageError, UsageError
from tba.common.wire.trajectory import ARRAY_KINDS
from tba.tests.helpers.buffer import ask, change
from tba.tests.helpers.puts import log_ratios, numbers_of

TEST_RUN = ["--set", "run.name=test"]


# ---------------------------------------------------------------- prune --tokens


@pytest.fixture
def capped(harness, trajectory):
    """One prompt with ten trajectories, of which two can be sampled; step 0 was trained on the first two."""
    buffer = harness(buffer={"prompt_cap": 2}, fill=(1, 0))
    buffer.put([trajectory(tokens=[n] * 2000) for n in range(2)], 0)
    buffer.sample(0, prompts=1, samples=2)
    buffer.report(0, rows=numbers_of(2, token_log_ratios=log_ratios([0.5] * 2000, [0.5] * 2000)))
    buffer.put([trajectory(tokens=[n] * 2000) for n in range(2, 10)], 2)
    buffer.store.close()
    return buffer.store.path


CAP = [*TEST_RUN, "--set", "buffer.prompt_cap=2"]
LEFT = "SELECT trajectory FROM payloads ORDER BY trajectory"


@pytest.fixture
def drop(tba_buffer, capped):
    """Runs `tba buffer prune --tokens`, without steps that a trainer may repeat."""

    def run(*arguments: object, keep_steps: int = 0):
        return tba_buffer("prune", "--tokens", "-b", capped, "--keep-steps", keep_steps, "--json", *arguments)

    return run


def test_prune_of_tokens_drops_tokens_that_cannot_be_sampled(capped, tba_buffer, drop, harness, monkeypatch):
    change(
        capped, "INSERT INTO rescored_logprobs VALUES (1, 0, -1.0, NULL, NULL, x'00'), (9, 0, -1.0, NULL, NULL, x'00')"
    )
    said = tba_buffer("prune", "--tokens", "-b", capped, *CAP, "--keep-steps", 0, "--dry-run").output
    assert said.startswith("would drop the tokens of 8 trajectories of run test, ")
    assert said.endswith(" bytes, and keep those of 2; nothing was changed\n")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        refused = drop(*CAP)
    assert (refused.exit_code, "nothing was changed" in refused.message) == (1, True)
    assert len(ask(capped, LEFT)) == 10
    done = drop(*CAP).json
    assert (done["trajectories_compacted"], done["trajectories_kept"]) == (8, 2)
    assert done["file_bytes_after"] < done["file_bytes_before"]
    assert ask(capped, LEFT) == [(9,), (10,)]
    assert ask(capped, "SELECT COUNT(*), COUNT(compacted_at), COUNT(reward) FROM trajectories") == [(10, 8, 10)]
    # The log-ratios of tokens that are gone are dropped too, the numbers of the rows stay.
    assert ask(capped, "SELECT COUNT(*), COUNT(skipped), COUNT(token_log_ratios) FROM consumption_rows") == [(2, 2, 0)]
    assert ask(capped, "SELECT trajectory, logprobs FROM rescored_logprobs") == [(1, None), (9, b"\0")]
    buffer = harness(capped, buffer={"prompt_cap": 2})
    with pytest.raises(Refused, match="were dropped by `tba buffer prune --tokens`") as compacted:
        buffer.sample(0, prompts=1, samples=2)
    assert compacted.value.code == "compacted"
    assert buffer.sample(1, prompts=1, samples=2) is not None


def test_prune_of_tokens_keeps_batches_that_a_resumed_trainer_may_repeat(capped, drop, harness):
    """Those of the last steps, and those since the oldest checkpoint."""
    (capped.parent / "checkpoints" / "step_00000000").mkdir(parents=True)
    assert drop(*CAP).json["token_bytes"] > 0
    (capped.parent / "checkpoints" / "step_00000000").rmdir()
    assert drop(*CAP, keep_steps=1000).json["trajectories_compacted"] == 0
    assert ask(capped, "SELECT COUNT(compacted_at) FROM trajectories") == [(6,)]
    buffer = harness(capped, buffer={"prompt_cap": 2})
    assert len(buffer.sample(0, prompts=1, samples=2).frames) == len(ARRAY_KINDS) - 1


def test_prune_of_tokens_keeps_a_batch_that_is_not_trained_on_yet(harness, trajectory, tba_buffer):
    buffer = harness(buffer={"prompt_cap": 2}, fill=(1, 2))
    buffer.sample(0, prompts=1, samples=2)
    buffer.put([trajectory(tokens=[50 + n]) for n in range(2)], 100)
    buffer.store.close()
    assert tba_buffer("prune", "--tokens", "-b", buffer.store.path, *CAP, "--json").json["trajectories_compacted"] == 0


def test_a_sample_of_the_history_survives_that_the_tokens_of_the_others_are_dropped(harness, trajectory, tba_buffer):
    sampled: dict[str, dict[str, Any]] = {
        "buffer": {"max_trajectories": 6, "keep": "both"},
        "train": {"prompts_per_step": 1},
        "search": {"samples_per_prompt": 2},
    }
    buffer = harness(fill=(4, 0), **sampled)
    for step in range(10):
        buffer.announce(step + 1, step + 1)
        buffer.put([trajectory(f"p{step % 4}", version=step + 1, tokens=[n]) for n in range(2)], 2 * step)
    before = {*buffer.sampleable()}
    buffer.store.close()
    settings = [f"--set={name}.{key}={value}" for name, section in sampled.items() for key, value in section.items()]
    done = tba_buffer("prune", "--tokens", "-b", buffer.store.path, *TEST_RUN, *settings, "--keep-steps", 0, "--json")
    assert (done.json["trajectories_compacted"], done.json["trajectories_kept"]) == (14, 6)
    assert before == {id_ for (id_,) in ask(buffer.store.path, LEFT)}
    assert before == {*harness(buffer.store.path, **sampled).sampleable()}
    assert before > {18, 19, 20}, "the newest half of the room"
    assert min(before) < 18 - 3, "older ones than those that would be left without a sample"


def record_start(path, name: str = "test", **sections) -> None:
    """Record a start of a run, as a server does."""
    settings = Config.model_validate(sections).model_dump(mode="json")
    with closing(Store(path, durability="process")) as store:
        store.open_run(name, seed=0, config=settings, software={})


OVERRIDES = [([], 2), (["--set", "buffer.dedup=false"], 2), (["--set", "buffer.prompt_cap=4"], 4)]


@pytest.mark.parametrize(("given", "kept"), OVERRIDES)
def test_prune_of_tokens_uses_the_settings_recorded_last_below_its_options_and_needs_no_secret(
    capped, drop, given, kept
):
    record_start(capped, buffer={"prompt_cap": 5}, run={"name": "test"})
    record_start(capped, buffer={"prompt_cap": 2}, run={"name": "test"}, reward_model={"url": "http://a"})
    change(capped, "UPDATE starts SET config = json_set(config, '$.reward_model.api_key', '********** 188a')")
    done = drop(*given).json
    assert (done["run"], done["trajectories_kept"]) == ("test", kept)


def test_prune_of_tokens_is_of_the_run_that_is_named_whatever_the_configuration_says(capped, drop):
    record_start(capped, "other")
    record_start(capped, buffer={"prompt_cap": 2}, run={"name": "test"})
    done = drop("--set", "run.name=other", "--run", "test").json
    assert (done["run"], done["trajectories_kept"]) == ("test", 2)


ADD_START = "INSERT INTO starts (run, started_at, config, software) VALUES (1, 0.0, '{}', '{{}}')"


def test_recorded_settings_of_another_release_are_ignored_and_invalid_ones_named(capped, drop, tmp_path):
    change(capped, ADD_START.format('{"buffer": {"prompt_cap": 0}, "train": {"old": 1}, "o": 2}'))
    refused = drop()
    assert refused.exit_code == 78
    assert f"buffer.prompt_cap = 0 (recorded in {capped})" in refused.message
    # An unknown one of the buffer needs an explicit configuration.
    change(capped, ADD_START.format('{"run": {"name": "test"}, "buffer": {"old_cap": 2}}'))
    refused = drop("--set", "buffer.dedup=false")
    assert refused.exit_code == 2
    assert f"buffer.old_cap = 2 (recorded in {capped}) is not a setting of this release: pass" in refused.message
    assert len(ask(capped, LEFT)) == 10
    (tmp_path / "given.toml").write_text("[buffer]\nprompt_cap = 3\n")
    assert drop("--config", "given.toml").json["trajectories_kept"] == 3
    change(capped, "DELETE FROM starts WHERE config LIKE '%old_cap%'")
    assert drop(*CAP).json["trajectories_kept"] == 2


@pytest.mark.parametrize("named", [("-b", "other/buffer.sqlite"), ("--set", "run.dir=other")])
def test_prune_of_tokens_ignores_the_local_configuration_if_the_database_is_named(capped, tba_buffer, tmp_path, named):
    record_start(capped, buffer={"prompt_cap": 5}, run={"name": "test"})
    (tmp_path / "other").mkdir()
    capped.rename(tmp_path / "other" / "buffer.sqlite")
    (tmp_path / "tba.toml").write_text('[run]\nname = "here"\n[buffer]\nprompt_cap = 1\n')
    done = tba_buffer("prune", "--tokens", *named, "--keep-steps", 0, "--json").json
    assert (done["run"], done["trajectories_kept"]) == ("test", 5)


# ---------------------------------------------------------------- check


NO_SUCH_ROW = check._REFERENCES
TURNS = "the turns of an episode follow each other in its response"
# Each statement with the rule that it breaks.
BREAKAGES = {
    "DELETE FROM trajectory_rows WHERE id = 7": NO_SUCH_ROW,
    "UPDATE trajectory_rows SET prompt = 77 WHERE id = 7": NO_SUCH_ROW,
    "UPDATE consumption_rows SET trajectory = 77 WHERE slot = 2": NO_SUCH_ROW,
    "INSERT INTO consumption_rows (batch, slot, trajectory, staleness) VALUES (9, 0, 1, 0)": NO_SUCH_ROW,
    "INSERT INTO reference_logprobs VALUES (77, 'initial', -1.0)": NO_SUCH_ROW,
    "DELETE FROM payloads WHERE trajectory = 3": "every trajectory has its tokens",
    "UPDATE trajectory_rows SET compacted_at = 1.0 WHERE id = 3": "compacted trajectories have no tokens",
    "UPDATE trajectory_rows SET archive = 1 WHERE id = 3": "archived trajectories are compacted",
    "UPDATE trajectory_rows SET response_tokens = 4 WHERE id = 3": "token counts match the stored arrays",
    "UPDATE consumption_rows SET token_log_ratios = x'0000' WHERE slot = 0": "one log-ratio per token",
    """UPDATE trajectory_rows SET turns = '[{"start": 0, "tokens": 4}]'""": TURNS,
    """UPDATE trajectory_rows SET turns = '[{"start": 0, "tokens": 2}, {"start": 1, "tokens": 1}]'""": TURNS,
    "UPDATE trajectory_rows SET error_kind = NULL WHERE id = 7": "exactly the errors have a kind",
    "UPDATE prompts SET run = 2 WHERE id = 1": "a trajectory and its prompt belong to the same run",
    "UPDATE trajectory_rows SET policy_version = 5 WHERE id = 3": "every policy version was announced",
    "DELETE FROM consumption_rows WHERE slot = 5": "each batch has prompts × samples slots",
    "INSERT INTO visits (run, epoch, place, prompt, leased_at, done_at) VALUES (1, 1, 0, 1, 1.0, 2.0)": (
        "every done visit has a trajectory"
    ),
    "UPDATE visits SET place = 5 WHERE id = 2": "positions in an epoch have no gaps",
    "INSERT INTO visits (run, epoch, place, prompt, leased_at) VALUES (1, 0, 2, 1, 1.0)": (
        "a prompt occurs at most once per epoch"
    ),
    "UPDATE visits SET epoch = 1, place = 0 WHERE id = 2": "past epochs are complete",
}


def test_a_sound_database_passes_every_check_and_each_has_a_test_case(filled, tba_buffer):
    outcome = tba_buffer("check", "-b", filled, "--json")
    assert outcome.exit_code == 0
    assert {finding["result"] for finding in outcome.json} == {"ok"}
    assert {finding["check"] for finding in outcome.json} >= set(check._RULES)
    assert set(BREAKAGES.values()) == {*check._RULES, NO_SUCH_ROW}


@pytest.mark.parametrize(("breakage", "rule"), BREAKAGES.items())
def test_check_finds_every_violation(breakage, rule, filled):
    change(filled, breakage)
    assert rule in [finding["check"] for finding in check.check(filled) if finding["result"] == "fail"]


def test_gaps_in_a_senders_sequence_numbers_and_steps_that_a_backup_lacks_are_notes(filled, tba_buffer):
    change(filled, "UPDATE trajectory_rows SET sequence = 19 WHERE id = 7", "UPDATE batches SET step = 5")
    outcome = tba_buffer("check", "-b", filled, "--json", "--quick")
    assert outcome.exit_code == 0
    assert outcome.json[-2:] == [
        {"check": "steps have no gaps", "result": "note", "detail": "step 4 is missing"},
        {"check": "sequence numbers have no gaps", "result": "note", "detail": "s.1: 13 missing"},
    ]


# ---------------------------------------------------------------- backup


def test_a_backup_of_a_running_server_is_one_file_with_everything_committed(harness, tba_buffer, tmp_path):
    buffer = harness(fill=(2, 3))
    done = tba_buffer("backup", "copy.sqlite", "-b", buffer.store.path, "--json").json
    assert (done["file"], done["integrity"]) == ("copy.sqlite", "ok")
    assert done["bytes"] == (tmp_path / "copy.sqlite").stat().st_size
    assert [path.name for path in tmp_path.glob("*copy.sqlite*")] == ["copy.sqlite"]
    assert harness(tmp_path / "copy.sqlite").service.status().sampleable == 6


def test_writes_during_a_backup_neither_enter_nor_delay_it(harness, trajectory, tmp_path, monkeypatch):
    monkeypatch.setattr("tba.buffer.tools.backup._PAGES", 2)
    buffer = harness(fill=(1, 4))
    calls = []

    def write(done: int, total: int) -> None:
        calls.append((done, total))
        buffer.put([trajectory(tokens=[len(calls)] * 500)], first_sequence=1000 + len(calls))

    backup(buffer.store.path, tmp_path / "copy", force=False, progress=write)
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]
    assert ask(tmp_path / "copy", "SELECT COUNT(*) FROM trajectories") == [(4,)]


def test_a_backup_that_fails_leaves_no_file_and_a_damaged_file_fails_its_check(
    filled, tba_buffer, tmp_path, monkeypatch
):
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tba.buffer.tools.backup.sync", no_room)
        with pytest.raises(StorageError, match="No space left"):
            backup(filled, tmp_path / "copy", force=False, progress=lambda *_: None)
    data = bytearray(filled.read_bytes())
    data[8 * 8192 : 9 * 8192] = b"\xff" * 8192
    filled.write_bytes(data)
    outcome = tba_buffer("check", "-b", filled)
    assert (outcome.exit_code, "fail" in outcome.output) == (1, True)
    with pytest.raises(StorageError, match="failed its integrity check"):
        backup(filled, tmp_path / "copy", force=False, progress=lambda *_: None)
    assert not list(tmp_path.glob("*copy*"))


# ---------------------------------------------------------------- prune of rows


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


def test_old_trajectories_and_their_batches_are_deleted_and_an_import_of_their_export_brings_them_back(
    prune, trained, tmp_path, tba_buffer
):
    done = prune(*OLD, "--export", "old.jsonl", "--json").json
    assert (done["trajectories"], done["batches"], done["trajectories_kept"], done["exported"]) == (4, 2, 4, 4)
    assert ask(trained, "SELECT id FROM trajectories") == [(5,), (6,), (7,), (8,)]
    assert ask(trained, "SELECT DISTINCT step FROM consumption") == [(2,), (3,)]
    assert ask(trained, "SELECT trajectory FROM reference_logprobs") == [(5,), (7,)]
    assert ask(trained, "SELECT trajectory FROM rescored_logprobs") == [(5,), (6,), (7,), (8,)]
    assert {finding["result"] for finding in check.check(trained)} == {"ok"}
    lines = [json.loads(line) for line in (tmp_path / "old.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, 2, 3, 4]
    assert tba_buffer("import", "old.jsonl", "-b", trained, "--set", "run.name=test").exit_code == 0
    assert len(ask(trained, "SELECT id FROM trajectories")) == 8


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
    assert {finding["result"] for finding in check.check(trained)} == {"ok"}


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
    assert {finding["result"] for finding in check.check(trained)} == {"ok"}


def test_a_run_is_named_or_the_only_one(tmp_path):
    assert choose_run(tmp_path, "a", None, "--run") == choose_run(tmp_path, "ab", "a", "--run") == "a"
    for names, name in (("a", "x"), ("ab", None), ("aa", "a"), ("", None)):
        with pytest.raises(UsageError, match="name one with --run$"):
            choose_run(tmp_path, names, name, "--run")
