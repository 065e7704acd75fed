"""The files of a database are deleted, moved or replaced while its server stores rows: nothing acknowledged is lost."""

import os
import re
import shutil
import subprocess

import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.faults import ROWS, producing, stored

TOKENS = 64


def delete(ending):
    return lambda database, _: database.with_name(database.name + ending).unlink()


def move(database, aside):
    database.rename(aside)


def replace(database, aside):
    shutil.copy(aside.with_name("older"), aside)
    os.replace(aside, database)


def replace_directory(database, aside):
    database.parent.rename(aside)
    database.parent.mkdir()
    shutil.copy(aside.with_name("older"), database)


def replace_directory_by_a_file(database, aside):
    database.parent.rename(aside)
    database.parent.write_text("not a directory")


# What is done, the file that is named, what happened to it, and where the rows are after the end.
HANDS = {
    "deleted": (delete(""), "buffer.sqlite", "deleted or moved", "buffer.sqlite"),
    "log deleted": (delete("-wal"), "buffer.sqlite-wal", "deleted or moved", "buffer.sqlite"),
    "replaced": (replace, "buffer.sqlite", "replaced by another file", "buffer.sqlite.replaced-*Z"),
    "moved": (move, "buffer.sqlite", "deleted or moved", "aside"),
    # The server may look before the other file is there.
    "directory replaced": (
        replace_directory,
        "buffer.sqlite",
        "(replaced by another file|deleted or moved)",
        "aside/buffer.sqlite",
    ),
    "a file for the directory": (
        replace_directory_by_a_file,
        "buffer.sqlite",
        "deleted or moved",
        "aside/buffer.sqlite",
    ),
}


def found_in(directory, aside, kept):
    """Where the database is after the end."""
    return [*directory.glob(kept), *aside.glob(kept)][0]


def put_back(database, found):
    """Repair what was done: each file gets its name again."""
    if database.parent.is_file():
        database.parent.unlink()
    database.parent.mkdir(exist_ok=True)
    for ending in ("", "-wal"):
        if os.path.exists(f"{found}{ending}"):
            os.replace(f"{found}{ending}", f"{database}{ending}")


def all_acknowledged_is_in(database, producers) -> bool:
    found = stored(database)
    expected = [{first + k for first in one.acknowledged for k in range(ROWS)} for one in producers]
    return all(rows <= set(found.sequences(one.number)) for rows, one in zip(expected, producers, strict=True))


@pytest.mark.parametrize(("hand", "name", "what", "kept"), HANDS.values(), ids=HANDS)
def test_a_server_whose_file_changes_hands_ends_at_once_and_keeps_all_until_it_is_repaired(
    start_tba, run_config, tmp_path, hand, name, what, kept
):
    server = start_tba("buffer", "serve", "--config", run_config.file)
    database = run_config.database
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_until(lambda: all(len(one.acknowledged) > 8 for one in producers), what="acknowledged")
        shutil.copy(database, tmp_path / "older")
        hand(database, tmp_path / "aside")
        assert server.wait(60) == 1
        before = [len(one.acknowledged) for one in producers]
        put_back(database, found_in(database.parent, tmp_path, kept))
        repaired = start_tba("buffer", "serve", "--config", run_config.file)
        wait_until(lambda: all(len(one.acknowledged) > n for one, n in zip(producers, before, strict=True)))
    repaired.terminate()
    assert repaired.wait(60) == 0
    output = (tmp_path / "tba0.log").read_text()
    told, _, _ = output.partition("kept what was acknowledged")
    assert re.search(rf"/{name} was {what} while it was open: nothing more is acknowledged", told)
    assert re.search(rf"error: {re.escape(str(database.with_name(name)))} was {what}", output)
    assert "Traceback" not in output
    assert all_acknowledged_is_in(database, producers)


def make_read_only(paths, *, undo=False) -> bool:
    """As a file system does after an error: open files refuse writes, too. False where the system cannot."""
    command = ["chattr", "-i" if undo else "+i", *map(str, paths)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_database_that_becomes_read_only_acknowledges_nothing_until_it_is_writable(start_tba, run_config, tmp_path):
    server = start_tba("buffer", "serve", "--config", run_config.file)
    database, log = run_config.database, tmp_path / "tba0.log"
    files = [database, database.with_name("buffer.sqlite-wal")]
    with producing(run_config.address, 2, tokens=TOKENS) as producers:
        wait_until(lambda: all(len(one.acknowledged) > 8 for one in producers), what="acknowledged")
        if not make_read_only(files):
            pytest.skip("this user or this file system cannot make a file immutable")
        try:
            # By the second failure, what was committed before the first has been acknowledged.
            wait_until(lambda: log.read_text().count("commit failed") > 1, what="refused")
            before = [len(one.acknowledged) for one in producers]
            wait_until(lambda: log.read_text().count("commit failed") > 3, what="refused again")
            assert [len(one.acknowledged) for one in producers] == before
        finally:
            make_read_only(files, undo=True)
        # The same process goes on.
        wait_until(lambda: all(len(one.acknowledged) > n for one, n in zip(producers, before, strict=True)))
    server.terminate()
    assert server.wait(60) == 0
    assert "Traceback" not in log.read_text()
    assert all_acknowledged_is_in(database, producers)
