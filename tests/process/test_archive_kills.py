"""`tba buffer archive` is killed at any moment: the tokens of each trajectory are always in exactly one place."""

import contextlib
import itertools
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tba.buffer.store.archives import Archives
from tba.buffer.tools.check import check
from tba.common.config import Config
from tba.tests.helpers.buffer import ServiceHarness, ask
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.puts import make_trajectory
from tba.tests.process.conftest import clean_environment
from tba.tests.runner import size

# Of each of the two tests.
KILLS, ROWS, SAMPLEABLE = size(4, 10), size(1600, 4000), 16
# Files of a few trajectories, so that there are many moments at which a command has just done something.
_PROGRAM = """
from tba.buffer.tools import archive
from tba.cli import main
from tba.common.system.process import die_with_parent
die_with_parent()
archive._FILE_GROUPS, archive._GROUP_BYTES = 4, 20_000
main()
"""
PLACES = "SELECT t.id, y.trajectory, t.archive FROM trajectories t LEFT JOIN payloads y ON y.trajectory = t.id"


@pytest.fixture
def config(make_config):
    """A run of `ROWS` trajectories of eight prompts, of which `SAMPLEABLE` can be sampled."""
    made = make_config(buffer={"prompt_cap": 2, "address": "tcp://127.0.0.1:*"})
    buffer = ServiceHarness(made.database, Config.model_validate({"buffer": {"prompt_cap": 2}}))
    buffer.fill(8, 0)
    rng = random.Random(0)
    for first in range(0, ROWS, 100):
        rows = [make_trajectory(f"p{n % 8}", 0, tokens=[rng.randrange(9999) for _ in range(200)]) for n in range(100)]
        buffer.put(rows, first)
    buffer.store.close()
    return made


# What a command has just done when it is killed, or a moment later.
def unfinished(folder: Path, _: Path) -> object:
    return {path.name for path in (folder / "old").rglob("*.tmp")}


def finished(folder: Path, _: Path) -> object:
    return {path.name for path in (folder / "old").rglob("*.parquet")}


def dropped(_: Path, database: Path) -> object:
    return ask(database, "SELECT COUNT(archive) FROM trajectory_rows")


@pytest.mark.slow
@pytest.mark.needs("fsspec", "pyarrow")
@pytest.mark.parametrize("served", [False, True])
def test_after_any_kill_tokens_are_in_exactly_one_place(config, make_config, start_tba, tmp_path, served):
    before = ask(config.database, "SELECT *, x'' FROM payloads")
    if served:
        config = make_config(buffer={"prompt_cap": 2})
        start_tba("buffer", "serve", "--config", config.file)
    command = [sys.executable, "-c", _PROGRAM, "buffer", "archive", "old", "--config", config.file, "--keep-steps", "0"]
    rng, moved, killed = random.Random(1), [0], 0
    for moment in itertools.islice(itertools.cycle((dropped, unfinished, finished)), KILLS):
        with subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE) as process:
            look = partial(moment, tmp_path, config.database)
            before_it = look()
            wait_until(lambda: look() != before_it or process.poll() is not None)  # noqa: B023
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=rng.choice((0, 0.01, 0.1)))
            killed += process.poll() is None
            process.kill()
        places = ask(config.database, PLACES)
        assert [id_ for id_, here, archived in places if (here is None) == (archived is None)] == []
        moved.append(sum(here is None for _, here, _ in places))
    assert (killed, len(set(moved)) > 1) == (KILLS, True)
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places, archives = ask(config.database, PLACES), Archives()
    assert sum(here is not None for _, here, _ in places) == SAMPLEABLE
    assert [(id_, *archives.read(id_, url).payload) for id_, _, url in places if url] == before[:-SAMPLEABLE]
    assert {finding["result"] for finding in check(config.database)} == {"ok"}
