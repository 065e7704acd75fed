"""Tests on nodes with systemd: containers in network namespaces. `make test-fleet` and `make test-all` run them."""

import os
from collections.abc import Iterator

import pytest

from tba.tests.helpers.nodes import Fleet, Node, fleet_of
from tba.tests.runner import FULL_SIZE


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A network without nodes. Skips the test where nodes cannot be had."""
    if not (FULL_SIZE or os.environ.get("TEST_FLEET")):
        pytest.skip("make test-fleet and make test-all start nodes")
    with fleet_of(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def node(fleet: Fleet) -> Node:
    """One node with systemd and sshd."""
    return fleet.add("node1")
