"""Values that no server has stored: every reader answers with a sentence that shows them."""

import pytest

from tba.buffer.store.starts import recorded_settings
from tba.common.errors import StorageError
from tba.tests.helpers.buffer import change

NESTED = "[" * 20_000
VALUES = {
    "cut": ("trajectory_rows", "reward_parts", "[1,2", "show", "is not JSON"),
    "list": ("trajectory_rows", "metadata", "[1]", "export", "is not a JSON object: '[1]'"),
    "nested": ("trajectory_rows", "reward_parts", NESTED, "export", "is not JSON"),
    "metrics": ("batches", "metrics", '{"loss":NaN', "report", "is not JSON"),
    "origins": ("starts", "origins", "5", "report", "is not a JSON object: '5'"),
    "section": ("starts", "config", '{"train": []}', "report", "has no section train, but a value"),
    "turns": ("trajectory_rows", "turns", "[1]", "export", "is not a JSON list of objects: '[1]'"),
    "tokens": ("payloads", "response_ids", b"\x01", "show", "the tokens of a trajectory in the database are malformed"),
}


@pytest.mark.parametrize(("table", "column", "value", "command", "words"), VALUES.values(), ids=VALUES)
def test_a_reader_of_a_malformed_value_shows_it_in_a_sentence(filled, tba_here, table, column, value, command, words):
    change(filled, (f"UPDATE {table} SET {column} = ?", [value]))
    arguments = {"show": ("buffer", "show", 5, "-b", filled), "report": ("report", filled)}
    done = tba_here(*arguments.get(command, ("buffer", "export", "rows.jsonl", "-b", filled)))
    assert (done.exit_code, words in done.message) == (1, True), done.message


def test_settings_of_a_malformed_configuration_are_not_taken(filled):
    change(filled, """UPDATE starts SET config = '{"task": 7}'""")
    with pytest.raises(StorageError, match="has no section task, but a value"):
        recorded_settings(filled, "test")


def test_a_batch_with_malformed_reward_parts_is_refused(harness, filled):
    buffer = harness(filled)
    buffer.store.database.execute("UPDATE trajectory_rows SET reward_parts = '{\"correct\": []}'")
    with pytest.raises(StorageError, match="reward parts that the database holds are malformed"):
        buffer.sample(0, prompts=2, samples=3)
