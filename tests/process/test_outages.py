"""Real searchers that come, go, die and are cut off: nothing is lost, nothing is skipped, generation goes on."""

import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tba.common import wire
from tba.searcher.spool_records import Record, scan

from .announcer import Announcer
from .proxy import Proxy

SAMPLES = 4
IN_FLIGHT = 32
TWO_LOADS = 2 * IN_FLIGHT // SAMPLES  # groups
PROMPTS = 96


class System:
    """A buffer with weights announced, searchers, and a network between them that can be cut."""

    def __init__(self, run: Any, start_tba: Callable[..., subprocess.Popen[bytes]], model: Path, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.spool = run.directory / "spool"
        self._start_tba = start_tba
        self._started = 0
        self.serve()
        self.announcer = Announcer(run.address, model, folder / "snapshots")
        self.announcer.announce(0)
        self.network = Proxy(run.address)

    def serve(self) -> None:
        self.buffer = self._start("buffer", "serve")

    def search(self, label: int, *, through: str | None = None) -> "Process":
        """A searcher; `through` is the address that it dials, the buffer's own by default."""
        sets = ("--set", f"buffer.address={through}") if through else ()
        process = self._start("search", "--cpu", "1", "--index", str(label), *sets)
        return Process(self, process, f"-cpu{label}.", self.folder / f"tba{self._started - 1}.log")

    def close(self) -> None:
        self.announcer.client.close()
        self.network.close()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        self._started += 1
        return self._start_tba(*command, "--config", self.run.file)

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.run.database}?mode=ro", uri=True) as database:
            return database.execute(sql, values).fetchall()

    def status(self) -> wire.Status:
        return self.announcer.client.call(wire.GetStatus(), wire.Status, deadline_seconds=10)[0]

    def stored(self) -> dict[str, list[int]]:
        """The sequence numbers that the database has, by sender."""
        found: dict[str, list[int]] = {}
        sql = "SELECT s.sender, t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender ORDER BY 1, 2"
        for sender, sequence in self.query(sql):
            found.setdefault(sender, []).append(sequence)
        return found


class Process:
    """One searcher process."""

    def __init__(self, system: System, process: subprocess.Popen[bytes], label: str, log: Path) -> None:
        self._system = system
        self._label = label
        self._log = log
        self._before = set(system.stored()) | {path.name for path in system.spool.glob("*")}
        self.process = process

    @property
    def sender(self) -> str:
        """Its name and start, known from the spool that it makes when it has joined."""
        (name,) = self._spools()
        return name

    def _spools(self) -> list[str]:
        names = [path.name for path in self._system.spool.glob(f"[!.]*{self._label}*")]
        return [name for name in names if name not in self._before]

    def wait_for_rows(self, more: int = 1) -> str:
        """Wait until the buffer has so many more rows of this searcher. Returns its sender."""
        wait_until(self._spools)
        sender = self.sender
        there = len(self._system.stored().get(sender, []))
        wait_until(lambda: len(self._system.stored().get(sender, [])) >= there + more)
        return sender

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def leave(self) -> int:
        """SIGTERM. Returns the number of rows that it says to have made over, once it has drained."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log()
        return int(re.findall(r" left rows=(\d+)", self.log())[-1])


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def spooled(directory: Path) -> list[tuple[int, int]]:
    """(first sequence number, rows) of every put in a spool."""
    puts = []
    for path in sorted(directory.glob("*.puts")):
        for record in scan(path.read_bytes()):
            if isinstance(record, Record):
                body = msgpack.unpackb(record.frames[0])["body"]
                puts.append((body["first_sequence"], len(body["rows"]["prompt_key"])))
    return puts


@pytest.fixture
def system(make_config, start_tba, example_model, tmp_path):
    """Makes the system; keyword arguments are sections of the configuration."""
    made: list[System] = []

    def make(**sections: dict[str, Any]) -> System:
        defaults = {
            "model": {"path": str(example_model), "dtype": "float32"},
            "task": {"name": "arithmetic", "limit": PROMPTS},
            "buffer": {"lease_seconds": 4.0},
            "search": {
                "engine": "transformers",
                "samples_per_prompt": SAMPLES,
                "max_in_flight": IN_FLIGHT,
                "max_tokens": 6,
            },
        }
        merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in {**defaults, **sections}}
        made.append(System(make_config(**merged), start_tba, example_model, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def check_history(system: System, tba: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Every group whole, every prompt of a finished epoch visited once, and what `tba buffer check` looks at."""
    groups = system.query("SELECT visit, prompt, COUNT(*) FROM trajectory_rows GROUP BY visit, prompt")
    assert [group for group in groups if group[2] % SAMPLES] == []
    visits = system.query("SELECT epoch, COUNT(*), COUNT(DISTINCT prompt), COUNT(done_at) FROM visits GROUP BY epoch")
    assert [epoch for epoch, count, different, _ in visits if count != different] == []
    # Open visits are in the newest two epochs: older ones are leased again before any new one.
    assert [row for row in visits[:-2] if row[1:] != (PROMPTS, PROMPTS, PROMPTS)] == []
    result = tba("buffer", "check", "--config", system.run.file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_generation_goes_on_during_a_silent_cut_of_30_s_and_everything_comes_once(system, tba):
    here = system()
    direct, behind = here.search(0), here.search(1, through=here.network.address)
    direct.wait_for_rows()
    sender = behind.wait_for_rows(SAMPLES * TWO_LOADS)
    here.network.silence()
    ends = time.monotonic() + 30
    before = len(here.stored()[sender])
    wait_until(lambda: len(spooled(here.spool / sender)) > 3 * TWO_LOADS)
    # The other one goes on, and gets the prompts of the one that is away.
    others = len(here.stored()[direct.sender])
    wait_until(lambda: "leases expired" in (here.folder / "tba0.log").read_text())
    middle = len(spooled(here.spool / sender))
    wait_until(lambda: len(here.stored()[direct.sender]) > others + SAMPLES * TWO_LOADS)
    wait_until(lambda: time.monotonic() > ends)
    assert len(spooled(here.spool / sender)) > middle
    assert len(here.stored()[sender]) <= before + SAMPLES * TWO_LOADS
    here.network.heal()
    behind.wait_for_rows(SAMPLES)
    made = behind.leave()
    assert here.stored()[sender] == list(range(made))
    ((unleased,),) = here.query("SELECT COUNT(*) FROM trajectory_rows WHERE visit = 0")
    assert unleased > 0
    assert "the buffer is away" in behind.log()
    assert not (here.spool / sender).exists()
    direct.leave()
    check_history(here, tba)


def test_a_server_that_is_restarted_during_a_cut_gets_everything_afterwards(system, tba):
    here = system()
    searcher = here.search(0, through=here.network.address)
    sender = searcher.wait_for_rows()
    here.network.cut()
    here.buffer.kill()
    here.buffer.wait()
    here.serve()
    wait_until(lambda: len(spooled(here.spool / sender)) > 3 * TWO_LOADS)
    here.network.heal()
    searcher.wait_for_rows(SAMPLES)
    made = searcher.leave()
    assert here.stored()[sender] == list(range(made))
    check_history(here, tba)


def test_the_spool_of_a_searcher_that_was_killed_during_a_cut_is_delivered_by_the_next(system, tba):
    here = system()
    first = here.search(0, through=here.network.address)
    sender = first.wait_for_rows()
    here.network.cut()
    wait_until(lambda: len(spooled(here.spool / sender)) > 3 * TWO_LOADS)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    last, rows = spooled(here.spool / sender)[-1]
    here.network.heal()
    open_before = [visit for (visit,) in here.query("SELECT id FROM visits WHERE done_at IS NULL")]
    second = here.search(0, through=here.network.address)
    wait_until(lambda: not (here.spool / sender).exists() and "delivered the spool" in second.log())
    assert here.stored()[sender] == list(range(last + rows))
    # What it had leased and not answered is done by the next one.
    assert open_before
    marks = ",".join(map(str, open_before))
    wait_until(lambda: here.query(f"SELECT COUNT(*) FROM visits WHERE done_at IS NULL AND id IN ({marks})") == [(0,)])
    second.leave()
    check_history(here, tba)


def test_searchers_join_a_running_system_and_leave_it_and_their_prompts_go_to_others_at_once(system, tba):
    # Leases that expired could not be what gives the prompts to others: that would take longer than the test.
    here = system(buffer={"lease_seconds": 600.0})
    first = here.search(0)
    first.wait_for_rows()
    second = here.search(1)
    sender = second.wait_for_rows()
    made = second.leave()
    assert here.stored()[sender] == list(range(made))
    assert [(c.activity, c.leases) for c in here.status().clients if c.sender == sender] == [("gone", 0)]
    assert not (here.spool / sender).exists()
    newest = here.query("SELECT MAX(id) FROM visits")[0][0]
    wait_until(lambda: here.query("SELECT COUNT(*) FROM visits WHERE done_at IS NULL AND id <= ?", newest) == [(0,)])
    first.leave()
    check_history(here, tba)


def test_a_searcher_with_a_full_spool_pauses_and_says_so_and_goes_on_when_the_buffer_is_back(system, tba):
    here = system(search={"spool_mib": 0.2})
    searcher = here.search(0, through=here.network.address)
    sender = searcher.wait_for_rows()
    here.network.cut()
    wait_until(lambda: "the spool is full (0.2 MiB): waiting for the buffer at tcp://" in searcher.log())
    full = spooled(here.spool / sender)
    assert sum(path.stat().st_size for path in (here.spool / sender).glob("*.puts")) < 0.4 * (1 << 20)
    here.network.heal()
    last, rows = full[-1]
    wait_until(lambda: len(here.stored()[sender]) > last + rows)
    made = searcher.leave()
    assert here.stored()[sender] == list(range(made))
    check_history(here, tba)
