"""The predictors of `benchmarks.accuracy_from_log_z`, computed by hand from the rows of one prompt."""

import importlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.tests.helpers.buffer import new_database

BETA, SAMPLES = 0.5, 8


@pytest.fixture
def predictors(monkeypatch):
    """Import the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    return importlib.import_module("benchmarks.accuracy_from_log_z")


def fill(path: Path, objective: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Write five visits of a prompt, and batches that trained on the first four before the fifth was leased.

    Returns rewards [5, 8], and of the batches the values of the head and log π − log π_ref, both [4, 8].
    """
    rewards, heads, log_ratios = rng.random((5, SAMPLES)), rng.random((4, SAMPLES)), rng.normal(size=(4, SAMPLES))
    rows: list[tuple[str, dict[str, Any]]] = [("starts", {"config": json.dumps({"objective": {"name": objective}})})]
    for visit in range(5):
        rows.append(("visits", {"id": visit, "prompt": 1, "leased_at": 10.0 * visit, "place": visit}))
        if visit < 4:
            metrics = json.dumps({"beta": BETA})
            rows.append(("batches", {"id": visit, "step": visit, "trained_at": 10.0 * visit + 5, "metrics": metrics}))
        for slot, reward in enumerate(rewards[visit].tolist()):
            number = SAMPLES * visit + slot
            row = {"id": number, "prompt": 1, "visit": visit, "reward": reward, "received_at": 10.0 * visit + 1}
            rows.append(("trajectory_rows", row | {"sequence": number}))
            if visit < 4:
                used = {"batch": visit, "slot": slot, "trajectory": number, "skipped": 0, "logprob": -3.0}
                rows.append(("consumption_rows", used | {"advantage": reward - float(heads[visit, slot])}))
                reference = -3.0 - float(log_ratios[visit, slot])
                rows.append(("reference_logprobs", {"trajectory": number, "logprob": reference}))
    with closing(sqlite3.connect(new_database(path))) as database, database:
        for table, row in rows:
            columns = database.execute(f"SELECT name, type FROM pragma_table_info('{table}') WHERE \"notnull\"")
            whole = {name: "" if kind == "TEXT" else 0 for name, kind in columns} | row
            names, marks = ", ".join(whole), ", ".join("?" * len(whole))
            database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", [*whole.values()])
    return rewards, heads, log_ratios


@pytest.mark.parametrize("objective", ["tb_stale", "tb_learned_z"])
def test_the_predictions_of_a_visit_use_what_was_stored_when_it_was_leased(predictors, tmp_path, objective):
    rewards, heads, log_ratios = fill(tmp_path / "buffer.sqlite", objective, np.random.default_rng(0))
    found_objective, visits = predictors.read(tmp_path / "buffer.sqlite")
    accuracies = (heads if objective == "tb_learned_z" else rewards[:4]).mean(axis=1)
    kl = BETA * log_ratios.mean(axis=1)
    log_z = accuracies - kl
    of_log_z = [accuracies[3], log_z[3], log_z.mean() + kl[3]]
    expected = [*of_log_z, rewards[3].mean(), rewards[:4].mean(), rewards[4].mean()]
    assert found_objective == objective
    np.testing.assert_allclose(visits, [expected], rtol=1e-12)


def test_errors_are_those_of_each_predictor_and_of_its_line_of_least_squares(predictors):
    rng = np.random.default_rng(1)
    visits = rng.random((200, 6))
    found = predictors.errors(visits)
    *columns, mean = visits.T
    for row, column in zip(found, columns, strict=False):
        slope, intercept = np.polyfit(column, mean, 1)
        expected = [abs(np.corrcoef(column, mean)[0, 1]), np.mean(column - mean), np.abs(column - mean).mean()]
        np.testing.assert_allclose(row, [*expected, np.abs(slope * column + intercept - mean).mean()], rtol=1e-9)
    assert found.shape == (6, 4)
    # Two predictors fit at least as well as one of them.
    assert found[-1, 0] >= max(found[0, 0], found[4, 0]) - 1e-12
