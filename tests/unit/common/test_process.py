"""Memory, garbage collection and signals of a process, and the command that started it."""

import os
import pty
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tba.common.system.orphan_guard import session_of
from tba.common.system.process import NotifySocket, StopSignal, notify_systemd
from tba.common.terminal import own_command
from tba.tests.helpers.checks import not_none, wait_until


def test_a_stopped_process_asks_systemd_for_the_time_that_its_work_may_take(monkeypatch):
    systemd = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        stop = StopSignal()
        stop.drain_seconds = 1460.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        assert systemd.receive() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=1460500000"]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        systemd.close()


STARTS = """
from tba.common.system.process import extend_start, notify_systemd
for state in ("", "STATUS=loading", "", "{left}=1", ""):
    notify_systemd(state) if state else extend_start()
"""


@pytest.mark.parametrize("left", ["READY", "STOPPING"])
def test_a_process_asks_systemd_for_more_time_until_it_is_ready_or_stops(left):
    systemd = NotifySocket()
    environment = os.environ | {"NOTIFY_SOCKET": systemd.address}
    subprocess.run([sys.executable, "-c", STARTS.replace("{left}", left)], env=environment, check=True)
    hour = "EXTEND_TIMEOUT_USEC=3600000000"
    assert systemd.receive() == [hour, "STATUS=loading", hour, f"{left}=1"]
    systemd.close()


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
