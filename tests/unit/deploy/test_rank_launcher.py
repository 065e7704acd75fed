"""Numbers, threads and cores of the ranks that train together."""

import os
from pathlib import Path

import pytest

from tba.common.config import Config
from tba.common.errors import UsageError
from tba.common.system.process import node_number
from tba.deploy.rank_launcher import _children


@pytest.mark.parametrize(("gpu", "offload", "bound"), [
    ("cpu", "none", True), ("0-3", "optimizer", True), ("0-3", "none", False),
])  # fmt: skip
def test_ranks_divide_the_cores_and_are_bound_where_the_host_computes(monkeypatch, gpu, offload, bound):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    config = Config.model_validate({"train": {"gpu": gpu, "offload": offload}})
    ranks = _children(config, [], 4, Path("rendezvous"))
    assert {rank.environment["OMP_NUM_THREADS"] for rank in ranks} == {"4"}
    slices = [list(range(first, first + 4)) for first in (0, 4, 8, 12)]
    assert [rank.cores for rank in ranks] == (slices if bound else [None] * 4)
    # The user's number of threads is kept.
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert all("OMP_NUM_THREADS" not in rank.environment for rank in _children(config, [], 4, Path("rendezvous")))


@pytest.mark.parametrize("number", ["NODE_RANK", "SLURM_NODEID"])
def test_ranks_of_a_node_are_numbered_after_those_of_the_nodes_before_it(monkeypatch, number):
    for name, value in {"NNODES": "3", number: "1", "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    first, second = (child.environment for child in _children(Config(), [], 2, None))
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("2", "0", "3", "1")
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]) == ("6", "2")
    # The interface is that of the route to MASTER_ADDR.
    assert "GLOO_SOCKET_IFNAME" not in first


@pytest.mark.parametrize("given", [
    {"NNODES": "2", "MASTER_ADDR": "node0"}, {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "node0"},
    {"NNODES": "2", "NODE_RANK": "0"}, {"NNODES": "two", "NODE_RANK": "0", "MASTER_ADDR": "node0"},
])  # fmt: skip
def test_nodes_without_a_number_or_an_address_are_refused(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="set NNODES to their number, NODE_RANK to that of each, from 0, and MASTER_A"):
        node_number()
