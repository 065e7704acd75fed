"""`tba run` on random configurations: each finishes, is refused before it starts anything, or says why it waits."""

import random
import sqlite3
from contextlib import closing

import pytest

from tba.common.errors import EXIT_CONFIG
from tba.common.run_status import ask_status
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import Stall
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.random_configurations import STEPS, draw_sections
from tba.tests.process.conftest import arithmetic, merged
from tba.tests.runner import FULL_SIZE

# What says that a start is slow, and nothing of the configuration.
_STARTING = {"no_trainer", "no_searcher", "buffer_silent"}


@pytest.mark.parametrize("seed", range(200) if FULL_SIZE else [0, 3])
def test_a_random_configuration_finishes_or_is_refused_or_says_why_it_waits(seed, make_config, start_tba, tmp_path):
    small = {"task": {"limit": 40, "held_out_limit": 4}, "train": {"steps": STEPS, "warmup_steps": 0}}
    sections = merged(small, draw_sections(random.Random(seed)))
    run = make_config(**arithmetic(**sections))
    process = start_tba("run", run.file)
    stalls: list[Stall] = []

    def ended_or_stalled() -> bool:
        with closing(BufferClient(run.address, role="monitor", name="test")) as client:
            status = ask_status(client)
        stall = status.stall if status is not None else None
        stalls.extend([stall] if stall is not None and stall.reason not in _STARTING else [])
        return process.poll() is not None or bool(stalls)

    wait_until(ended_or_stalled, what=f"the end of {sections}, or its stall")
    said = (tmp_path / "tba0.log").read_text()
    if stalls:
        assert stalls[0].reason == "no_growth", (stalls, sections)
        assert "left sampling by buffer." in stalls[0].sentence
    elif process.returncode == EXIT_CONFIG:
        assert not run.directory.exists(), said
    else:
        assert process.returncode == 0, said
        with closing(sqlite3.connect(run.database)) as database:
            assert database.execute("SELECT COUNT(trained_at) FROM batches").fetchone() == (STEPS,)
