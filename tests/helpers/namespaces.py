"""Network namespaces as nodes on one bridge, for tests of several machines. They need root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def address(number: int) -> str:
    """Return the address of a node."""
    return f"10.77.0.{number + 1}"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def inside(name: str) -> list[str]:
    """Return the command that starts another one in a namespace."""
    return ["ip", "netns", "exec", name]


def cut(names: list[str], number: int) -> None:
    """Take down the link of a node other than the first: packets are lost, and nothing is closed."""
    assert run("ip", "-n", names[0], "link", "set", f"port{number}", "down").returncode == 0


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Make namespaces on one bridge, which is in the first. Gives their names; skips the test where that fails."""
    names = [f"tba-{os.getpid()}-{number}" for number in range(count)]
    commands = [f"netns add {name}" for name in names] + [f"-n {name} link set lo up" for name in names]
    commands += [f"-n {names[0]} link add name br0 type bridge", f"-n {names[0]} link set br0 up"]
    commands += [f"-n {names[0]} addr add {address(0)}/24 dev br0"]
    for number, name in enumerate(names[1:], 1):
        commands += [
            f"-n {names[0]} link add name port{number} type veth peer name eth0 netns {name}",
            f"-n {names[0]} link set port{number} master br0",
            f"-n {names[0]} link set port{number} up",
            f"-n {name} addr add {address(number)}/24 dev eth0",
            f"-n {name} link set eth0 up",
        ]
    try:
        for command in commands:
            if (done := run("ip", *command.split())).returncode:
                pytest.skip(f"no network namespaces here: ip {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            run("ip", "netns", "del", name)
