"""Reference log-probabilities from a real searcher, through a real buffer, to a real trainer."""

import json
import sqlite3
from contextlib import closing

import pytest

from tba.tests.process.conftest import arithmetic


def test_the_trainer_uses_the_references_of_the_searcher_and_they_are_right(make_config, start_tba, tba):
    train = {"steps": 1, "prompts_per_step": 2, "warmup_steps": 0}
    run = make_config(**arithmetic(task={"limit": 20}, train=train, search={"reference_logprobs": True}))
    start_tba("buffer", "serve", "--config", run.file)
    searcher = start_tba("search", "--config", run.file)
    trained = tba("train", "--config", run.file, timeout=300)
    assert trained.returncode == 0, trained.stderr
    assert searcher.wait(60) == 0
    (line,) = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reference_computed"] == 0
    # The weights of the first snapshot are the reference, and sampling is unmodified: the engine's own
    # log-probabilities add up to the same. The trainer's do too (tests/unit/searcher/test_references.py).
    stored = _stored(run.database)
    assert len(stored) > 8
    assert [reference for reference, _ in stored] == pytest.approx([sampled for _, sampled in stored], abs=1e-4)


def _stored(database):
    """(reference, sum of the sampling log-probabilities) of every trajectory of the first weights."""
    import numpy as np

    sql = """SELECT r.logprob, p.logprobs FROM trajectory_rows t JOIN payloads p ON p.trajectory = t.id
             LEFT JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = 'initial'
             WHERE t.policy_version = 0"""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection, connection:
        rows = connection.execute(sql).fetchall()
    assert all(reference is not None for reference, _ in rows)
    return [(reference, float(np.frombuffer(logprobs, "<f4").sum(dtype=np.float64))) for reference, logprobs in rows]
