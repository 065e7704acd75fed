"""Tests on nodes with systemd: containers in network namespaces. `make test-fleet` and `make test-all` run them."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tba.tests.helpers.nodes import Fleet, Node, fleet_of
from tba.tests.helpers.site import FLEET, PLAYBOOK, SETTINGS, WHEELS, Site
from tba.tests.helpers.source_files import ROOT
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


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Four nodes, and the inventory that `play` brings them to. DISK_MIB of the module is a disk for each of them."""
    if not PLAYBOOK.exists() or not list(WHEELS.glob("tba-*.whl")):
        pytest.skip("`make test-fleet` makes the wheelhouse and installs Ansible")
    directory = tmp_path_factory.mktemp("site")
    text = (ROOT / "examples/arithmetic/demo.toml").read_text()
    for old, new in SETTINGS.items():
        assert old in text
        text = text.replace(old, new)
    (directory / "tba.toml").write_text(text)
    shutil.copytree(ROOT / "examples/arithmetic/model", directory / "examples/arithmetic/model")
    for number in range(4):
        fleet.add(f"node{number}", getattr(request.module, "DISK_MIB", 0))
    site = Site(fleet, directory, FLEET / f"{request.path.stem}.json")
    site.describe(["node1", "node2", "node3"])
    return site
