"""Shares of CPU cores, on made-up machines and on this one."""

import os
import subprocess
import sys

import pytest

from tba.common.cores import Core, share_cores, starting_on, threads_of, usable_cores

# Two nodes of four physical cores with two threads each, numbered as Linux does: the second threads come last.
TWO_NODES = [Core(cpu, node=cpu % 8 // 4, physical=cpu % 8) for cpu in range(16)]


def cpus(shares):
    return [sorted(core.cpu for core in share) for share in shares]


@pytest.mark.parametrize("engines", range(1, 17))
def test_shares_are_disjoint_and_complete(engines):
    shares = share_cores(TWO_NODES, engines)
    assert len(shares) == engines
    assert sorted(core.cpu for share in shares for core in share) == list(range(16))


@pytest.mark.parametrize("engines", [2, 3, 4, 7, 8])
def test_no_share_spans_two_nodes_or_splits_a_physical_core(engines):
    shares = share_cores(TWO_NODES, engines)
    assert all(len({core.node for core in share}) == 1 for share in shares)
    assert sum(threads_of(share) for share in shares) == 8


def test_two_engines_get_a_node_each_and_one_gets_all():
    assert cpus(share_cores(TWO_NODES, 2)) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert cpus(share_cores(TWO_NODES, 1)) == [list(range(16))]


def test_engines_go_where_the_cores_are():
    uneven = [Core(0, node=0, physical=0), *(Core(n, node=1, physical=n) for n in range(1, 7))]
    assert cpus(share_cores(uneven, 4)) == [[0], [1, 2], [3, 4], [5, 6]]


def test_more_engines_than_cores_share_them_with_one_thread_each():
    shares = share_cores([Core(0), Core(1, physical=1)], 3)
    assert cpus(shares) == [[0, 1]] * 3
    assert threads_of(shares[0], shared_by=3) == 1


def test_a_child_starts_on_its_cores_and_the_parent_keeps_its_own():
    mine = os.sched_getaffinity(0)
    one = usable_cores()[-1:]
    with starting_on(one):
        command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str({one[0].cpu})
    assert os.sched_getaffinity(0) == mine
