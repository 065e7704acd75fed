"""Commands on a database while a real server writes to it: query, tail, export, backup, check and import."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tba.tests.helpers.checks import not_none, wait_until
from tba.tests.helpers.faults import ROWS, producing
from tba.tests.process.conftest import clean_environment

# Commands that read do not end with their parent by themselves, and would outlive a killed test.
_PROGRAM = "from tba.cli import main\nfrom tba.common.system.process import die_with_parent\ndie_with_parent()\nmain()"
TBA = [sys.executable, "-c", _PROGRAM]


@pytest.fixture
def writing(start_tba, run_config):
    """A server and a searcher that puts continuously. Returns a function that counts the acknowledged rows."""
    start_tba("buffer", "serve", "--config", run_config.file)
    with producing(run_config.address, 1, tokens=2, window=1) as (producer,):
        wait_until(lambda: producer.acknowledged)
        yield lambda: len(producer.acknowledged) * ROWS


def counted(tba_here, *options: str) -> int:
    return tba_here("buffer", "query", "SELECT COUNT(*) AS n FROM trajectories", "--json", *options).json[0]["n"]


def test_query_sees_acknowledged_rows_while_the_server_writes(writing, tba_here, run_config):
    before = writing()
    assert counted(tba_here, "--config", run_config.file) >= before
    # The query did not block the server.
    wait_until(lambda: writing() > before)
    later = writing()
    assert counted(tba_here, "--config", run_config.file) >= later


def test_a_live_buffer_passes_its_check_and_is_exported(writing, tba_here, run_config, tmp_path):
    result = tba_here("buffer", "check", "--config", run_config.file)
    assert result.exit_code == 0, result.output
    before = writing()
    assert tba_here("buffer", "export", "rows.jsonl", "--config", run_config.file).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) >= before
    assert [row["sequence"] for row in rows] == list(range(len(rows)))


def test_tail_follows_until_ctrl_c(writing, run_config, tmp_path):
    command = [*TBA, "buffer", "tail", "-n", "1", "-f", "--json", "--config", run_config.file]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ids = [json.loads(not_none(process.stdout).readline())["id"] for _ in range(20)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert ids == list(range(ids[0], ids[0] + 20))
    assert (process.returncode, errors) == (0, "")


def test_an_import_goes_through_the_running_server(writing, tba_here, run_config, tmp_path):
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt_ids": [1], "response_ids": [2, n], "prompt_key": "p0"}) + "\n" for n in range(100))
    )
    for new in (100, 0):
        result = tba_here("buffer", "import", "demos.jsonl", "--json", "--config", run_config.file)
        assert result.exit_code == 0, result.message
        assert result.json["new"] == new
    query = "SELECT role, trajectories FROM clients WHERE role = 'importer'"
    result = tba_here("buffer", "query", query, "--json", "--config", run_config.file)
    assert result.json == [{"role": "importer", "trajectories": 100}]


def test_an_import_into_the_server_of_another_run_is_refused(writing, tba_here, run_config, tmp_path):
    (tmp_path / "demos.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2]}\n')
    result = tba_here("buffer", "import", "demos.jsonl", "--config", run_config.file, "--set", "run.name=other")
    assert result.exit_code == 78
    assert "belongs to run test, and run.name is other" in result.message


def test_ctrl_c_ends_a_long_query_immediately(writing, run_config, tmp_path):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    command = [*TBA, "buffer", "query", endless, "--config", run_config.file]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # The query prints nothing, but its process opens the database.
        wait_until(lambda: str(run_config.database) in {file.path for file in psutil.Process(process.pid).open_files()})
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert "error:" not in errors
