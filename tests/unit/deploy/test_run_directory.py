"""A directory belongs to one `tba run`, and tells the states of runs, which `tba runs` finds.

Two locks in one process exclude each other like those of two processes.
"""

import html
import re
import socket
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.server.start import serve as serve_buffer
from tba.buffer.store.store import Store
from tba.buffer.tools.stats import read_results
from tba.cli.checks import Plan, check_start
from tba.common.config import Config
from tba.common.errors import ConfigError, RunTaken, UsageError
from tba.common.evaluations import record_evaluations
from tba.common.run_status import Facts, ask_status, describe
from tba.common.system.durable import exclusive_lock
from tba.common.system.process import NotifySocket
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.deploy import run_directory
from tba.deploy.launcher import evaluate_in_child
from tba.deploy.run_directory import (
    ENDING,
    EVALUATES,
    await_previous,
    last_launch,
    list_runs,
    local_state,
    mark,
    refuse_start,
    sole_launcher,
)
from tba.tests.helpers.browser import client as browse
from tba.tests.helpers.browser import copies
from tba.tests.helpers.buffer import change
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.nodes import wait_until
from tba.tests.helpers.puts import connected, make_trajectory, prepare, put_message


@pytest.fixture
def make_run(tmp_path: Path):
    """Make a directory that looks like that of a run; `lock` is the content of the launcher's lock file."""

    def make(name: str, lock: str | None = None, *, log: bytes = b"") -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "buffer.sqlite").touch()
        (folder / "buffer.sqlite-wal").write_bytes(log)
        if lock is not None:
            (folder / "launcher.lock").write_text(lock)
        return folder

    return make


def read(_: Path, **changes: Any) -> list[dict[str, Any]]:
    """What `read_results` returns of a database with one run."""
    return [{"run": "r", "steps": 8, "planned": 8, "reward": 0.746, "changed_at": 1e9, "finished": False} | changes]


def states(directory: Path, **result: Any) -> dict[str, tuple[str, str]]:
    rows = list_runs(directory, partial(read, **result))
    return {Path(row["directory"]).name: (row["state"], row["why"]) for row in rows}


def test_the_state_of_a_run_follows_from_its_locks_and_its_end(make_run, tmp_path):
    make_run("stopped", "pid 1 on h\nending\n")
    make_run("failed", "pid 1 on h\nfailed: the trainer failed\nending\n")
    make_run("killed", f"pid 1 on {socket.gethostname()}\n")
    make_run("power", log=b"x")
    make_run("by-hand")
    held = make_run("held", "pid 1 on h\n")
    (tmp_path / "runs/held/snapshots/deep").mkdir(parents=True)
    with exclusive_lock(held / "launcher.lock", ""):
        found = states(tmp_path)
    expected = dict.fromkeys(("failed", "killed", "power"), "crashed") | {"held": "starting"}
    expected |= dict.fromkeys(("stopped", "by-hand"), "stopped")
    assert {name: state for name, (state, _) in found.items()} == expected
    assert found["failed"][1] == "the trainer failed"
    assert {state for state, _ in states(tmp_path, finished=True).values()} == {"finished"}


def test_a_run_whose_database_is_a_link_has_the_state_of_the_file(make_run, tmp_path):
    folder, disk = make_run("linked"), tmp_path / "disk"
    disk.mkdir()
    (folder / "buffer.sqlite").rename(disk / "rows.sqlite")
    (folder / "buffer.sqlite").symlink_to(disk / "rows.sqlite")
    with exclusive_lock(disk / "rows.sqlite.lock", ""):
        assert states(tmp_path / "runs")["linked"][0] == "running"
    (disk / "rows.sqlite-wal").write_bytes(b"x")
    assert states(tmp_path / "runs")["linked"][0] == "crashed"


def test_runs_without_a_name_are_listed_by_their_directory_and_what_cannot_be_read_is_a_row(make_run, tmp_path):
    for name in ("first", "second"):
        make_run(name)
    rows = list_runs(tmp_path, partial(read, run="run"))
    assert {(row["name"], row["run"]) for row in rows} == {("first", "run"), ("second", "run")}
    row, _ = list_runs(tmp_path, read_results)
    assert (row["state"], "is not a buffer database" in row["why"]) == ("unreadable", True), row["why"]


def test_a_run_is_listed_with_its_steps_and_its_last_reward(filled, make_run, tmp_path):
    (row,) = read_results(filled)
    assert (row["run"], row["steps"], row["finished"]) == ("test", 1, False)
    folder = make_run("a")
    filled.rename(folder / "buffer.sqlite")
    record_evaluations(folder, [{"run": "test", "step": 1, "version": 1, "prompts": 9, "accuracy": 0.5}])
    (listed,) = list_runs(tmp_path / "runs", read_results)
    assert (listed["run"], listed["state"], listed["accuracy"]) == ("test", "stopped", 0.5)


def test_a_database_with_odd_values_hides_no_other_run_and_times_are_in_utc(filled, tmp_path, monkeypatch):
    changes = {
        "a": "UPDATE batches SET metrics = '[1]', trained_at = 0.0",
        "b": "UPDATE starts SET config = '{nope'",
        "c": "UPDATE batches SET trained_at = 1e300",
        "d": "UPDATE batches SET metrics = '{nope'",
    }
    for path, sql in zip(copies(filled, tmp_path / "runs", *changes), changes.values(), strict=True):
        change(path, sql)
    with monkeypatch.context() as new_york:
        new_york.setenv("TZ", "America/New_York")
        time.tzset()
        rows = {Path(row["directory"]).name: row for row in list_runs(tmp_path / "runs", read_results)}
    time.tzset()
    found = {name: (row["state"], row["why"].partition(": ")[2]) for name, row in rows.items()}
    unreadable = ("unreadable", "malformed JSON")
    assert found == {"a": ("stopped", ""), "b": unreadable, "c": ("stopped", ""), "d": unreadable}
    assert (rows["a"]["changed"], rows["a"]["reward"], rows["c"]["changed"]) == ("1970-01-01 00:00:00 UTC", None, "")


def test_the_status_of_a_run_says_what_it_came_to_and_how_it_goes_on(make_run):
    folder = make_run("done", log=b"x")
    record_evaluations(folder, [{"run": "r", "version": 8, "step": 8, "prompts": 4, "accuracy": 0.887}])
    config = Config.model_validate({"run": {"dir": str(folder), "name": "r"}})

    def told(**changes: Any) -> str:
        sentence: str = not_none(local_state(config, partial(read, **changes)))["explanation"]
        return sentence

    offline = "`tba train --offline --buffer runs/a/buffer.sqlite --resume` continues it"
    assert offline in told(source="runs/a/buffer.sqlite")
    assert f"run {folder} --resume` continues it" in told()
    again = "--resume` (set TBA_SEARCH__SERVE_TOKEN again: a secret is not recorded) continues it"
    assert again in told(secrets=["search.serve_token"])
    finished = "is finished, and nothing serves it any more: 8/8 steps, reward 0.746, accuracy 0.887"
    assert finished in told(finished=True)
    assert f"run {folder} --resume --set train.steps=16` extends it" in told(finished=True)
    with exclusive_lock(folder / "trainer.lock", ""):
        assert "its trainer waits for the buffer: `tba buffer serve`" in told()
    with exclusive_lock(folder / "buffer.sqlite.lock", ""):
        assert "finished, and a program has the database open" in told(finished=True)


@pytest.mark.slow
def test_the_status_of_a_run_that_ended_early_says_how_to_continue_it(filled, make_run, tba_here):
    folder = make_run("early", "pid 1 on h\nfailed: no disk\nending\n")
    filled.rename(folder / "buffer.sqlite")
    outcome = tba_here("status", "--set", f"run.dir={folder}", "--set", "run.name=test")
    assert outcome.exit_code == 0
    sentence = f"run test in {folder} has crashed (no disk), and nothing serves it any more: 1"
    assert sentence in outcome.output
    assert f"run {folder} --resume` continues it" in outcome.output
    assert tba_here("status", folder).output == outcome.output
    later = tba_here("status", "--set", f"run.dir={folder.parent / 'later'}")
    assert f"there is no run in {folder.parent / 'later'} yet: `tba run` starts one" in later.message
    none = tba_here("status", folder.parent)
    assert (none.exit_code, "holds no buffer.sqlite: it is not the directory of a run" in none.message) == (2, True)


class Walk:
    """One run, and what each place says of it. `serve` is the real server, with a socket in place of systemd."""

    def __init__(self, folder: Path, systemd: NotifySocket) -> None:
        run = {"run": {"dir": str(folder), "name": "test"}, "train": {"prompts_per_step": 1, "samples_per_prompt": 2}}
        self.config, self.systemd = Config.model_validate(run), systemd
        self.last = ""

    @contextmanager
    def serve(self):
        """Serve the buffer in a thread."""
        stopped = threading.Event()
        thread = threading.Thread(target=serve_buffer, args=(self.config, stopped.is_set))
        thread.start()
        with connected(self.config.address, "monitor", "launcher") as self.launcher:
            self.launcher.call(messages.GetStatus(), messages.Status, deadline_seconds=30)
            try:
                yield
            finally:
                stopped.set()
                thread.join(30)

    def tell(self, activity: str, **metrics: float) -> None:
        """Report as the launcher's supervisor does."""
        beat(self.launcher, activity, "on h: trainer failed 3 times", **metrics)

    def says(self, state: str, words: str, *, served: bool = True) -> None:
        """Compare the list of runs, the status, the browser and, of a run that is served, the display and systemd."""
        status = ask_status(self.launcher) if served else None
        found = {"runs": list_runs(self.config.run.dir, read_results)[0]}
        found["status"] = not_none(local_state(self.config, read_results, status))
        badge = re.search(
            r'badge (\w+)".*?<span.*?>(.*?)</span>', browse(self.config.run.dir).get("/r/test").text, re.S
        )
        texts = {"browser": html.unescape(not_none(badge)[2])} | {name: row["why"] for name, row in found.items()}
        if served:
            texts["display"] = describe(Facts(status)).sentence
            wait_until("systemd", partial(self._is_told, texts["display"]), 10)
        assert {not_none(badge)[1], *(row["state"] for row in found.values())} == {state}
        assert len(set(texts.values())) == 1, texts
        assert words in texts["runs"]

    def _is_told(self, sentence: str) -> bool:
        self.last = next((text for text in reversed(self.systemd.receive()) if "STATUS=step" in text), self.last)
        return self.last.endswith(sentence)


def beat(client: BufferClient, activity: str, reason: str = "", **metrics: float) -> None:
    message = messages.Heartbeat(activity=activity, reason=reason, weights_version=None, metrics=metrics)
    client.call(message, messages.Done, deadline_seconds=30)


@pytest.mark.slow
def test_every_place_says_the_same_of_a_run_from_its_start_to_its_last_evaluation(tmp_path, monkeypatch):
    with closing(NotifySocket()) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
        walk = Walk(tmp_path / "run", systemd)
        with sole_launcher(walk.config):
            (starting,) = list_runs(tmp_path, read_results)
            assert (starting["state"], starting["why"]) == describe(Facts(None, starting=True))
            with walk.serve(), connected(walk.config.address, "trainer") as trainer:
                walk.tell("watching", trainer=1.0)
                walk.says("starting", "the trainer is loading the model")
                walk.tell("watching")
                with connected(walk.config.address, "searcher") as searcher:
                    prepare(searcher)
                    trainer.call(messages.Hello(host="h", pid=1), messages.Welcome, deadline_seconds=30)
                    beat(trainer, "waiting")
                    ask = messages.SampleBatch(step=0, prompts=1, samples=2, reference="initial", wait_seconds=60)
                    trainer.post(ask)
                    trainer.poll(0.5)
                    walk.says("running", "the trainer waits for data")
                    put, frames = put_message([make_trajectory("p0", lease=0, tokens=[n]) for n in range(2)])
                    searcher.post(put, frames)
                    wait_until("acknowledgement", partial(searcher.poll, 1.0), 30)
                    wait_until("batch", partial(trainer.poll, 1.0), 30)
                    beat(trainer, "training")
                    walk.says("running", "the trainer is training")
                    searcher.call(messages.Goodbye(), messages.Done, deadline_seconds=30)
                walk.tell("failing")
                walk.says("stalled", "trainer failed 3 times")
                walk.tell("watching")
                report = messages.ReportStep(
                    step=0, metrics={}, reference="initial", trajectory_ids=[], reference_logprobs=[]
                )
                trainer.call(report, messages.Done, deadline_seconds=30)
                trainer.call(messages.FinishRun(step=0), messages.Done, deadline_seconds=30)
                walk.says("finished", "finished after 1 step")
            mark(walk.config, EVALUATES, "`tba run` evaluates snapshot 3 of 9")
            walk.says("evaluating", "finished after 1 step; `tba run` evaluates snapshot 3 of 9", served=False)
            mark(walk.config, ENDING)
        assert not_none(local_state(walk.config, read_results))["state"] == "finished"
        with walk.serve():
            walk.says("finished", "finished after 1 step; the buffer serves it again")
            walk.tell("watching", trainer=1.0)
            walk.says("starting", "the trainer is loading the model")


@pytest.fixture
def config(tmp_path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "buffer": {"address": f"ipc://{tmp_path}/buffer.socket"},
            "launch": {"drain_seconds": 0.1},
        }
    )


def never() -> bool:
    return False


def test_an_unused_directory_causes_no_wait_and_is_not_created(config):
    await_previous(config, never, pytest.fail)
    assert not config.run.dir.exists()
    with sole_launcher(config):
        pass
    await_previous(config, never, pytest.fail)


@pytest.mark.slow
def test_the_wait_for_the_previous_run_ends_after_a_deadline_and_is_reported_once(config, monkeypatch):
    monkeypatch.setattr(run_directory, "_MARGIN_SECONDS", 1.7)
    reports: list[str] = []
    with sole_launcher(config):
        mark(config, ENDING)
        with pytest.raises(RunTaken, match="has not ended within 2 s: "):
            await_previous(config, never, reports.append)
    assert len(reports) == 1
    assert "is still ending: waiting for it, 2 s at most" in reports[0]


@pytest.mark.slow
def test_a_stop_signal_ends_the_wait_and_the_next_holder_is_not_marked_as_ending(config):
    reports: list[str] = []
    with sole_launcher(config):
        mark(config, ENDING)
        await_previous(config, lambda: bool(reports), reports.append)
    assert len(reports) == 1
    assert not_none(last_launch(config.run.dir)).ending
    with sole_launcher(config), pytest.raises(RunTaken, match="is in use by another"):
        await_previous(config, never, pytest.fail)


def test_a_run_that_is_stopped_before_its_evaluation_is_marked_as_ending(config):
    lock_file = config.run.dir / "launcher.lock"
    with sole_launcher(config):
        assert "ending" not in lock_file.read_text()
        assert not evaluate_in_child(config, [], stop=lambda: True, tell=pytest.fail)
        assert "ending" in lock_file.read_text()


def refusal(config: Config, *, resume: bool, **changes: Any) -> str:
    """Return why a run does not start, after `changes` of what its database says of the run."""
    results = [result | changes for result in read_results(config.database)]
    with pytest.raises((UsageError, ConfigError)) as refused:
        refuse_start(config, results, resume=resume)
    return str(refused.value)


@pytest.fixture
def own(tmp_path, example_model) -> Config:
    """The run `own`, with a database and metrics."""
    config = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run", "name": "own"},
            "model": {"path": str(example_model)},
            "task": {"name": "arithmetic"},
            "search": {"engine": "transformers", "gpus": "cpu"},
            "train": {"gpu": "cpu", "steps": 30},
        }
    )
    config.run.dir.mkdir()
    with closing(Store(config.database, durability="process")) as store:
        store.open_run("own", seed=0, config={"train": {"steps": 30}}, software={})
    (config.run.dir / "metrics.jsonl").write_text('{"step": 0}\n')
    return config


@pytest.mark.parametrize("resume", [True, False])
def test_a_start_under_another_name_is_refused_and_writes_nothing(own, resume):
    renamed = own.model_copy(update={"run": own.run.model_copy(update={"name": "doubling"})})
    before = own.database.read_bytes()
    sentence = refusal(renamed, resume=resume)
    assert 'belongs to run own, and run.name is doubling: set run.name = "own"' in sentence
    assert own.database.read_bytes() == before
    with pytest.raises(ConfigError, match='belongs to run own, and run.name is doubling: set run.name = "own"'):
        serve_buffer(renamed, lambda: True)
    assert [row["run"] for row in read_results(own.database)] == ["own"]
    check_start(Plan(own, resume=True))


def test_a_fresh_start_in_the_database_of_an_offline_run_is_refused_wherever_that_is(own, tmp_path):
    elsewhere = own.model_copy(update={"run": own.run.model_copy(update={"dir": tmp_path / "new"}),
                                       "buffer": own.buffer.model_copy(update={"database": own.database})})  # fmt: skip
    refuse_start(elsewhere, read_results(own.database), resume=False)
    assert "was trained offline from /old.sqlite" in refusal(elsewhere, resume=False, source="/old.sqlite")


def test_a_run_is_resumed_until_it_is_finished_and_then_only_extended(own):
    assert "already holds a run: add --resume" in refusal(own, resume=False)
    check_start(Plan(own, resume=True))
    sentence = refusal(own, resume=True, steps=31)
    assert "holds run own, which has made 31 steps, and train.steps is 30: set a larger one" in sentence
    finished = {"steps": 30, "finished": True}
    for resume in (True, False):
        sentence = refusal(own, resume=resume, **finished)
        assert "run own, which is finished (30 of 30 steps): extend it with --resume" in sentence
    longer = own.model_copy(update={"train": own.train.model_copy(update={"steps": 31})})
    refuse_start(longer, [result | finished for result in read_results(own.database)], resume=True)
    assert "finished (30 of 30 steps)" in refusal(longer, resume=False, **finished)


def test_a_run_on_the_cpu_does_not_ask_a_broken_driver(own, tmp_path, monkeypatch):
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_start(Plan(own, resume=True))
    on_gpus = own.model_copy(update={"train": own.train.model_copy(update={"gpu": "0"})})
    with pytest.raises(UsageError, match="nvidia-smi"):
        check_start(Plan(on_gpus, resume=True))
