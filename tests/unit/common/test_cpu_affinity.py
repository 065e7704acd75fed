"""CPU cores of several processes on one machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba.common.system.process import openmp_threads, partition_cores, starting_on

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.parametrize("processes", range(1, 9))
def test_the_parts_are_disjoint_and_complete_and_sizes_differ_by_at_most_one(processes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 11)))
    parts = partition_cores(processes)
    assert len(parts) == processes
    assert sorted(core for part in parts for core in part) == list(range(3, 11))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_processes_than_cores_get_all_of_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert partition_cores(3) == [[0, 1]] * 3


def test_a_child_starts_on_its_cores_and_the_parent_keeps_its_own():
    before = os.sched_getaffinity(0)
    core = max(before)
    with starting_on([core]):
        command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str({core})
    assert os.sched_getaffinity(0) == before


def test_processes_that_share_cores_get_one_openmp_thread():
    assert openmp_threads([[0, 1], [0, 1], [0, 1]]) == 1
    assert openmp_threads([[0, 1, 2], [3, 4]]) == 2
    assert openmp_threads([[0, 1]]) == 2


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
