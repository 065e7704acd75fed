"""From a put to rows of the database."""

import sqlite3

import pytest

from tba.buffer.rows import RunColumns, database_columns, put_columns
from tba.buffer.store import Store
from tba.buffer.tables.trajectories import TRAJECTORY_COLUMNS
from tba.common import wire
from tba.common.trajectory import pack


def test_columns_of_different_lengths_are_not_inserted(tmp_path):
    """The values of one row would become another's."""
    store = Store(tmp_path / "buffer.sqlite", durability="process")
    with pytest.raises(ValueError, match="columns of prompts are not equally long"), store.transaction():
        store.database.insert("OR ROLLBACK", "prompts", ("run", "key"), ([1, 1], ["a", "b", "c"]))
    assert store.database.all("SELECT * FROM prompts") == []
    store.close()


def test_python_asks_no_value_of_a_trajectory_how_it_wants_to_be_stored(trajectory):
    """It would, in vain, with every value that is neither a number nor text nor registered."""
    columns, frames = pack([trajectory()])
    message = wire.PutTrajectories(first_sequence=0, rows=wire.Rows.model_validate(columns))
    put = put_columns(message, [memoryview(frame) for frame in frames])
    columns = database_columns(put, RunColumns(1, 1, 0.0, [1], [0]))
    assert ("id", *columns) == TRAJECTORY_COLUMNS
    types = {type(value) for column in (*columns.values(), *put.payload) for value in column}
    assert types == {int, float, str, type(None), memoryview}
    assert types - {int, float, str} <= {kind for kind, _ in sqlite3.adapters}
