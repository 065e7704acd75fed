"""SIGKILL at random moments, and failed syncs with a power cut: every acknowledged row is stored once."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.config import Config
from tba.common.errors import BufferUnavailable
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import Status
from tba.tests.helpers.buffer import ask
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.faults import ROWS, assert_all_is_stored_once, producing, stored
from tba.tests.helpers.puts import status_of
from tba.tests.process.conftest import clean_environment
from tba.tests.runner import size

KILLS = size(12, 50)


class Trainer(threading.Thread):
    """Requests batches and reports steps without pause. An earlier step must return the same batch again."""

    def __init__(self, address: str) -> None:
        super().__init__(name="trainer", daemon=True)
        self.batches: dict[int, list[int]] = {}
        self.reported: set[int] = set()
        self.repeated = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._address = address

    def run(self) -> None:
        client = BufferClient(self._address, role="trainer", name="trainer")
        try:
            while not self.stopping.is_set():
                self._train_a_step(client, random.Random(len(self.batches)))
        except BufferUnavailable:
            pass
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        finally:
            client.close()

    def _train_a_step(self, client: BufferClient, rng: random.Random) -> None:
        step = len(self.batches)
        if step and rng.random() < 0.3:
            earlier = rng.randrange(step)
            assert self._sample(client, earlier) == self.batches[earlier], f"batch {earlier} changed"
            self.repeated += 1
        if (ids := self._sample(client, step)) is None:
            return
        self.batches[step] = ids
        report = messages.ReportStep(
            step=step, metrics={}, reference="r", trajectory_ids=ids[:2], reference_logprobs=[-1.0] * 2
        )
        client.call(report, messages.Done, stop=self.stopping.is_set)
        self.reported.add(step)
        self.stopping.wait(0.02)

    def _sample(self, client: BufferClient, step: int) -> list[int] | None:
        message = messages.SampleBatch(step=step, prompts=1, samples=4, reference="r", wait_seconds=0.1)
        request = client.post(message)
        while not self.stopping.is_set():
            for reply in client.poll(0.1):
                if reply.header.id == request:
                    return reply.message.trajectory_ids if isinstance(reply.message, messages.Batch) else None
        raise BufferUnavailable("stopped")


@pytest.fixture
def trainer(run_config):
    trainer = Trainer(run_config.address)
    yield trainer
    trainer.stopping.set()
    if trainer.is_alive():
        trainer.join(60)


def test_acknowledged_rows_survive_kills_and_are_stored_once(start_tba, run_config, trainer):
    seed = int(os.environ.get("TBA_SEED", "0"))
    # Shown if the test fails.
    print(f"TBA_SEED={seed}")
    rng = random.Random(seed)
    server = start_tba("buffer", "serve", "--config", run_config.file)
    with producing(run_config.address, 4, tokens=64) as producers:
        trainer.start()
        for _ in range(KILLS):
            # Sometimes the kill comes while the server opens the database.
            if rng.random() < 0.15:
                time.sleep(rng.uniform(0.3, 0.8))
            else:
                status_of(run_config.address)
                time.sleep(rng.uniform(0.1, 0.6))
            server.send_signal(signal.SIGKILL)
            server.wait()
            server = start_tba("buffer", "serve", "--config", run_config.file)
        for producer in producers:
            producer.wait_until_all_is_answered(60)
    trainer.stopping.set()
    trainer.join(60)
    assert trainer.failure is None
    status = status_of(run_config.address)
    server.terminate()
    assert server.wait(60) == 0
    assert_all_is_stored_once(run_config.database, producers)
    assert sum(producer.posted for producer in producers) > 10 * KILLS
    assert sum(producer.duplicates for producer in producers) > 0, "no kill came between a commit and its reply"
    check_training(run_config.database, trainer)
    check_status(run_config.database, status)


def check_training(database: Path, trainer: Trainer) -> None:
    """Check that the recorded batches are those handed out, and that reported steps are recorded."""
    for step, ids in trainer.batches.items():
        rows = ask(database, "SELECT trajectory FROM consumption WHERE step = ? ORDER BY slot", step)
        assert [id_ for (id_,) in rows] == ids
    trained = ask(database, "SELECT step FROM batches WHERE trained_at IS NOT NULL")
    assert trainer.reported <= {step for (step,) in trained}
    half = """SELECT COUNT(*) FROM batches b
              WHERE b.prompts * b.samples != (SELECT COUNT(*) FROM consumption_rows c WHERE c.batch = b.id)"""
    assert ask(database, half) == [(0,)]
    assert trainer.repeated > 0
    print(f"{len(trainer.batches)} batches, {trainer.repeated} repeated")


def check_status(database: Path, status: Status) -> None:
    """Check that a new server counts what the last one counted."""
    store = Store(database, durability="process")
    try:
        config = Config.model_validate({"train": {"prompts_per_step": 1}})
        run = store.open_run("test", seed=0, config={}, software={})
        rebuilt = BufferService(store, run, config, ManualClock()).status()
        rows, errors = store.trajectories.counts(run)
    finally:
        store.close()
    counts = ("trajectories", "errors", "sampleable", "step", "epoch", "prompts")
    assert {name: getattr(status, name) for name in counts} == {name: getattr(rebuilt, name) for name in counts}
    assert (status.trajectories, status.errors) == (rows, errors)
    # A client that stops does not wait for its last reply.
    assert status.rejected.keys() <= {"undeliverable"}


# Real servers on a disk simulated by failing_disk.c. Each test ends with a power cut, which leaves what the disk holds.
# A put is 256 KiB.
TOKENS = 8192
# The WAL is checkpointed after 16 puts, which are 4 MiB.
PUTS = 40

# A writer whose SQLite syncs the database at the end of a checkpoint, and the WAL at a commit.
WRITER = """
import sys
from pathlib import Path
from tba.buffer.store.store import Store
from tba.common.errors import SyncFailed
store = Store(Path(sys.argv[1]), durability="power")
store.database.written = 1 << 30
store.database.checkpoint()
Path(sys.argv[2]).write_text(sys.argv[3])
try:
    store.open_run("test", seed=0, config={}, software={})
    store.database.written = 1 << 30
    store.database.checkpoint()
except SyncFailed as error:
    print(type(error.__cause__).__name__, error.__cause__.sqlite_errorname)
try:
    store.open_run("other", seed=0, config={}, software={})
except SyncFailed:
    print("again")
store.close()
"""


@dataclass(frozen=True)
class Disk:
    """The disk that `failing_disk.c` simulates for processes with this environment."""

    library: Path
    database: Path

    @property
    def fault(self) -> Path:
        return self.database.with_name("fault")

    @property
    def environment(self) -> dict[str, str]:
        # By its name: a path in LD_PRELOAD ends at a space.
        folders = os.pathsep.join(filter(None, (str(self.library.parent), os.environ.get("LD_LIBRARY_PATH"))))
        preload = {"LD_PRELOAD": self.library.name, "LD_LIBRARY_PATH": folders}
        return preload | {"DISK_DATABASE": str(self.database), "DISK_FAULT": str(self.fault)}

    @property
    def log(self) -> Path:
        return self.database.with_name(self.database.name + "-wal")

    def fail_the_next_sync_of(self, kind: str) -> None:
        self.fault.write_text(kind)

    def cut_power(self) -> None:
        """Keep only what was synced."""
        for file in (self.database, self.log):
            file.unlink(missing_ok=True)
            if (held := file.with_name(f"{file.name}.disk")).exists():
                held.replace(file)
        self.database.with_name(self.database.name + "-shm").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("the failing disk needs Linux and a C compiler")
    built = tmp_path_factory.mktemp("disk") / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl", "-lpthread"], check=True)
    return built


@pytest.fixture
def disk(library, run_config):
    return Disk(library, run_config.database)


@pytest.fixture
def serve(start_tba, run_config, disk):
    return lambda: start_tba("buffer", "serve", "--config", run_config.file, **disk.environment)


def wait_for_acknowledged(producers, puts: int) -> None:
    """Wait until the producers have received this many more acknowledgements, and each of them one."""
    enough = sum(len(producer.acknowledged) for producer in producers) + puts

    # One that is still introducing itself when the server ends would wait for it longer than the test.
    def received() -> bool:
        counts = [len(producer.acknowledged) for producer in producers]
        return sum(counts) >= enough and min(counts) > 0

    wait_until(received, what="acknowledged")


def assert_ends_with_a_sentence(server, folder) -> None:
    assert server.wait(60) == 1
    output = (folder / "tba0.log").read_text()
    assert re.search(r"error: the disk of .+ failed to write data \(.+\): nothing more is ack", output)
    assert "Traceback" not in output


def assert_stored(disk, producers, acknowledged) -> None:
    """Assert that the rows of the puts that each producer had acknowledged are on the disk."""
    found = stored(disk.database)
    for producer, firsts in zip(producers, acknowledged, strict=True):
        assert {first + k for first in firsts for k in range(ROWS)} <= set(found.sequences(producer.number))


@pytest.mark.parametrize("kind", ["database", "log"])
def test_a_failed_sync_ends_the_server_and_the_next_one_has_every_acknowledged_row(
    serve, disk, run_config, tmp_path, kind
):
    server = serve()
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_for_acknowledged(producers, 4)
        disk.fail_the_next_sync_of(kind)
        assert_ends_with_a_sentence(server, tmp_path)
        assert disk.log.stat().st_size > 0
        server = serve()
        wait_for_acknowledged(producers, PUTS)
        for producer in producers:
            producer.wait_until_all_is_answered(60)
        server.kill()
        server.wait()
        disk.cut_power()
        assert_all_is_stored_once(disk.database, producers)


@pytest.mark.parametrize("kind", ["database", "log"])
def test_a_failed_sync_of_sqlite_itself_is_final_too(disk, kind):
    disk.database.parent.mkdir()
    command = [sys.executable, "-c", WRITER, disk.database, disk.fault, kind]
    environment = clean_environment() | disk.environment
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["OperationalError SQLITE_IOERR_FSYNC", "again"]
    assert disk.log.stat().st_size > 0


def test_acknowledged_rows_survive_a_power_cut_after_a_failed_sync(serve, disk, run_config, tmp_path):
    server = serve()
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_for_acknowledged(producers, PUTS)
        disk.fail_the_next_sync_of("database")
        assert_ends_with_a_sentence(server, tmp_path)
        acknowledged = [set(producer.acknowledged) for producer in producers]
    disk.cut_power()
    assert_stored(disk, producers, acknowledged)
