"""The systemd units on a node with real systemd: what they allow, and what ends, starts and stops the roles.

Each test leaves all roles at work.
"""

import contextlib
import re

import pytest

from tba.tests.helpers.buffer import steps_trained
from tba.tests.helpers.installed import ENVIRONMENT, UNITS, install, run_tba, write
from tba.tests.helpers.nodes import Node, wait_until

pytestmark = pytest.mark.timeout(1800)

ROLES = ("tba-buffer", "tba-train@cpu", "tba-search@cpu")
PATIENCE_SECONDS = 600
KEYS, NODE_KEY = "/etc/tba/keys", "/etc/tba/keys/node.key"
AUTHORIZED = f"{KEYS}/authorized/node1.pub"
CONFIG = """
[run]
name = "units"
dir = "{directory}"
[model]
path = "/opt/tba/clone/tba/examples/arithmetic/model"
dtype = "float32"
[task]
name = "arithmetic"
limit = 96
held_out_limit = 32
[buffer]
address = "{address}"
[search]
engine = "transformers"
max_in_flight = 32
max_tokens = 6
[train]
steps = 1000000
prompts_per_step = 8
samples_per_prompt = 4
"""


class Units:
    """The units of a node, or of a user of it. `systemctl` is the command."""

    def __init__(self, node: Node, directory: str, *systemctl: str) -> None:
        self.node = node
        self.directory = directory
        self.systemctl = systemctl or ("systemctl",)

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Return the output of systemctl."""
        return self.node.run(*self.systemctl, *arguments, check=check, timeout=PATIENCE_SECONDS).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        return self("show", f"--property={name}", "--value", unit)

    def states(self) -> set[str]:
        return {self.show(unit, "ActiveState") for unit in ROLES}

    def pids(self) -> list[str]:
        return [self.show(unit, "MainPID") for unit in ROLES]

    def journal(self, match: str) -> str:
        """Return what systemd and the processes of a unit have logged, or with _PID=... one process."""
        selected = match if "=" in match else f"--unit={match}"
        return self.node.run("journalctl", "--no-pager", "--output=cat", selected).stdout

    def steps(self) -> int:
        return steps_trained(self.node.root / self.directory.lstrip("/") / "buffer.sqlite")

    def wait_for_steps(self) -> None:
        seen = self.steps()
        wait_until(f"steps after {seen}", lambda: self.steps() > seen + 1, PATIENCE_SECONDS)

    def wait_for_restarts(self, before: dict[str, str]) -> None:
        """Wait until these units, with what they had restarted before, are active again."""

        def restarted(unit: str, count: str) -> bool:
            return self.show(unit, "NRestarts") > count and self.show(unit, "ActiveState") == "active"

        wait_until("restarts", lambda: all(restarted(*one) for one in before.items()), PATIENCE_SECONDS)
        self.wait_for_steps()

    def restarts(self) -> dict[str, str]:
        return {unit: self.show(unit, "NRestarts") for unit in ROLES}

    @contextlib.contextmanager
    def drop_in(self, unit: str, *lines: str):
        """Add settings to a unit while the block runs."""
        path = f"/etc/systemd/system/{unit}.service.d/test.conf"
        write(self.node, path, "\n".join(["[Service]", *lines, ""]))
        self("daemon-reload")
        try:
            yield
        finally:
            self.node.run("rm", path)
            self("daemon-reload")


@pytest.fixture(scope="module")
def units(node: Node) -> Units:
    """All roles, at work."""
    install(node)
    directory = "/var/lib/tba/run"
    config = CONFIG.format(directory=directory, address="tcp://127.0.0.1:5757")
    write(node, "/etc/tba/tba.toml", config + f'[security]\nkeys = "{KEYS}"\n')
    run_tba(node, "keys", "new", "node1", "--role", "trainer", "--role", "searcher")
    units = Units(node, directory)
    units("enable", "tba.target", *ROLES)
    units("start", "tba.target", *ROLES)
    units.wait_for_steps()
    return units


def test_all_roles_work_in_their_sandbox_with_a_key_that_is_roots(units, node):
    assert units.states() == {"active"}
    assert node.run("stat", "--format=%U %a", NODE_KEY).stdout.strip() == "root 600"
    assert node.run("setpriv", "--reuid=tba", "--clear-groups", "cat", NODE_KEY, check=False).returncode == 1
    for pid in units.pids():
        status = node.run("cat", f"/proc/{pid}/status").stdout
        assert re.findall(r"^(?:CapBnd|NoNewPrivs|Seccomp):\s+(\w+)$", status, re.MULTILINE) == ["0" * 16, "1", "2"]


def test_a_role_that_hangs_is_ended_by_the_watchdog_with_its_stacks_in_the_journal_and_starts_again(units):
    with contextlib.ExitStack() as drop_ins:
        for unit in ROLES:
            drop_ins.enter_context(units.drop_in(unit, "WatchdogSec=30"))
        units("restart", *ROLES)
        units.wait_for_steps()
        before = units.restarts()
        units("kill", "--signal=STOP", "--kill-whom=main", *ROLES)
        units.wait_for_restarts(before)
    for unit in ROLES:
        journal = units.journal(unit)
        assert "Watchdog timeout (limit 30s)!" in journal
        assert "Fatal Python error: Aborted" in journal
    units("restart", *ROLES)


def test_a_role_that_is_killed_starts_again(units):
    before = units.restarts()
    units("kill", "--signal=KILL", "--kill-whom=main", *ROLES)
    units.wait_for_restarts(before)


def test_a_role_that_exceeds_its_memory_is_killed_and_starts_again(units):
    if not units.show("tba-buffer", "MemoryCurrent").isdigit():
        pytest.skip("systemd on this node has no memory controller")
    before = units.restarts()["tba-search@cpu"]
    units("set-property", "--runtime", "tba-search@cpu", "MemoryMax=64M")
    wait_until("killed", lambda: units.show("tba-search@cpu", "NRestarts") > before, PATIENCE_SECONDS)
    units("set-property", "--runtime", "tba-search@cpu", "MemoryMax=infinity")
    units.wait_for_restarts({"tba-search@cpu": before})


def test_a_wrong_configuration_fails_a_unit_which_is_not_restarted(units):
    with units.drop_in("tba-train@cpu", "Environment=TBA_TRAIN__LEARNING_RATE=fast"):
        units("restart", "tba-train@cpu", check=False)
        names = ("ActiveState", "SubState", "ExecMainStatus", "NRestarts")
        assert [units.show("tba-train@cpu", name) for name in names] == ["failed", "failed", "78", "0"]
    assert "train.learning_rate" in units.journal("tba-train@cpu")
    units("restart", "tba-train@cpu")
    units.wait_for_steps()


def test_a_start_that_waits_for_the_buffer_outlasts_its_limit(units):
    with units.drop_in("tba-search@cpu", "TimeoutStartSec=120"):
        units("stop", "tba-search@cpu", "tba-buffer")
        units("start", "--no-block", "tba-search@cpu")
        start = f"_PID={units.show('tba-search@cpu', 'MainPID')}"
        wait_until("it waits", lambda: "waiting for the buffer" in units.journal(start), PATIENCE_SECONDS)
        started = int(units.show("tba-search@cpu", "ExecMainStartTimestampMonotonic"))

        def seconds() -> float:
            return float(units.node.run("cat", "/proc/uptime").stdout.split()[0]) - started / 1e6

        wait_until("the limit has passed", lambda: seconds() > 125, PATIENCE_SECONDS)
        assert units.show("tba-search@cpu", "SubState") == "start"
        units("start", "tba-buffer")
        wait_until("ready", lambda: units.show("tba-search@cpu", "ActiveState") == "active", PATIENCE_SECONDS)
    assert units.show("tba-search@cpu", "NRestarts") == "0"
    units.wait_for_steps()


@pytest.mark.parametrize(
    ("broken", "repaired"),
    [
        (["chmod", "664", AUTHORIZED], ["chmod", "644", AUTHORIZED]),
        (["mv", AUTHORIZED, "/root/node1.pub"], ["mv", "/root/node1.pub", AUTHORIZED]),
    ],
    ids=["mode", "moved"],
)
def test_roles_whose_key_is_not_admitted_for_a_while_go_on_by_themselves(units, node, broken, repaired):
    pids = units.pids()

    def told() -> list[int]:
        return [units.journal(unit).count("is not authorised any more") for unit in ROLES[1:]]

    before = told()
    node.run(*broken)
    wait_until("both are told", lambda: all(map(int.__gt__, told(), before)), PATIENCE_SECONDS)
    node.run(*repaired)
    units.wait_for_steps()
    assert units.pids() == pids


def test_the_target_is_stopped_when_all_have_stopped_the_buffer_last(units):
    units("stop", "tba.target")
    assert units.states() == {"inactive"}
    stopped = {unit: int(units.show(unit, "InactiveEnterTimestampMonotonic")) for unit in ROLES}
    assert max(stopped, key=lambda unit: stopped[unit]) == "tba-buffer"
    units("start", "tba.target")
    wait_until("all start with the target", lambda: units.states() == {"active"}, PATIENCE_SECONDS)
    units.wait_for_steps()


def test_a_user_runs_all_roles_without_root(units, node):
    units("stop", "tba.target")
    node.run("useradd", "--create-home", "ann")
    home, runtime = "/home/ann", f"/run/user/{node.run('id', '--user', 'ann').stdout.strip()}"
    node.run("ln", "-s", "/opt/tba", f"{home}/tba")
    write(node, f"{home}/.config/tba/tba.toml", CONFIG.format(directory=f"{home}/run", address="auto"))
    write(node, f"{home}/.config/tba/tba.env", "".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items()))
    for unit in (UNITS / "user").iterdir():
        write(node, f"{home}/.config/systemd/user/{unit.name}", unit.read_text())
    node.run("chown", "--recursive", "ann:", f"{home}/.config")
    node.run("loginctl", "enable-linger", "ann")
    bus = ["test", "-S", f"{runtime}/bus"]
    wait_until("ann's systemd", lambda: node.run(*bus, check=False).returncode == 0, PATIENCE_SECONDS)
    as_ann = ["runuser", "-u", "ann", "--", "env", f"XDG_RUNTIME_DIR={runtime}", "systemctl", "--user"]
    own = Units(node, f"{home}/run", *as_ann)
    own("enable", "tba.target", *ROLES)
    own("start", "tba.target", *ROLES)
    own.wait_for_steps()
    own("stop", "tba.target")
    assert own.states() == {"inactive"}
    units("start", "tba.target", *ROLES)
