"""Nodes for tests: machines with systemd and sshd, each a systemd-nspawn container in its own network namespace.

A node's root is an overlay of this machine's, so that it has the same system, and what it writes is its own. Nodes are
on one bridge of a namespace of their own, in which the test's commands run, too: nothing is added to the network of
this machine.

    with fleet_of(directory) as fleet:
        node = fleet.add("node1")
        node.run("systemctl", "is-active", "ssh")
        fleet.ssh(node, "hostname")
"""

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import psutil
import pytest

# What a node does not run: maintenance, what would wait for the internet, and databases of this machine.
_MASKED = [
    *(f"{name}.timer" for name in ("apt-daily", "apt-daily-upgrade", "man-db", "e2scrub_all", "fstrim")),
    *(f"{name}.service" for name in ("e2scrub_reap", "systemd-timesyncd", "networking", "postgresql")),
]
_SET_UP_BY_THIS_MACHINE = ("postgresql*.service", "pg_*.service", "pg_*.timer")
_COMMANDS = ("ip", "mount", "nsenter", "setpriv", "ssh", "sshd", "ssh-keygen", "systemd-nspawn")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BOOT_SECONDS, _OFF_SECONDS = 180, 120


def why_no_nodes() -> str:
    """Return why this machine cannot run nodes, empty if it can."""
    if os.geteuid() != 0:
        return "nodes are systemd-nspawn containers, which only root may start"
    missing = [command for command in _COMMANDS if shutil.which(command, path=_SYSTEM_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt install systemd-container openssh-server iproute2)"
    if not os.path.isdir("/sys/fs/cgroup/systemd") and not os.path.isfile("/sys/fs/cgroup/cgroup.controllers"):
        return "systemd-nspawn needs a control group hierarchy"
    return ""


def execute(*command: str, check: bool = True, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command of this machine. A failure that is checked shows what the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def wait_until(what: str, condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until a condition holds. Fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


@dataclass
class Node:
    """One machine. Its root directory is visible from here, and its state outlives `power_off` and `start`."""

    name: str
    address: str
    directory: Path
    namespace: str
    hub: str
    port: str
    # Size of a disk of its own for /var/lib/tba; 0 for none.
    disk_mib: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    leader: int = 0

    @property
    def root(self) -> Path:
        """The root file system, as long as the node is there."""
        return self.directory / "root"

    @property
    def disk(self) -> Path:
        """What has a file system of its own, if there is one, which also ends with the node."""
        return self.root / "var/lib/tba"

    @property
    def console(self) -> str:
        """What the node has printed while it booted."""
        return (self.directory / "console").read_text(errors="replace")

    def prepare(self, authorized_key: str) -> None:
        """Make the root file system, and what makes a machine of it: name, keys of its sshd, the admitted key."""
        for name in ("upper", "work", "root"):
            (self.directory / name).mkdir(parents=True)
        overlay = f"lowerdir=/,upperdir={self.directory}/upper,workdir={self.directory}/work"
        done = execute("mount", "-t", "overlay", "overlay", "-o", overlay, str(self.root), check=False)
        if done.returncode:
            pytest.skip(f"no overlay of / at {self.directory} (TMPDIR names another disk): {done.stderr.strip()}")
        (self.root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        (self.root / "etc/hostname").write_text(f"{self.name}\n")
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        units = self.root / "lib/systemd/system"
        for name in {*_MASKED, *(path.name for glob in _SET_UP_BY_THIS_MACHINE for path in units.glob(glob))}:
            link = self.root / "etc/systemd/system" / name
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        for path in (self.root / "etc/ssh").glob("ssh_host_*"):
            path.unlink()
        execute("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / "etc/ssh/ssh_host_ed25519_key"))
        (self.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        (self.root / "root/.ssh/authorized_keys").write_text(authorized_key)
        (self.root / "root/.ssh/authorized_keys").chmod(0o600)
        if self.disk_mib:
            self._make_disk()

    def _make_disk(self) -> None:
        image = str(self.directory / "disk")
        execute("truncate", f"--size={self.disk_mib}M", image)
        execute("mkfs.ext4", "-q", "-m", "0", image)
        self.disk.mkdir(parents=True)
        done = execute("mount", "-o", "loop", image, str(self.disk), check=False)
        if done.returncode:
            pytest.skip(f"no loop devices here: {done.stderr.strip()}")
        (self.disk / "lost+found").rmdir()

    def start(self, *states: str) -> None:
        """Boot, and return when systemd is in one of these states: by default, when it has started what it can."""
        assert self.process is None
        # A test run that is killed does not leave the node behind: on SIGTERM systemd-nspawn ends it. Killed, it would
        # leave it running.
        command = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            "systemd-nspawn",
            "--quiet",
            "--boot",
            f"--directory={self.root}",
            f"--machine={self.name}",
        ]
        command += [f"--network-namespace-path=/run/netns/{self.namespace}", "--register=no", "--keep-unit"]
        command += ["--console=pipe"]
        with open(self.directory / "console", "ab") as console:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        wait_until(f"{self.name} boots", partial(self._is, states or ("running", "degraded")), _BOOT_SECONDS)

    def _is(self, states: tuple[str, ...]) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.skip(f"systemd-nspawn cannot boot a node here: {self.console[-800:]}")
        children = psutil.Process(self.process.pid).children()
        if not children:
            return False
        self.leader = children[0].pid
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in states

    def run(self, *command: str, check: bool = True, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside."""
        clean = ["env", "-i", f"PATH={_SYSTEM_PATH}", "LANG=C.UTF-8", "HOME=/root"]
        return execute("nsenter", "-t", str(self.leader), "-a", *clean, *command, check=check, timeout=timeout)

    def stall_disk(self, seconds: float) -> None:
        """Keep its own disk from taking anything for a while, as one does that is slow. Returns when it works again."""
        # By one command, since a test run that is killed meanwhile would leave the disk as it is.
        script = 'fsfreeze --freeze "$0" && sleep "$1"; fsfreeze --unfreeze "$0"'
        execute("sh", "-c", script, str(self.disk), str(seconds))

    def fill_disk(self) -> None:
        """Leave no space on its own disk."""
        # It fails when nothing is left for its own index, and keeps what it has.
        execute("fallocate", f"--length={shutil.disk_usage(self.disk).free}", str(self.disk / "ballast"), check=False)

    def relieve_disk(self) -> None:
        """Give the space back."""
        (self.disk / "ballast").unlink()

    def cut(self) -> None:
        """Pull the network cable."""
        execute("ip", "-n", self.hub, "link", "set", self.port, "down")

    def connect(self) -> None:
        """Plug the network cable in again."""
        execute("ip", "-n", self.hub, "link", "set", self.port, "up")

    def power_off(self) -> None:
        """Shut down as `poweroff` does: units are stopped in order."""
        self._end(signal.SIGTERM)

    def fail(self) -> None:
        """Stop as in a power failure: everything is killed at once. What was written is on the disk."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        # systemd-nspawn powers the container off on SIGTERM, and the kernel ends all of it with its first process.
        os.kill(self.process.pid if number is signal.SIGTERM else self.leader or self.process.pid, number)
        try:
            self.process.wait(_OFF_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self.leader, signal.SIGKILL)
            self.process.wait()
        self.process, self.leader = None, 0

    def close(self) -> None:
        """Remove the node, and its disk."""
        self.fail()
        execute("umount", "--lazy", str(self.root), check=False)
        execute("ip", "-n", self.hub, "link", "del", self.port, check=False)
        execute("ip", "netns", "del", self.namespace, check=False)
        (self.directory / "disk").unlink(missing_ok=True)
        for name in ("upper", "work"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


@dataclass
class Fleet:
    """Nodes on one network, and the machine from which they are administered, which has the address 10.78.0.1."""

    directory: Path
    hub: str = field(default_factory=lambda: f"fleet{os.getpid()}")
    nodes: dict[str, Node] = field(default_factory=dict)
    _number: int = 1

    @cached_property
    def key(self) -> Path:
        """The ssh key that all nodes admit for root."""
        execute("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / "ssh_key"))
        return self.directory / "ssh_key"

    @property
    def ssh_options(self) -> list[str]:
        """Options of ssh that know the nodes and no other machine."""
        known = "".join(
            f"{node.name},{node.address} {(node.root / 'etc/ssh/ssh_host_ed25519_key.pub').read_text()}"
            for node in self.nodes.values()
        )
        (self.directory / "known_hosts").write_text(known)
        options = [f"UserKnownHostsFile={self.directory}/known_hosts", "GlobalKnownHostsFile=/dev/null"]
        options += ["StrictHostKeyChecking=yes", "ConnectTimeout=10", "BatchMode=yes"]
        return ["-F", "none", "-i", str(self.key), *(part for option in options for part in ("-o", option))]

    def create_network(self) -> None:
        """Make the namespace with the bridge. Skips the test where this is not allowed."""
        done = execute("ip", "netns", "add", self.hub, check=False)
        if done.returncode:
            pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        for command in (
            "link set lo up",
            "link add name bridge type bridge",
            "addr add 10.78.0.1/24 dev bridge",
            "link set bridge up",
        ):
            execute("ip", "-n", self.hub, *command.split())

    def add(self, name: str, disk_mib: int = 0) -> Node:
        """Make and boot a node, with a disk of its own for /var/lib/tba."""
        self._number += 1
        number, port = self._number, f"port{self._number}"
        namespace, address = f"{self.hub}-{number}", f"10.78.0.{number}"
        node = Node(name, address, self.directory / name, namespace, self.hub, port, disk_mib)
        self.nodes[name] = node
        execute("ip", "netns", "add", namespace)
        for inside, command in (
            (self.hub, f"link add name {port} type veth peer name eth0 netns {namespace}"),
            (self.hub, f"link set {port} master bridge up"),
            (namespace, "link set lo up"),
            (namespace, f"addr add {address}/24 dev eth0"),
            (namespace, "link set eth0 up"),
        ):
            execute("ip", "-n", inside, *command.split())
        node.prepare(Path(f"{self.key}.pub").read_text())
        node.start()
        return node

    def remove(self, name: str) -> None:
        """End a node, and remove its disk."""
        self.nodes.pop(name).close()

    @property
    def inside(self) -> list[str]:
        """The command that runs another one on the nodes' network."""
        return ["ip", "netns", "exec", self.hub]

    def ssh(self, node: Node, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as root on a node, over its network."""
        return execute(*self.inside, "ssh", *self.ssh_options, f"root@{node.address}", *command, check=check)

    def close(self) -> None:
        """End all nodes, and remove their disks and the network."""
        for name in list(self.nodes):
            self.remove(name)
        execute("ip", "netns", "del", self.hub, check=False)


@contextmanager
def fleet_of(directory: Path) -> Iterator[Fleet]:
    """Yield a fleet without nodes, whose disks are below a directory. Skips the test where nodes cannot be had."""
    if reason := why_no_nodes():
        pytest.skip(reason)
    fleet = Fleet(directory)
    fleet.create_network()
    try:
        yield fleet
    finally:
        fleet.close()
