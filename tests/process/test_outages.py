"""Real searchers that join, leave, die and are cut off: nothing is lost or skipped, and generation continues."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tba.common.errors import RecordLost
from tba.common.wire.messages import GetStatus, Status
from tba.searcher.delivery.spool import read_put
from tba.tests.helpers.announcer import Announcer
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.proxy import Proxy
from tba.tests.process.conftest import arithmetic, merged
from tba.tests.runner import size

SAMPLES = 4
IN_FLIGHT = 32
# In groups.
TWO_LOADS = 2 * IN_FLIGHT // SAMPLES
PROMPTS = 96
# Longer than a lease.
CUT_SECONDS = size(8, 30)


class System:
    """A buffer with announced weights, searchers, and a network between them that can be cut."""

    def __init__(self, run: Any, start_tba: Callable[..., subprocess.Popen[bytes]], model: Path, folder: Path) -> None:
        self.run = run
        self.query = run.query
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
        """Start a searcher that connects to the address `through`, by default directly to the buffer."""
        sets = ("--set", f"buffer.address={through}") if through else ()
        process = self._start("search", "--cpu", "1", "--index", str(label), *sets)
        return Process(self, process, f"-cpu{label}.", self.folder / f"tba{self._started - 1}.log")

    def close(self) -> None:
        self.announcer.client.close()
        self.network.close()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        self._started += 1
        return self._start_tba(*command, "--config", self.run.file)

    def status(self) -> Status:
        return self.announcer.client.call(GetStatus(), Status, deadline_seconds=120)[0]

    def stored(self) -> dict[str, list[int]]:
        """Return the stored sequence numbers by sender."""
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
        """The sender id, which is the name of the spool that the searcher creates when it joins."""
        (name,) = self._spools()
        return name

    def _spools(self) -> list[str]:
        names = [path.name for path in self._system.spool.glob(f"[!.]*{self._label}*")]
        return [name for name in names if name not in self._before]

    def wait_for_rows(self, more: int = 1) -> str:
        """Wait until the buffer has `more` additional rows of this searcher. Returns its sender id."""
        wait_until(self._spools)
        sender = self.sender
        there = len(self._system.stored().get(sender, []))
        wait_until(lambda: len(self._system.stored().get(sender, [])) >= there + more)
        return sender

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def leave(self) -> int:
        """Send SIGTERM and wait. Returns the number of rows that the searcher logs."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log()
        return int(re.findall(r" left rows=(\d+)", self.log())[-1])


def spooled(directory: Path) -> list[tuple[int, int]]:
    """Return (first sequence number, number of rows) of every put in a spool that is in use."""
    puts = []
    for path in sorted(directory.glob("*.put")):
        # It may be acknowledged while this function reads.
        with contextlib.suppress(RecordLost):
            body = msgpack.unpackb(read_put(path)[0])["body"]
            puts.append((body["first_sequence"], len(body["rows"]["prompt_key"])))
    return puts


@pytest.fixture
def system(make_config, start_tba, example_model, tmp_path):
    """Create the system; keyword arguments are sections of the configuration."""
    made: list[System] = []

    def make(**sections: dict[str, Any]) -> System:
        search = {"samples_per_prompt": SAMPLES, "max_in_flight": IN_FLIGHT}
        defaults: dict[str, dict[str, Any]] = {
            "buffer": {"lease_seconds": 4.0},
            "task": {"limit": PROMPTS},
            "search": search,
        }
        run = make_config(**arithmetic(**merged(defaults, sections)))
        made.append(System(run, start_tba, example_model, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def check_history(system: System, tba_here: Callable[..., Any]) -> None:
    """Check that groups are complete and each prompt is visited once per finished epoch, and run `tba buffer check`."""
    groups = system.query("SELECT visit, prompt, COUNT(*) FROM trajectory_rows GROUP BY visit, prompt")
    assert [group for group in groups if group[2] % SAMPLES] == []
    visits = system.query("SELECT epoch, COUNT(*), COUNT(DISTINCT prompt), COUNT(done_at) FROM visits GROUP BY epoch")
    assert [epoch for epoch, count, different, _ in visits if count != different] == []
    # Only the newest two epochs have open visits: older visits are leased again before new ones are opened.
    assert [row for row in visits[:-2] if row[1:] != (PROMPTS, PROMPTS, PROMPTS)] == []
    result = tba_here("buffer", "check", "--config", system.run.file)
    assert result.exit_code == 0, result.output + result.message


def test_generation_continues_during_a_silent_cut_and_every_row_is_stored_once(system, tba_here):
    here = system()
    direct, behind = here.search(0), here.search(1, through=here.network.address)
    direct.wait_for_rows()
    sender = behind.wait_for_rows(SAMPLES * TWO_LOADS)
    here.network.silence()
    ends = time.monotonic() + CUT_SECONDS
    before = len(here.stored()[sender])
    wait_until(lambda: len(spooled(here.spool / sender)) > 3 * TWO_LOADS)
    # The other searcher continues, and gets the prompts of the one that is cut off.
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
    ((unleased,),) = here.query("SELECT COUNT(*) FROM trajectory_rows WHERE visit IS NULL")
    assert unleased > 0
    assert "the buffer is away" in behind.log()
    assert not (here.spool / sender).exists()
    direct.leave()
    check_history(here, tba_here)


def test_the_spool_of_a_searcher_that_was_killed_during_a_cut_is_delivered_by_the_next(system, tba_here):
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
    # The next searcher answers the prompts that the dead one had leased.
    assert open_before
    marks = ",".join(map(str, open_before))
    wait_until(lambda: here.query(f"SELECT COUNT(*) FROM visits WHERE done_at IS NULL AND id IN ({marks})") == [(0,)])
    second.leave()
    check_history(here, tba_here)


def test_the_prompts_of_a_searcher_that_leaves_go_to_others_immediately(system, tba_here):
    # Leases expire after the end of the test, so only the Goodbye can release the prompts.
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
    check_history(here, tba_here)


def test_a_searcher_with_a_full_spool_logs_its_pause_and_a_restarted_buffer_receives_everything(system, tba_here):
    here = system(search={"spool_mib": 0.2})
    searcher = here.search(0, through=here.network.address)
    sender = searcher.wait_for_rows()
    here.network.cut()
    here.buffer.kill()
    here.buffer.wait()
    wait_until(lambda: "the spool is full (0.2 MiB): waiting for the buffer at tcp://" in searcher.log())
    full = spooled(here.spool / sender)
    assert len(full) > 3
    assert sum(path.stat().st_blocks * 512 for path in (here.spool / sender).iterdir()) < 0.4 * (1 << 20)
    here.serve()
    here.network.heal()
    last, rows = full[-1]
    wait_until(lambda: len(here.stored()[sender]) > last + rows)
    made = searcher.leave()
    assert here.stored()[sender] == list(range(made))
    check_history(here, tba_here)
