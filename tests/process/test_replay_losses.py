"""Replays of a recorded run have the recorded losses, with every objective: refactoring changes no number.

tests/helpers/make_replay.py writes the two files of tests/data.
"""

import json
from pathlib import Path

import pytest

from tba.tests.helpers.make_replay import CASES, STEPS, made_with, read_rows, replay

DATA = Path(__file__).parents[1] / "data"
RECORD = json.loads((DATA / "losses.json").read_text())


def test_recorded_losses_differ_between_all_cases_at_each_step():
    steps = list(zip(*(RECORD["losses"][case]["loss"] for case in CASES), strict=True))
    assert [len(set(losses)) for losses in steps] == [len(CASES)] * STEPS


def test_replays_have_the_recorded_losses_bit_for_bit(tmp_path):
    if made_with() != RECORD["made_with"]:
        pytest.skip(f"the losses were recorded with {RECORD['made_with']}, not {made_with()}")
    database = read_rows(DATA / "recorded_batches.jsonl", tmp_path)
    assert replay(database, CASES, tmp_path) == RECORD["losses"]
