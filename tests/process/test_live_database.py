"""Asking a database while a real server writes to it: query, tail, export, backup, check and import."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.trajectory import pack

from .conftest import clean_environment

# A reading command does not ask for its parent by itself; without an end of its own it would outlive a killed test.
_PROGRAM = "from tba.cli import main\nfrom tba.common.process import die_with_parent\ndie_with_parent()\nmain()"
TBA = [sys.executable, "-c", _PROGRAM]
REF = wire.WeightsRef(version=0, step=0, path="/v0", manifest_sha256="0" * 64)


class Writer(threading.Thread):
    """A searcher that delivers without pause. Only this thread uses its client."""

    def __init__(self, address: str, trajectory) -> None:
        super().__init__()
        self._address, self._trajectory = address, trajectory
        self._stop_now = threading.Event()
        self.ready = threading.Event()
        self.acknowledged = 0

    def run(self) -> None:
        client = BufferClient(self._address, role="searcher", name="writer")
        try:
            client.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=20)
            keys = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=1, offset=0, keys=["p0"])
            client.call(keys, wire.Registered, deadline_seconds=20)
            client.call(wire.AnnounceSnapshot(weights=REF, bytes=1), wire.Done, deadline_seconds=20)
            while not self._stop_now.is_set():
                self._put(client, self.acknowledged)
                self.acknowledged += 4
                self.ready.set()
        finally:
            client.close()

    def _put(self, client: BufferClient, first: int) -> None:
        rows = [self._trajectory(tokens=[first + k, 1], lease=0, text=f"t{first + k}") for k in range(4)]
        columns, frames = pack(rows)
        wanted = client.post(wire.PutTrajectories(first_sequence=first, rows=wire.Rows.model_validate(columns)), frames)
        while client.is_pending(wanted):
            client.poll(0.1)

    def stop(self) -> None:
        self._stop_now.set()
        self.join(20)


@pytest.fixture
def writing(start_tba, run_config, trajectory):
    """A server and a searcher that delivers to it all the time."""
    start_tba("buffer", "serve", "--config", run_config.file)
    writer = Writer(run_config.address, trajectory)
    writer.start()
    assert writer.ready.wait(30)
    yield writer
    writer.stop()


def counted(tba, *options: str) -> int:
    result = tba("buffer", "query", "SELECT COUNT(*) AS n FROM trajectories", "--json", *options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)[0]["n"]


def test_query_sees_what_was_acknowledged_while_the_server_writes(writing, tba, run_config):
    before = writing.acknowledged
    assert counted(tba, "--config", run_config.file) >= before
    later = writing.acknowledged
    assert later > before  # it was not held up
    assert counted(tba, "--config", run_config.file) >= later


def test_a_backup_of_a_busy_buffer_is_sound_and_complete(writing, tba, run_config, tmp_path):
    before = writing.acknowledged
    result = tba("buffer", "backup", "copy.sqlite", "--json", "--config", run_config.file)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["integrity"] == "ok"
    assert before <= counted(tba, "--buffer", "copy.sqlite") <= writing.acknowledged + 4
    assert tba("buffer", "check", "--buffer", "copy.sqlite").returncode == 0


def test_a_live_buffer_passes_its_check_and_is_exported(writing, tba, run_config, tmp_path):
    result = tba("buffer", "check", "--config", run_config.file)
    assert result.returncode == 0, result.stdout
    before = writing.acknowledged
    assert tba("buffer", "export", "rows.jsonl", "--config", run_config.file).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").open()]
    assert len(rows) >= before
    assert [row["sequence"] for row in rows] == list(range(len(rows)))


def test_tail_follows_until_ctrl_c(writing, run_config, tmp_path):
    command = [*TBA, "buffer", "tail", "-n", "1", "-f", "--json", "--config", run_config.file]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ids = [json.loads(process.stdout.readline())["id"] for _ in range(20)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert ids == list(range(ids[0], ids[0] + 20))
    assert (process.returncode, errors) == (0, "")


def test_an_import_goes_through_the_running_server(writing, tba, run_config, tmp_path):
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt_ids": [1], "response_ids": [2, n], "prompt_key": "p0"}) + "\n" for n in range(100))
    )
    for new in (100, 0):
        result = tba("buffer", "import", "demos.jsonl", "--json", "--config", run_config.file)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["new"] == new
    asked = "SELECT role, trajectories FROM clients WHERE role = 'importer'"
    result = tba("buffer", "query", asked, "--json", "--config", run_config.file)
    assert json.loads(result.stdout) == [{"role": "importer", "trajectories": 100}]


def test_an_import_into_the_server_of_another_run_is_refused(writing, tba, run_config, tmp_path):
    (tmp_path / "demos.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    result = tba("buffer", "import", "demos.jsonl", "--config", run_config.file, "--set", "run.name=other")
    assert result.returncode == 78
    assert "serves run test and not other" in result.stderr


def test_ctrl_c_ends_a_long_query_at_once(writing, run_config, tmp_path):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    command = [*TBA, "buffer", "query", endless, "--config", run_config.file]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(1.5)  # there is nothing to wait for: the query says nothing
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert "error:" not in errors
