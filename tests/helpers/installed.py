"""This clone on a node, in the places that the systemd units name, without an installation."""

import sys
import sysconfig
from pathlib import Path

import pytest

from tba.tests.helpers.nodes import Node

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy/systemd"
_SCRIPT = """#!/opt/tba/bin/python
from tba.cli import main
main()
"""
# What the places of this clone need: the package, and the library of an interpreter that has one.
ENVIRONMENT = {"PYTHONPATH": "/opt/tba/clone", "LD_LIBRARY_PATH": "/opt/python/lib", "OMP_NUM_THREADS": "1"}


def install(node: Node) -> None:
    """Make the user tba, /opt/tba and the units. The interpreter and the packages are mounted: units hide home folders.

    Skips the test if they are not on the file system of `/`, which is that of a node.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for source, target in (
        (sys.base_prefix, "/opt/python"),
        (sysconfig.get_path("purelib"), f"/opt/tba/lib/{version}/site-packages"),
        (str(ROOT), "/opt/tba/clone/tba"),
    ):
        if not any((node.root / source.lstrip("/")).glob("*")):
            pytest.skip(f"{source} is on another file system than /, so that a node does not see it")
        node.run("mkdir", "-p", target)
        node.run("mount", "--bind", source, target)
    node.run("mkdir", "-p", "/opt/tba/bin", "/etc/tba")
    node.run("ln", "-s", f"/opt/python/bin/{version}", "/opt/tba/bin/python")
    write(node, "/opt/tba/pyvenv.cfg", "home = /opt/python/bin\n")
    write(node, "/opt/tba/bin/tba", _SCRIPT)
    node.run("chmod", "755", "/opt/tba/bin/tba")
    node.run("useradd", "--system", "--home-dir", "/var/lib/tba", "tba")
    for unit in UNITS.glob("tba*"):
        target = "/etc/tba" if unit.suffix == ".env" else "/etc/systemd/system"
        write(node, f"{target}/{unit.name}", unit.read_text())
    with open(node.root / "etc/tba/tba.env", "a") as file:
        file.writelines(f"{name}={value}\n" for name, value in ENVIRONMENT.items())
    node.run("systemctl", "daemon-reload")


def run_tba(node: Node, *arguments: str) -> str:
    """Run `tba` on a node as root, with the configuration of its units. Returns its output."""
    environment = ENVIRONMENT | {"TBA_CONFIG": "/etc/tba/tba.toml"}
    return node.run(
        "env", *(f"{name}={value}" for name, value in environment.items()), "/opt/tba/bin/tba", *arguments
    ).stdout


def write(node: Node, path: str, text: str) -> None:
    """Write a file of a node, as root."""
    file = node.root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
