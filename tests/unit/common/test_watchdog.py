"""The watchdog of a loop, in a process of its own where it ends it."""

import os
import subprocess
import sys

import pytest

from tba.common.system.process import NotifySocket
from tba.common.system.watchdog import Watchdog


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


def test_beats_reach_systemd_at_most_once_a_second(monkeypatch):
    systemd, watchdog = NotifySocket(), Watchdog()
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    for _ in range(100):
        watchdog.beat()
    assert systemd.receive() == ["WATCHDOG=1"]
    systemd.close()
