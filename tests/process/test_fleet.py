"""`tba search` with several searchers: real processes on the CPU that end, crash and are killed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tba.common.run_status import Facts, ask_status, describe
from tba.common.system.process import NotifySocket
from tba.common.wire.client import BufferClient
from tba.tests.helpers.checks import wait_until

GUARD = "tba.common.system.orphan_guard"
# The supervisor of the searchers logs its summary twice a second and restarts at once.
HASTY = """
import sys
if "search" in sys.orig_argv and "--index" not in sys.orig_argv:
    import tba.deploy.fleet, tba.deploy.supervisor
    tba.deploy.fleet.SUMMARY_SECONDS, tba.deploy.supervisor.RESTART_DELAY_SECONDS = 0.5, 0.1
"""
# Each searcher starts a worker, as engines do, and the first one also a worker outside its session.
WORKERS = """
import subprocess, sys, os
if "--index" in sys.orig_argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "worker-of-a-searcher"])
if sys.orig_argv[-2:] == ["--index", "0"] and not os.path.exists("started"):
    open("started", "w").close()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "escaped"], start_new_session=True)
"""


@pytest.fixture
def fleet_config(make_config, example_model):
    """A run without snapshots: its searchers join and wait."""

    def make(**launch):
        return make_config(
            model={"path": str(example_model), "dtype": "float32"},
            task={"name": "arithmetic", "limit": 8, "reward_workers": 0},
            search={"engine": "transformers", "gpus": "cpu", "max_in_flight": 8},
            launch={"drain_seconds": 10.0} | launch,
        )

    return make


@pytest.fixture
def start_fleet(start_tba, tmp_path, monkeypatch):
    """Start a buffer and searchers. The code `site` runs first in every process."""

    def start(run, count: int = 2, site: str = "", *options: str) -> subprocess.Popen[bytes]:
        start_tba("buffer", "serve", "--config", run.file)
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(HASTY + site)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
        return start_tba("search", "--cpu", str(count), "--config", run.file, *options)

    return start


def output(tmp_path: Path) -> str:
    return (tmp_path / "tba1.log").read_text(errors="replace")


def wait_for_output(tmp_path: Path, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, output(tmp_path)) is not None)


def searchers_of(fleet: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """Return the searchers by index."""
    found = {}
    for child in psutil.Process(fleet.pid).children():
        # The process may just have ended.
        with contextlib.suppress(psutil.Error):
            if "--index" in (command := child.cmdline()):
                found[command[-1]] = child
    return found


def descendants(fleet: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(fleet.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def running(fleet: subprocess.Popen[bytes], argument: str) -> list[int]:
    """Return the descendants of a fleet that have this argument."""
    found = []
    for process in descendants(fleet):
        # The process may just have ended.
        with contextlib.suppress(psutil.Error):
            if argument in process.cmdline():
                found.append(process.pid)
    return found


def test_a_fleet_reports_to_systemd_in_json_lines_replaces_what_is_killed_and_drains_at_sigterm(
    fleet_config, start_fleet, tmp_path, monkeypatch
):
    """A searcher is killed, then the guard. test_hang.py kills a supervisor."""
    systemd, notified = NotifySocket(), list[str]()
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    printed = "import sys\nif '--index' in sys.orig_argv: print('not ours', flush=True)\n"
    fleet = start_fleet(fleet_config(), 2, printed + WORKERS)
    up = r"2/2 searchers up; 0 tokens/s.*waiting: no snapshot is published yet \(cpu0, cpu1\)"
    wait_until(lambda: notified.extend(systemd.receive()) or any(re.search(up, line) for line in notified))
    wait_until(lambda: notified.extend(systemd.receive()) or notified.count("WATCHDOG=1") >= 2)
    systemd.close()
    assert "READY=1" in notified
    # A searcher loads its engine: its supervisor is not ready yet either.
    assert "EXTEND_TIMEOUT_USEC=3600000000" in notified
    cores = [set(child.cpu_affinity()) for child in searchers_of(fleet).values()]
    if len(os.sched_getaffinity(0)) > 1:
        assert cores[0].isdisjoint(cores[1])

    def lines(event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in output(tmp_path).split("\n")[:-1]]
        return [line for line in found if line.get("event") == event]

    victim, other = searchers_of(fleet)["0"], searchers_of(fleet)["1"]
    workers = victim.children(recursive=True)
    assert len(workers) == 2
    victim.kill()
    assert_gone(workers)
    wait_until(lambda: len(lines("joined")) == 3)
    assert other.is_running()
    assert len(other.children()) == 1
    (guard,) = running(fleet, GUARD)
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: running(fleet, GUARD) not in ([], [guard]))
    # The restarted searcher has a worker too.
    wait_until(lambda: len(running(fleet, "worker-of-a-searcher")) == 2)
    children = descendants(fleet)
    fleet.terminate()
    assert fleet.wait(60) == 0
    assert_gone(children)
    assert sorted(line["gpu"] for line in lines("joined")) == ["cpu0", "cpu0", "cpu1"]
    assert sorted(line["gpu"] for line in lines("left")) == ["cpu0", "cpu1"]
    others = [json.loads(line) for line in output(tmp_path).splitlines() if "not ours" in line]
    assert {line["gpu"] for line in others if line.get("line") == "not ours"} == {"cpu0", "cpu1"}


def test_a_second_sigterm_stops_immediately(fleet_config, start_fleet, tmp_path):
    ignore_signals = "import signal, sys\nif '--index' in sys.orig_argv: signal.signal = lambda *_: None\n"
    # An ignored SIGTERM stays ignored after exec, so these searchers never drain.
    fleet = start_fleet(
        fleet_config(drain_seconds=300.0), 2, f"import signal\nsignal.signal(15, signal.SIG_IGN)\n{ignore_signals}"
    )
    wait_for_output(tmp_path, "2/2 searchers up")
    processes = descendants(fleet)
    fleet.terminate()
    started = time.monotonic()
    while fleet.poll() is None and time.monotonic() - started < 120:
        fleet.terminate()
        time.sleep(0.3)
    assert fleet.returncode == 128 + signal.SIGTERM
    assert_gone(processes)


def test_one_broken_searcher_does_not_stop_the_others_and_a_fleet_of_which_all_are_broken_fails(
    fleet_config, start_fleet, tmp_path
):
    broken = """
import sys, os
if sys.orig_argv[-2:] == ["--index", "1"] or "--index" in sys.orig_argv and os.path.exists("all"):
    os.write(1, b"error: no device"), os._exit(3)
"""
    run = fleet_config(max_restarts=2)
    fleet = start_fleet(run, 2, broken)
    wait_for_output(tmp_path, r"1/2 searchers up.*; cpu1 broken, .* last exit code 3\): no device")
    # The buffer knows too: there is no trainer, so the run stands still.
    with closing(BufferClient(run.address, role="monitor", name="test")) as client:
        wait_until(lambda: "no device" in describe(Facts(ask_status(client))).sentence)
    assert fleet.poll() is None
    (tmp_path / "all").touch()
    searchers_of(fleet)["0"].kill()
    assert fleet.wait(60) == 1
    assert "failed with exit code 3" in output(tmp_path)
    # Broken after more than two failures, of which the kill is one.
    assert output(tmp_path).count("child started child=cpu0") >= 3


def test_a_configuration_error_of_one_searcher_ends_the_fleet_with_its_message(fleet_config, start_fleet, tmp_path):
    wrong = "import sys, os\nif '--index' in sys.orig_argv: os.write(1, b'error: run.name is other'), os._exit(78)\n"
    assert start_fleet(fleet_config(), 2, wrong).wait(60) == 78
    assert re.fullmatch(r"error: cpu[01]: run.name is other", output(tmp_path).splitlines()[-1])
    assert output(tmp_path).count("child started") == 2


def test_lines_of_many_children_are_never_torn(tmp_path):
    program = """
import subprocess, sys
from tba.deploy.child import Relay
program = "import sys\\nfor n in range(2000): sys.stdout.write(sys.argv[1] * 50); sys.stdout.write('.\\\\n')"
children = [subprocess.Popen([sys.executable, "-c", program, x], stdout=subprocess.PIPE) for x in "abcd"]
relays = [Relay(child.stdout, f"gpu{n}", n) for n, child in enumerate(children)]
for relay in relays: relay.finish(60)
"""
    result = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
    expected = {f"gpu{n} | {letter * 50}." for n, letter in enumerate("abcd")}
    lines = result.stderr.splitlines()
    assert (len(lines), set(lines)) == (8000, expected)
