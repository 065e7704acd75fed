"""Reference log-probabilities of a real searcher, in the real buffer, for the real trainer."""

import json
import sqlite3

import pytest


def test_the_trainer_computes_nothing_that_the_searcher_has_and_would_have_got_the_same(
    make_config, start_tba, tba, example_model
):
    keys = {
        "model": {"path": str(example_model), "dtype": "float32"},
        "task": {"name": "arithmetic", "limit": 20},
        "train": {"gpu": "cpu", "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 4, "warmup_steps": 0},
    }
    search = {"engine": "transformers", "gpus": "cpu", "samples_per_prompt": 4, "max_in_flight": 16, "max_tokens": 6}
    run = make_config(**keys, search=search | {"reference_logprobs": True})
    start_tba("buffer", "serve", "--config", run.file)
    searcher = start_tba("search", "--config", run.file)
    trained = tba("train", "--config", run.file, timeout=120)
    assert trained.returncode == 0, trained.stderr
    assert searcher.wait(60) == 0
    (line,) = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reference_computed"] == 0
    # The weights of the first snapshot are the reference, and sampling is plain: the engine's own
    # log-probabilities add up to the same, and so would the trainer's (tests/unit/test_references.py).
    stored = _stored(run.database)
    assert len(stored) > 8
    assert [reference for reference, _ in stored] == pytest.approx([sampled for _, sampled in stored], abs=1e-4)


def _stored(database):
    """(reference, sum of the sampling log-probabilities) of every trajectory of the first weights."""
    import numpy as np

    sql = """SELECT r.logprob, p.logprobs FROM trajectory_rows t JOIN payloads p ON p.trajectory = t.id
             LEFT JOIN reference_logprobs r ON r.trajectory = t.id AND r.reference = 'initial'
             WHERE t.policy_version = 0"""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute(sql).fetchall()
    assert all(reference is not None for reference, _ in rows)
    return [(reference, float(np.frombuffer(logprobs, "<f4").sum(dtype=np.float64))) for reference, logprobs in rows]
