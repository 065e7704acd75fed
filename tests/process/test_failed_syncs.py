"""A sync that fails loses what was written before it, and the next one succeeds: nothing acknowledged may hang on it.

Real servers on a disk that failing_disk.c plays. Each test ends with a power cut, which shows what the disk holds.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import clean_environment
from .fault_lab import ROWS, assert_all_is_stored_once, producing, stored, wait_for

TOKENS = 8192  # a put is 256 KiB
PUTS = 40  # the log is copied after 32

# Another program that has the database open, and a view of it that keeps the log from being copied completely.
PROGRAM = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN")
connection.execute("SELECT COUNT(*) FROM trajectory_rows").fetchone()
print("reads", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
print("idle", flush=True)
sys.stdin.readline()
connection.close()
"""

# A writer whose SQLite syncs: the database at the end of a checkpoint, the log when it is begun anew.
WRITER = """
import sys
from pathlib import Path
from tba.buffer.store import Store
from tba.common.errors import SyncFailed
store = Store(Path(sys.argv[1]), durability="process")
store.log.finish()
Path(sys.argv[2]).write_text(sys.argv[3])
try:
    store.open_run("test", seed=0, config={}, software={})
    store.log.finish()
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
    """What `failing_disk.c` plays for the processes that get its environment."""

    library: Path
    database: Path

    @property
    def fault(self) -> Path:
        return self.database.with_name("fault")

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "DISK_DATABASE": str(self.database), "DISK_FAULT": str(self.fault)}

    @property
    def log(self) -> Path:
        return self.database.with_name(self.database.name + "-wal")

    def beginning_of_the_log(self) -> bytes:
        """It is another one when the log has been begun anew."""
        with self.log.open("rb") as log:
            return log.read(32)

    def refuse_a_sync_of(self, kind: str) -> None:
        self.fault.write_text(kind)

    def cut_power(self) -> None:
        """What is left is what was synced."""
        for file in (self.database, self.log):
            file.unlink(missing_ok=True)
            if (held := file.with_name(f"{file.name}.disk")).exists():
                held.replace(file)
        self.database.with_name(self.database.name + "-shm").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if (compiler := shutil.which("cc")) is None or sys.platform != "linux":
        pytest.skip("there is no C compiler, or no Linux, for a disk that fails")
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
    """Until they have so many more."""
    enough = sum(len(producer.acknowledged) for producer in producers) + puts
    wait_for(lambda: sum(len(producer.acknowledged) for producer in producers) >= enough, 60, "acknowledged")


def assert_ends_with_a_sentence(server, folder) -> None:
    assert server.wait(30) == 1
    said = (folder / "tba0.log").read_text()
    assert re.search(r"error: the disk of \S+ failed to take what was written there \(.+\): nothing more is ack", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["database", "log"])
def test_a_failed_sync_ends_the_server_and_the_next_one_has_all_that_was_acknowledged(
    serve, disk, run_config, tmp_path, kind
):
    server = serve()
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_for_acknowledged(producers, 4)
        disk.refuse_a_sync_of(kind)
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
def test_a_sync_that_sqlite_makes_is_the_last_one_too(disk, kind):
    disk.database.parent.mkdir()
    command = [sys.executable, "-c", WRITER, disk.database, disk.fault, kind]
    environment = clean_environment() | disk.environment
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines() == ["OperationalError SQLITE_IOERR_FSYNC", "again"]
    assert disk.log.stat().st_size > 0


def test_what_was_acknowledged_survives_a_power_cut_after_a_failed_sync(serve, disk, run_config, tmp_path):
    server = serve()
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_for_acknowledged(producers, PUTS)
        disk.refuse_a_sync_of("database")
        assert_ends_with_a_sentence(server, tmp_path)
        acknowledged = [set(producer.acknowledged) for producer in producers]
    disk.cut_power()
    found = stored(disk.database)
    for producer, firsts in zip(producers, acknowledged, strict=True):
        assert {first + k for first in firsts for k in range(ROWS)} <= set(found.sequences(producer.number))


@contextmanager
def another_program(disk):
    """It reads; a line makes it end its view, the next one close the database."""
    command = [sys.executable, "-c", PROGRAM, str(disk.database)]
    environment = clean_environment() | disk.environment
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout.readline() == "reads\n"
            yield program
        finally:
            program.kill()


def tell(program) -> None:
    program.stdin.write("\n")
    program.stdin.flush()


@contextmanager
def failed_half_way(serve, disk, run_config, folder):
    """Producers, and a program with the database open; half of the log was copied when the disk refused a sync."""
    server = serve()
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_for_acknowledged(producers, PUTS)
        with another_program(disk) as program:
            disk.refuse_a_sync_of("database")
            assert_ends_with_a_sentence(server, folder)
            yield producers, program


def test_a_program_that_outlives_the_server_does_not_make_the_next_one_believe_in_what_is_lost(
    serve, disk, run_config, tmp_path
):
    with failed_half_way(serve, disk, run_config, tmp_path) as (producers, program):
        beginning = disk.beginning_of_the_log()
        server = serve()
        tell(program)
        assert program.stdout.readline() == "idle\n"
        wait_for(lambda: disk.beginning_of_the_log() != beginning, 60, "all of the log is copied")
        for producer in producers:
            producer.wait_until_all_is_answered(60)
        server.kill()
        server.wait()
        program.kill()
        program.wait()
        disk.cut_power()
        assert_all_is_stored_once(disk.database, producers)


def test_a_program_that_closes_the_database_last_deletes_no_log_that_is_needed(serve, disk, run_config, tmp_path):
    with failed_half_way(serve, disk, run_config, tmp_path) as (producers, program):
        acknowledged = [set(producer.acknowledged) for producer in producers]
        tell(program)
        tell(program)
        assert program.wait(30) == 0
        assert not os.path.exists(disk.log)
        disk.cut_power()
        found = stored(disk.database)
        for producer, firsts in zip(producers, acknowledged, strict=True):
            assert {first + k for first in firsts for k in range(ROWS)} <= set(found.sequences(producer.number))
