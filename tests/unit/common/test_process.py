"""A process: its memory, signals, cores, watchdog, background threads, and the command that started it."""

import gc
import importlib
import logging
import os
import pty
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tba.common.system.background import Background, backoff
from tba.common.system.orphan_guard import session_of
from tba.common.system.process import (
    NotifySocket,
    StopSignal,
    importing,
    notify_systemd,
    objects_frozen,
    openmp_threads,
    partition_cores,
    starting_on,
)
from tba.common.system.watchdog import Watchdog
from tba.common.terminal import own_command, training_progress
from tba.tests.conftest import own_process_state
from tba.tests.helpers.checks import not_none, wait_until


@pytest.fixture
def systemd(monkeypatch):
    """What stands for systemd: a socket that this process, and those that it starts, notify."""
    with closing(NotifySocket()) as listener:
        monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
        yield listener


def test_a_stopped_process_asks_systemd_for_the_time_that_its_work_may_take(systemd):
    with own_process_state():
        stop = StopSignal()
        stop.drain_seconds = 1460.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert systemd.receive() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1460500000"]


STARTS = """
from tba.common.system.process import extend_start, notify_systemd
for state in ("", "STATUS=loading", "", "{left}=1", ""):
    notify_systemd(state) if state else extend_start()
"""


@pytest.mark.parametrize("left", ["READY", "STOPPING"])
def test_a_process_asks_systemd_for_more_time_until_it_is_ready_or_stops(systemd, left):
    subprocess.run([sys.executable, "-c", STARTS.replace("{left}", left)], check=True)
    hour = "EXTEND_TIMEOUT_USEC=3600000000"
    assert systemd.receive() == [hour, "STATUS=loading", hour, f"{left}=1"]


DRAINS = """
import os, signal, sys, time
from pathlib import Path
from tba.common.system.process import StopSignal
if sys.argv[2] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
# A leader of a session receives SIGHUP when its terminal closes.
os.close(os.open(os.ttyname(0), os.O_RDWR))
stop = StopSignal()
Path(sys.argv[1]).write_text("ready")
while not stop() and os.isatty(0):
    time.sleep(0.01)
print("draining", flush=True)
Path(sys.argv[1]).write_text(f"{stop()}")
"""


@pytest.mark.parametrize(("how", "stopped"), [("plain", "True"), ("nohup", "False")])
def test_a_terminal_that_closes_has_a_process_drain_unless_it_is_under_nohup(tmp_path, how, stopped):
    terminal, own = pty.openpty()
    output, said = own if how == "plain" else subprocess.DEVNULL, tmp_path / "said"
    command = [sys.executable, "-c", DRAINS, said, how]
    with subprocess.Popen(command, stdin=own, stdout=output, stderr=output, start_new_session=True) as process:
        os.close(own)
        wait_until(lambda: said.exists() and said.read_text(), what="it listens")
        os.close(terminal)
        assert process.wait(60) == 0
    assert said.read_text() == stopped


def test_only_this_user_can_reach_the_socket_of_a_child(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    systemd = NotifySocket()
    directory = Path(systemd.address).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    notify_systemd("READY=1")
    assert systemd.receive() == ["READY=1"]
    systemd.close()
    assert not directory.exists()


def test_the_command_to_type_again_is_the_one_that_was_typed(tmp_path, monkeypatch):
    program = tmp_path / "bin/tba"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert own_command() == [str(program)]
    monkeypatch.setenv("PATH", f"/usr/bin:{program.parent}")
    assert own_command() == ["tba"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/tba/__main__.py"])
    assert own_command() == [sys.executable, "-m", "tba"]


def test_a_process_whose_name_is_not_utf_8_has_a_session():
    # Linux cuts names after 15 bytes, also inside a character.
    code = "open('/proc/self/comm', 'wb').write(b'h\\xc3'); print(flush=True); open(0).read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        not_none(process.stdout).readline()
        assert session_of(process.pid) == os.getsid(0)
        not_none(process.stdin).close()


AUTOGROUP = Path("/proc/self/autogroup")


def test_the_parts_are_disjoint_and_complete_and_sizes_differ_by_at_most_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 11)))
    for processes in range(1, 9):
        parts = partition_cores(processes)
        assert len(parts) == processes
        assert sorted(core for part in parts for core in part) == list(range(3, 11))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # More processes than cores.
    assert partition_cores(9) == [[*range(3, 11)]] * 9
    assert [openmp_threads(parts) for parts in ([[0, 1]] * 3, [[0, 1, 2], [3, 4]], [[0, 1]])] == [1, 2, 2]


def test_a_child_starts_on_its_cores_and_the_parent_keeps_its_own():
    before = os.sched_getaffinity(0)
    core = max(before)
    with starting_on([core]):
        command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str({core})
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not divide the cores among sessions")
def test_a_process_that_gives_way_is_nice_and_its_session_too_if_it_leads_one():
    show = "import os; print(os.nice(0), *open('/proc/self/autogroup').read().split()[-1:])"
    command = [sys.executable, "-c", f"from tba.common.system.process import give_way; give_way(); {show}"]
    own, shared = (
        subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=new).stdout.split()
        for new in (True, False)
    )
    nice = str(os.nice(0) + 5)
    # The file is empty for a process in a cgroup with CPU shares of its own: sessions do not count there.
    assert own in ([nice, "5"], [nice])
    assert shared == [nice, *AUTOGROUP.read_text().split()[-1:]]


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    imports = "import subprocess, sys, threading\nfrom tba.common import log\n"
    code = f"{imports}from tba.common.system.watchdog import Watchdog\nlog.configure('test')\n{program}"
    environment = os.environ | {"TBA_LOG": "text"}
    environment.pop("JOURNAL_STREAM", None)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.slow
def test_a_loop_that_comes_round_a_cold_start_and_no_limit_are_left_alone():
    result = run_program("""
import time
unlimited, cold, busy = Watchdog(), Watchdog(limit_seconds=0.5), Watchdog(limit_seconds=0.5)
for watchdog in (unlimited, cold, busy):
    watchdog.start()
cold.beat(warm=False)
until = time.monotonic() + 1.2
while time.monotonic() < until:
    busy.beat()
cold.stop()
busy.stop()
time.sleep(0.6)
""")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_first_round_that_keeps_the_interpreters_lock_ends_the_process():
    # The thread would set the timer after five seconds.
    late = "import ctypes\nfrom tba.common.system import watchdog\nwatchdog._POLLS_PER_LIMIT = 0.01\n"
    result = run_program(f"{late}Watchdog(limit_seconds=0.1).start()\nctypes.PyDLL(None).sleep(30)")
    assert result.returncode == 1
    assert "Timeout (0:00:00.4" in result.stderr


def test_beats_reach_systemd_at_most_once_a_second(systemd):
    watchdog = Watchdog()
    for _ in range(100):
        watchdog.beat()
    assert systemd.receive() == ["WATCHDOG=1"]


def test_stop_wakes_a_blocked_thread_once_and_check_raises_what_ended_a_thread():
    woken, calls = threading.Event(), list[None]()

    def block() -> None:
        woken.wait()

    thread = Background("blocked", block, wake=lambda: calls.append(woken.set()))
    thread.start()
    assert thread.stop(10)
    assert thread.stop(10)
    assert len(calls) == 1

    def fail():
        raise ValueError("no disk")

    # One that was never started can be stopped.
    assert Background("idle", fail).stop()
    thread = Background("fails", fail)
    thread.start()
    thread.join(60)
    assert not thread.running
    with pytest.raises(ValueError, match="no disk"):
        thread.check()


def test_backoff_doubles_from_the_first_pause_up_to_the_longest():
    assert [backoff(failures, 1.0, 5.0) for failures in (0, 1, 2, 3, 4, 5_000)] == [1.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_log_has_about_twenty_steps_of_a_training_and_those_with_a_held_out_loss(caplog):
    caplog.set_level(logging.INFO)
    with training_progress(as_json=False) as report:
        for step in range(1, 314):
            report({"step": step, "steps": 313, "loss": 1.0} | ({"held_out_loss": 2.0} if step == 50 else {}))
    logged = [record.fields["step"] for record in caplog.records]
    assert logged == [1, *range(15, 50, 15), 50, *range(60, 313, 15), 313]


@pytest.mark.slow
def test_objects_are_frozen_in_a_block_and_stay_so_if_its_caller_had_frozen_some():
    gc.unfreeze()
    with objects_frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    # As `tba.tests.runner` does, for the tests that follow.
    gc.freeze()
    with objects_frozen():
        pass
    assert gc.get_freeze_count() > 0


def test_imports_are_kept_out_of_garbage_collections_which_then_go_on(tmp_path, monkeypatch):
    (tmp_path / "garbage_probe.py").write_text("import gc\ncollects = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    with importing():
        pass
    assert (gc.get_freeze_count(), gc.isenabled()) == (before, True), "nothing was imported"
    with importing():
        probe = importlib.import_module("garbage_probe")
    monkeypatch.delitem(sys.modules, "garbage_probe")
    assert (probe.collects, gc.isenabled()) == (False, True)
    assert gc.get_freeze_count() > before
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
