"""Threads and cores of the ranks that train together."""

import os
from pathlib import Path

import pytest

from tba.common.config import Config
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


def test_the_users_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = Config.model_validate({"train": {"gpu": "0-3", "offload": "optimizer"}})
    assert all("OMP_NUM_THREADS" not in rank.environment for rank in _children(config, [], 4, Path("rendezvous")))
