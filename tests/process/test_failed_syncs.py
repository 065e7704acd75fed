"""A failed sync loses the data written before it, and the next one succeeds: no acknowledgement may depend on it.

Real servers on a disk simulated by failing_disk.c. Each test ends with a power cut, which leaves what the disk holds.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.faults import ROWS, assert_all_is_stored_once, producing, stored
from tba.tests.process.conftest import clean_environment

# A put is 256 KiB.
TOKENS = 8192
# The WAL is checkpointed after 32 puts, which are 8 MiB.
PUTS = 40

# A writer whose SQLite syncs the database at the end of a checkpoint, and the WAL at a commit.
WRITER = """
import sys
from pathlib import Path
from tba.buffer.store.store import Store
from tba.common.errors import SyncFailed
store = Store(Path(sys.argv[1]), durability="power")
store.database.note_written(1 << 30)
Path(sys.argv[2]).write_text(sys.argv[3])
try:
    store.open_run("test", seed=0, config={}, software={})
    store.database.note_written(1 << 30)
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
    """Wait until the producers have received this many more acknowledgements."""
    enough = sum(len(producer.acknowledged) for producer in producers) + puts
    wait_until(lambda: sum(len(producer.acknowledged) for producer in producers) >= enough, what="acknowledged")


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
