"""The log is not begun anew while it is copied: SQLite up to 3.51.2 would take what is not copied for copied."""

import pytest

from tba.buffer.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "buffer.sqlite", durability="power")
    yield store
    store.close()


class Meddling:
    """A connection with which something happens before or after each checkpoint."""

    def __init__(self, connection, *, before=lambda: None, after=lambda: None) -> None:
        self._connection, self._before, self._after = connection, before, after

    def execute(self, statement: str):
        self._before()
        row = self._connection.execute(statement).fetchone()
        self._after()
        return self._connection.execute("SELECT ?, ?, ?", row)

    def close(self) -> None:
        self._connection.close()


def commit(store) -> None:
    store.open_run("test", seed=0, config={}, software={})


def beginning(store) -> bytes:
    """It is another one when the log was begun anew."""
    return store.path.with_name(store.path.name + "-wal").read_bytes()[:32]


def test_a_commit_does_not_begin_the_log_anew_while_it_is_copied(store):
    commit(store)
    before = beginning(store)
    store.log._connection = Meddling(store.log._connection, after=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert copied == frames > 0
    assert beginning(store) == before
    store.log._connection = store.log._connection._connection
    frames, copied = store.log._checkpoint()
    assert copied == frames
    commit(store)
    assert beginning(store) != before


def test_nothing_is_copied_of_a_log_that_was_begun_anew_since_the_look_at_it(store):
    commit(store)
    store.log._checkpoint()
    before = beginning(store)
    store.log._connection = Meddling(store.log._connection, before=lambda: commit(store))
    frames, copied = store.log._checkpoint()
    assert beginning(store) != before
    assert (copied, frames > 0) == (0, True)
