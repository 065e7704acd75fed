"""Real searchers of which one is cut off: nothing is lost or skipped, and generation continues."""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tba.common.wire.codec import decode_request
from tba.common.wire.fields import NO_VISIT
from tba.searcher.delivery.spool import read_put
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


class Searcher:
    """One searcher process, which connects to the address `through`."""

    def __init__(
        self, start_tba: Callable[..., subprocess.Popen[bytes]], run: Any, label: int, through: str, patch: str = ""
    ) -> None:
        command = ("search", "--cpu", "1", "--index", str(label), "--set", f"buffer.address={through}")
        self._run, self._label = run, label
        self._process = start_tba(*command, "--config", run.file, patch=patch)

    @property
    def spool(self) -> Path:
        """The spool, which the searcher creates when it joins and removes when it leaves; its name is the sender."""
        (path,) = (self._run.directory / "spool").glob(f"[!.]*-cpu{self._label}.*")
        return path

    def rows(self) -> int:
        """Return the number of stored rows."""
        return len(stored(self._run, f"%-cpu{self._label}.%"))

    def wait_for_rows(self, more: int = 1) -> None:
        """Wait until the buffer has this many additional rows."""
        there = self.rows()
        wait_until(lambda: self.rows() >= there + more)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """Send SIGTERM and wait."""
        self._process.terminate()
        assert self._process.wait(60) == 0


def stored(run: Any, sender: str) -> list[int]:
    """Return the stored sequence numbers of a sender."""
    sql = "SELECT t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender WHERE s.sender LIKE ? ORDER BY 1"
    return [sequence for (sequence,) in run.query(sql, sender)]


def spooled(directory: Path) -> int:
    """Return the number of puts in a spool."""
    return len(list(directory.glob("*.put")))


@pytest.fixture
def run(make_config, serve_weights, request):
    """A run with a buffer that has announced weights; its parameter are changes of the configuration."""
    sections = arithmetic(
        buffer={"lease_seconds": 4.0},
        task={"limit": PROMPTS},
        search={"samples_per_prompt": SAMPLES, "max_in_flight": IN_FLIGHT},
    )
    made = make_config(**merged(sections, getattr(request, "param", {})))
    serve_weights(made)
    return made


@pytest.fixture
def network(run):
    """A network to the buffer that can be cut."""
    proxy = Proxy(run.address)
    yield proxy
    proxy.close()


def check_history(run: Any, tba_here: Callable[..., Any]) -> None:
    """Check that groups are complete, and the visits."""
    groups = run.query("SELECT visit, prompt, COUNT(*) FROM trajectory_rows GROUP BY visit, prompt")
    assert [group for group in groups if group[2] % SAMPLES] == []
    check_visits(run, tba_here)


def check_visits(run: Any, tba_here: Callable[..., Any]) -> None:
    """Check that each prompt is visited once per finished epoch, and run `tba buffer check`."""
    visits = run.query("SELECT epoch, COUNT(*), COUNT(DISTINCT prompt), COUNT(done_at) FROM visits GROUP BY epoch")
    assert [epoch for epoch, count, different, _ in visits if count != different] == []
    # Only the newest two epochs have open visits: older visits are leased again before new ones are opened.
    assert [row for row in visits[:-2] if row[1:] != (PROMPTS, PROMPTS, PROMPTS)] == []
    result = tba_here("buffer", "check", "--config", run.file)
    assert result.exit_code == 0, result.output + result.message


def test_generation_continues_during_a_silent_cut_and_every_row_is_stored_once(
    run, network, start_tba, tba_here, tmp_path
):
    direct, behind = (Searcher(start_tba, run, n, at) for n, at in enumerate((run.address, network.address)))
    direct.wait_for_rows()
    behind.wait_for_rows(SAMPLES * TWO_LOADS)
    network.silence()
    ends = time.monotonic() + CUT_SECONDS
    before, spool = behind.rows(), behind.spool
    wait_until(lambda: spooled(spool) > 3 * TWO_LOADS)
    # The other searcher continues, and gets the prompts of the one that is cut off.
    wait_until(lambda: "leases expired" in (tmp_path / "tba0.log").read_text())
    middle = spooled(spool)
    direct.wait_for_rows(SAMPLES * TWO_LOADS)
    wait_until(lambda: time.monotonic() > ends)
    assert spooled(spool) > middle
    assert behind.rows() <= before + SAMPLES * TWO_LOADS
    network.heal()
    behind.wait_for_rows(SAMPLES)
    behind.leave()
    log = (tmp_path / "tba2.log").read_text(errors="replace")
    made = int(re.findall(r" left rows=(\d+)", log)[-1])
    assert stored(run, spool.name) == list(range(made))
    ((unleased,),) = run.query("SELECT COUNT(*) FROM trajectory_rows WHERE visit IS NULL")
    assert unleased > 0
    assert "the buffer is away" in log
    assert not spool.exists()
    direct.leave()
    check_history(run, tba_here)


# The last response of each group does not end.
NEVER_WHOLE = f"""
from tba.searcher.engines.transformers_engine import TransformersEngine
step = TransformersEngine.step
TransformersEngine.step = lambda self: [one for one in step(self) if one.id % {SAMPLES} != {SAMPLES - 1}]
"""


@pytest.mark.parametrize(
    "run", [{"search": {"put": "sample"}, "buffer": {"replacement": "never"}}], indirect=True, ids=["sample"]
)
def test_a_searcher_killed_within_its_groups_loses_no_finished_response_and_another_answers_its_visits(
    run, network, start_tba, tba_here
):
    first = Searcher(start_tba, run, 0, network.address, patch=NEVER_WHOLE)
    first.wait_for_rows(3 * IN_FLIGHT)
    network.silence()
    spool = first.spool
    # More than the responses of its leases.
    wait_until(lambda: spooled(spool) > 2 * IN_FLIGHT)
    first.kill()
    ((newest,),) = run.query("SELECT MAX(id) FROM visits")
    puts: list[Any] = [
        decode_request([memoryview(frame) for frame in read_put(path)]).message for path in spool.glob("*.put")
    ]
    assert any(put.rows.lease != [NO_VISIT] for put in puts)
    finished = {*stored(run, spool.name), *(put.first_sequence for put in puts)}
    network.heal()
    second = Searcher(start_tba, run, 1, run.address)
    second.wait_for_rows()
    wait_until(lambda: run.query("SELECT COUNT(*) FROM visits WHERE id <= ? AND done_at IS NULL", newest) == [(0,)])
    second.leave()
    assert stored(run, spool.name) == list(range(len(finished)))
    assert finished == set(range(len(finished)))
    sql = """SELECT SUM(s.sender = ?), SUM(s.sender != ?) FROM visits v
        JOIN trajectory_rows t ON t.visit = v.id JOIN senders s ON s.id = t.sender WHERE v.id <= ? GROUP BY v.id"""
    counts = run.query(sql, spool.name, spool.name, newest)
    assert len(counts) == newest
    # The spool may bring more than was stored when the visit was leased again.
    assert {before + after >= SAMPLES for before, after in counts} == {True}
    assert {after for _, after in counts} <= set(range(1, SAMPLES + 1))
    assert (SAMPLES - 1, 1) in counts
    check_visits(run, tba_here)
