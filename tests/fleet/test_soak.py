"""A soak: a random series of faults on four nodes that train, and what the database and the processes are like then.

TBA_SEED gives the series, and TEST_SOAK_SECONDS its length: three minutes in `make test-fleet`, ten in `make test-all`,
two hours by hand. In the second half no event ends a process, so that each can be seen to stay as it is. The events are
printed, and written to build/fleet/test_soak.log; numbers go to test_soak.json there.

The nodes have the clock of this machine; wall_clock.c gives the units of tba one that steps. Debian 12's libfaketime
0.9.10 cannot: with it `time.sleep` of Python 3.11, which waits for a point of the monotonic clock, fails with EINVAL.
"""

import itertools
import os
import random
import re
import shutil
import statistics
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from tba.common.errors import RecordLost
from tba.common.wire.codec import decode_request
from tba.common.wire.messages import PutTrajectories
from tba.searcher.delivery.spool import read_put
from tba.tests.helpers.nodes import Node, execute, wait_until
from tba.tests.helpers.site import FLEET, Site, is_active
from tba.tests.runner import size

SECONDS = int(os.environ.get("TEST_SOAK_SECONDS", size(180, 600)))
SEED = int(os.environ.get("TBA_SEED", "0"))
# Of each node, for /var/lib/tba.
DISK_MIB = 8192
PATIENCE_SECONDS = 300
UNITS = {"node0": ("tba-buffer", "tba-train@cpu")} | dict.fromkeys(("node1", "node2", "node3"), ("tba-search@cpu",))
SPOOL = Path("var/lib/tba/runs/demo/spool")
SNAPSHOT_PATH = re.compile(r"/v\d{8}-[0-9a-f]{16}(/|$)")
# What steps the wall clocks of all units of tba on a node, and by how much: in the node's root.
LIBRARY, OFFSET, DROP_IN = (
    "usr/lib/wall_clock.so",
    "etc/wall_clock",
    "etc/systemd/system/tba-.service.d/wall_clock.conf",
)
# What it may have more in its last third than in the middle one: memory of its own (RssAnon) in MiB, descriptors and
# threads. Allocators keep what the largest step took. The buffer remembers each row, in about 0.2 KiB.
MOST_MORE = (24.0, 8, 4)
KIB_OF_A_ROW = 0.3

pytestmark = pytest.mark.timeout(SECONDS + 2400)


@dataclass(frozen=True)
class Event:
    """A fault: when it begins, in seconds of the soak, and how long it lasts if it lasts."""

    number: int
    at: float
    kind: str
    node: str
    unit: str
    seconds: float


Undo = Callable[[], object]


def kill(site: Site, node: Node, event: Event) -> None:
    """SIGKILL of the process of a role."""
    node.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", event.unit, check=False)


def stop(site: Site, node: Node, event: Event) -> Undo:
    """A unit is stopped, and started again."""
    node.run("systemctl", "stop", event.unit)
    return partial(node.run, "systemctl", "start", "--no-block", event.unit)


def cut(site: Site, node: Node, event: Event) -> Undo:
    """The network of a node is away."""
    node.cut()
    return node.connect


def power(site: Site, node: Node, event: Event) -> None:
    """A power failure of a node, which boots again. It is `starting` for as long as a role waits for the buffer."""
    node.fail()
    node.start("starting", "running", "degraded")


def slow_disk(site: Site, node: Node, event: Event) -> None:
    """The disk of a node takes nothing, but for moments."""
    for _ in range(3):
        node.stall_disk(event.seconds / 3)


def full_disk(site: Site, node: Node, event: Event) -> Undo:
    """The disk of a node has no space left."""
    node.fill_disk()
    return node.relieve_disk


def key(site: Site, node: Node, event: Event) -> Undo:
    """The buffer does not admit the key of a node."""
    buffer, away = site.fleet.nodes["node0"], f"/root/{node.name}.pub"
    admitted = f"/etc/tba/keys/authorized/{node.name}.pub"
    buffer.run("mv", admitted, away)
    return lambda: buffer.run("mv", away, admitted)


def set_clock(node: Node, seconds: int) -> None:
    """Set the wall clock of the units of a node to this much more than this machine's."""
    with open(node.root / OFFSET, "r+b", buffering=0) as file:
        file.write(struct.pack("q", seconds))


def clock(site: Site, node: Node, event: Event) -> Undo:
    """The wall clock of a node steps by up to an hour, forwards or back, and then to the right time."""
    set_clock(node, random.Random(event.number).randint(-3600, 3600))
    return partial(set_clock, node, 0)


def database(site: Site, node: Node, event: Event) -> None:
    """The open database is replaced by an empty file, which the buffer then serves, and put back (docs/outages.md)."""
    wait_until("the buffer serves", lambda: is_active(node, "tba-buffer"), PATIENCE_SECONDS)
    path = site.database
    wal, index, empty = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", ".empty"))
    owner = path.stat()
    empty.touch()
    os.chown(empty, owner.st_uid, owner.st_gid)
    empty.replace(path)
    kept = f"{path.name}.replaced-*"
    wait_until("the buffer has kept both", lambda: len(list(path.parent.glob(kept))) == 2, PATIENCE_SECONDS)
    node.run("systemctl", "stop", "tba-buffer")
    for file in (path, wal, index):
        file.unlink(missing_ok=True)
    for file in list(path.parent.glob(kept)):
        file.rename(wal if file.name.endswith("-wal") else path)
    node.run("systemctl", "start", "--no-block", "tba-buffer")


KINDS: dict[str, Callable[[Site, Node, Event], Undo | None]] = {
    kind.__name__: kind for kind in (kill, stop, power, database, cut, slow_disk, full_disk, key, clock)
}
# Those that end no process.
MILD = ["cut", "slow_disk", "full_disk", "key", "clock"]


def series(seed: int, seconds: float) -> Iterator[Event]:
    """Yield the events of a seed: of all kinds in the first half, MILD ones in the second."""
    rng, at = random.Random(seed), 0.0
    for number in itertools.count(1):
        at += rng.uniform(5, 25)
        kinds = [*KINDS] if at < seconds / 2 else MILD
        kind, node = rng.choice(kinds), rng.choice(["node0", *UNITS])
        node = "node0" if kind == "database" else node
        event = Event(number, round(at, 1), kind, node, rng.choice(UNITS[node]), round(rng.uniform(2, 15), 1))
        if at > seconds:
            return
        yield event


def processes(node: Node, recursive: bool = True) -> list[psutil.Process]:
    """Return the processes of a node that run as the user of tba; of its systemd alone if not recursive."""
    user, found = node.disk.stat().st_uid, []
    for process in psutil.Process(node.leader).children(recursive):
        with suppress(psutil.NoSuchProcess):
            if process.uids().real == user:
                found.append(process)
    return found


def waiting(node: Node) -> dict[str, int]:
    """Return one more than the last number of each sender whose puts are on the disk of a node."""
    found: dict[str, int] = {}
    for folder, _, names in os.walk(node.root / SPOOL):
        for name in sorted(name for name in names if name.endswith(".put")):
            # It is delivered meanwhile.
            with suppress(RecordLost):
                frames = read_put(Path(folder, name))
                put = decode_request([memoryview(frame) for frame in frames])
                assert isinstance(put.message, PutTrajectories)
                found[put.header.sender] = put.message.first_sequence + len(put.message.rows.prompt_key)
    return found


def usage(process: psutil.Process) -> tuple[float, int, int]:
    """Return what MOST_MORE limits. Raises OSError or KeyError if the process has ended.

    Not the snapshots that a server holds for 20 s after a node has read them: the faster the steps, the more they are.
    """
    folder = Path(f"/proc/{process.pid}")
    open_files = [os.readlink(link) for link in (folder / "fd").iterdir()]
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    memory, threads = (int(status[name].split()[0]) for name in ("RssAnon", "Threads"))
    return memory / 1024, sum(not SNAPSHOT_PATH.search(path) for path in open_files), threads


def growth(samples: list[tuple[float, int, int]]) -> tuple[float, ...]:
    """Return how much more a process had at least in its last third than in the middle one.

    The least, since a download and what it has open are no growth, however many there are in one third.
    """
    third = len(samples) // 3
    last, middle = (zip(*part, strict=True) for part in (samples[-third:], samples[third:-third]))
    return tuple(min(a) - min(b) for a, b in zip(last, middle, strict=True))


@dataclass
class Soak:
    """Brings events about, and remembers what was seen between them."""

    site: Site
    active: dict[str, tuple[float, Undo]] = field(default_factory=dict)
    # Of the second half, by node, command, process id and time of start.
    samples: dict[tuple[str, str, int, float], list[tuple[float, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # One more than the last number of a sender: in the table, and in a put that its spool held.
    stored: dict[str, int] = field(default_factory=dict)
    spooled: dict[str, int] = field(default_factory=dict)
    # The trajectories of each trained step.
    batches: dict[int, str] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    # How often the processes were sampled.
    times: int = 0

    def run(self, events: list[Event], seconds: float) -> None:
        """Bring the events about, and end them after this time."""
        started = time.monotonic()
        with open(FLEET / "test_soak.log", "w") as log:
            for event in [*events, Event(0, seconds, "end", "", "", 0)]:
                while (elapsed := time.monotonic() - started) < event.at:
                    self.end(lambda node, until: until < elapsed)
                    self.look()
                    if elapsed > seconds / 2:
                        self.sample()
                    time.sleep(2)
                # While the buffer starts there may be no tables, or no space for a reader.
                if is_active(self.site.fleet.nodes["node0"], "tba-buffer"):
                    self.read()
                seen = f"{len(self.batches)} steps, {sum(self.stored.values())} rows"
                line = f"seed {SEED}, {elapsed:.0f} s, {seen}: {event}"
                print(line)
                print(line, file=log, flush=True)
                # What a node has ends before its next one begins, and what is over although the last one took so long.
                self.end(lambda node, until: event.node in (node, "") or until < elapsed)  # noqa: B023
                if event.node:
                    undo = KINDS[event.kind](self.site, self.site.fleet.nodes[event.node], event)
                    if undo:
                        self.active[event.node] = (time.monotonic() - started + event.seconds, undo)

    def end(self, selected: Callable[[str, float], bool]) -> None:
        """End the events that are selected by node and time."""
        for node in [node for node, (until, _) in self.active.items() if selected(node, until)]:
            self.active.pop(node)[1]()

    def look(self) -> None:
        """Note which rows wait on the disks of searchers."""
        self.loads.append(os.getloadavg()[0])
        for node in self.site.fleet.nodes.values():
            for sender, end in waiting(node).items():
                self.spooled[sender] = max(self.spooled.get(sender, 0), end)

    def sample(self) -> None:
        """Sample what the processes use."""
        self.times += 1
        for node in self.site.fleet.nodes.values():
            for process in processes(node):
                # It ends meanwhile.
                with suppress(psutil.NoSuchProcess, OSError, KeyError):
                    command = " ".join(process.cmdline()[1:4]).removeprefix("/opt/tba/bin/")
                    key = node.name, command, process.pid, process.create_time()
                    self.samples[key].append(usage(process))

    def read(self) -> None:
        """Read how far the database is, and check that it has all that it had before."""
        newest = "SELECT MAX(sequence) + 1 FROM trajectory_rows t WHERE t.sender = s.id"
        stored = dict(self.site.query(f"SELECT s.sender, ({newest}) FROM senders s WHERE trajectories"))
        assert {sender: stored.get(sender) for sender, end in self.stored.items() if stored.get(sender, 0) < end} == {}
        self.stored = stored
        self.batches |= self.trained(after=max(self.batches, default=-1))

    def trained(self, after: int) -> dict[int, str]:
        """Return the trajectories of the trained steps after one."""
        slots = "SELECT trajectory FROM consumption_rows c WHERE c.batch = b.id ORDER BY slot"
        sql = f"SELECT step, (SELECT group_concat(trajectory) FROM ({slots})) FROM batches b"
        return dict(self.site.query(f"{sql} WHERE trained_at IS NOT NULL AND step > ?", after))


@pytest.fixture(scope="module")
def soak(site: Site) -> Soak:
    """The soak, when it is over and all roles work again without help."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("clocks that step need a C compiler")
    for node in site.fleet.nodes.values():
        execute(compiler, "-shared", "-fPIC", "-o", f"{node.root / LIBRARY}", f"{Path(__file__).parent}/wall_clock.c")
        (node.root / OFFSET).write_bytes(bytes(8))
        (node.root / DROP_IN).parent.mkdir()
        (node.root / DROP_IN).write_text(f"[Service]\nEnvironment=LD_PRELOAD=/{LIBRARY} WALL_CLOCK=/{OFFSET}\n")
    site.play("site")
    site.wait_for_steps()
    for node in site.fleet.nodes.values():
        assert all(OFFSET in Path(f"/proc/{main.pid}/maps").read_text() for main in processes(node, recursive=False))
    soak = Soak(site)
    events = [*series(SEED, SECONDS)]
    soak.run(events, SECONDS)
    for kind, count in Counter(event.kind for event in events).items():
        site.note(f"events: {kind}", count)
    site.note("load", statistics.mean(soak.loads))
    for name, units in UNITS.items():
        for unit in units:
            working = partial(is_active, site.fleet.nodes[name], unit)
            wait_until(f"{unit} of {name} works", working, PATIENCE_SECONDS)
    site.wait_for_steps()
    for name in ("node1", "node2", "node3"):
        site.wait_for_rows(name)
    return soak


def test_no_process_grows_that_lived_through_half_of_the_second_half(soak):
    grown = {key: growth(samples) for key, samples in soak.samples.items() if len(samples) >= max(3, soak.times / 2)}
    print(*(f"{key}: {more}" for key, more in grown.items()), sep="\n")
    for number, what in enumerate(("MiB", "descriptors", "threads")):
        soak.site.note(f"most more {what}", max((more[number] for more in grown.values()), default=0))
    of_rows = KIB_OF_A_ROW * sum(soak.stored.values()) / 6 / 1024

    def is_too_much(command: str, more: tuple[float, ...]) -> bool:
        mib, *others = MOST_MORE
        limits = (mib + of_rows if command == "tba buffer serve" else mib, *others)
        return any(map(float.__gt__, map(float, more), limits))

    assert {key: more for key, more in grown.items() if is_too_much(key[1], more)} == {}
    roles = Counter((name, command.split()[1]) for name, command, *_ in grown if command.startswith("tba "))
    searchers = {(name, "search"): 1 for name in ("node1", "node2", "node3")}
    assert SECONDS < 600 or roles == {("node0", "buffer"): 1, ("node0", "train"): 1} | searchers


def test_no_process_is_an_orphan_or_a_zombie(soak):
    for name, units in UNITS.items():
        node = soak.site.fleet.nodes[name]
        systemd = partial(processes, node, recursive=False)
        wait_until(f"systemd of {name} has one process for each unit", lambda: len(systemd()) == len(units), 30)  # noqa: B023
        states = partial(node.run, "ps", "-e", "-o", "stat=")
        wait_until(f"no zombie on {name}", lambda: "Z" not in states().stdout, 30)  # noqa: B023


def test_no_process_has_failed_with_a_traceback(soak):
    for node in soak.site.fleet.nodes.values():
        journal = node.run("journalctl", "--no-pager", "--output=cat", "--unit=tba-*").stdout
        assert "Traceback" not in journal, journal[max(0, journal.index("Traceback") - 2000) :][:6000]


def test_all_roles_stop_and_nothing_runs_on(soak):
    soak.site.play("stop")
    for node in soak.site.fleet.nodes.values():
        assert processes(node) == []


def test_no_row_is_lost_that_a_searcher_had_sent(soak):
    soak.read()
    site = soak.site
    site.note("rows", sum(soak.stored.values()))
    assert site.query("SELECT COUNT(*) - (MAX(id) - MIN(id) + 1) FROM trajectory_rows") == [(0,)]
    rows = "SELECT COUNT(*) FROM trajectory_rows t WHERE t.sender = s.id"
    assert site.query(f"SELECT sender, trajectories FROM senders s WHERE trajectories != ({rows})") == []
    ends = soak.stored.copy()
    for sender, end in (pair for node in site.fleet.nodes.values() for pair in waiting(node).items()):
        ends[sender] = max(ends.get(sender, 0), end)
    assert {sender: end for sender, end in soak.spooled.items() if ends.get(sender, 0) < end} == {}
    assert [path for node in site.fleet.nodes.values() for path in (node.root / SPOOL / "aside").glob("*")] == []


def test_each_step_is_there_once_with_the_batch_that_it_was_first_given(soak):
    site = soak.site
    site.note("steps", site.steps())
    site.check_history()
    trained = soak.trained(after=-1)
    assert {step for step, rows in soak.batches.items() if trained.get(step) != rows} == set()
    slots = "SELECT COUNT(*) FROM consumption_rows c WHERE c.batch = b.id"
    assert site.query(f"SELECT step FROM batches b WHERE prompts * samples != ({slots})") == []
