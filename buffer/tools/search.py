"""Full-text search over prompts and responses, with SQLite's FTS5 as sqlite-utils sets it up.

The index is a file of its own next to the database, `NAME.search`: the server never writes to it, and without a
search there is no cost. A search first adds what has arrived since the last one.
"""

import contextlib
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from tba.buffer.store.reader import open_reader
from tba.buffer.store.storage_errors import refuse_strange_files
from tba.common.errors import StorageError, UsageError

_BUSY_SECONDS = 60.0
_PAGE_BUSY_MS = 200
COLUMNS = ("id", "run", "prompt", "policy_version", "reward", "match")
_TABLES = ("prompts", "responses")
# A prompt that matches stands for each of its trajectories. If a response matches, too, the better of both counts:
# with MIN(), SQLite takes the other columns from the row of the minimum.
_SEARCH = """
WITH matches (id, rank, match) AS (
    SELECT rowid, rank, snippet(responses_fts, 0, '[', ']', '...', 16) FROM responses_fts
    WHERE responses_fts MATCH :words
    UNION ALL
    SELECT t.id, f.rank, f.match
    FROM (SELECT rowid AS prompt, rank, snippet(prompts_fts, 0, '[', ']', '...', 16) AS match FROM prompts_fts
          WHERE prompts_fts MATCH :words) f
    JOIN buffer.trajectory_rows t ON t.prompt = f.prompt
), found AS (SELECT id, MIN(rank) AS rank, match FROM matches GROUP BY id)
SELECT t.id, r.name AS run, p.key AS prompt, t.policy_version, t.reward, found.match
FROM found
JOIN buffer.trajectory_rows t ON t.id = found.id
JOIN buffer.prompts p ON p.id = t.prompt
JOIN buffer.runs r ON r.id = t.run
ORDER BY found.rank, found.id DESC LIMIT :limit
"""


def index_path(database: Path) -> Path:
    """Return the path of the index of a database."""
    return Path(f"{database.resolve()}.search")


def search(path: Path, words: str, *, limit: int, index: Path | None = None) -> list[dict[str, Any]]:
    """Return the trajectories whose prompt or response has all of the words, the best matches first.

    Raises UsageError if there is no database, StorageError if it is none of tba or the index cannot be written.
    """
    # Checks that the file is a buffer of this release.
    with open_reader(path):
        pass
    index = index or index_path(path)
    if index.exists() and not index.is_file():
        raise StorageError(f"the index {index} is no regular file: name another one with --index")
    refuse_strange_files(index)
    try:
        with contextlib.closing(sqlite3.connect(index, timeout=_BUSY_SECONDS, uri=True)) as connection:
            connection.execute("ATTACH ? AS buffer", (f"{path.absolute().as_uri()}?mode=ro",))
            db = Database(connection)
            _update(db, path)
            expression = quoted(words)
            if not expression:
                raise UsageError("name at least one word to search for")
            return list(db.query(_SEARCH, {"words": expression, "limit": limit}))
    except sqlite3.DatabaseError as error:
        raise StorageError(f"the index {index} cannot be used ({error}): name another one with --index") from error


def attach_index(connection: sqlite3.Connection, database: Path) -> bool:
    """Attach the index of a database to a connection that reads it, as `search`; False if it has none to read now.

    What arrived after the last `tba buffer search` is missing: to add it would write.
    """
    index = index_path(database)
    if not index.is_file():
        return False
    patience = connection.execute("PRAGMA busy_timeout").fetchone()[0]
    # A search that adds many texts locks the index for seconds.
    connection.execute(f"PRAGMA busy_timeout = {_PAGE_BUSY_MS}")
    try:
        connection.execute("ATTACH ? AS search", (f"{index.as_uri()}?mode=ro",))
        identity: int = connection.execute("PRAGMA search.user_version").fetchone()[0]
    except sqlite3.DatabaseError:
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {patience}")
    return identity == _identity(connection, "main", database)


def quoted(words: str) -> str:
    """Return the FTS5 expression for texts that have all of the words; "" for no words."""
    # FTS5 reads an expression up to the first NUL.
    with Database(memory=True) as database:
        text: str = database.quote_fts(words.replace("\0", " "))
    return text if text.strip('" ') else ""


def _identity(connection: sqlite3.Connection, schema: str, database: Path) -> int:
    """Return the number of a database that its index stores."""
    sql = f"SELECT group_concat(uuid) FROM (SELECT uuid FROM {schema}.runs ORDER BY id)"  # noqa: S608
    runs = connection.execute(sql).fetchone()[0]
    return zlib.crc32(f"{database.stat().st_ino} {runs}".encode()) & 0x7FFFFFFF


def _update(db: Database, path: Path) -> None:
    """Add what the database has and the index lacks. A restored database gets a new index, and one with other runs.

    The number of a deleted file may be used again, and ids of trajectories after a run is pruned.
    """
    identity = _identity(db.conn, "buffer", path)
    if db.execute("PRAGMA main.user_version").fetchone()[0] != identity:
        for table in _TABLES:
            if table in db.table_names():
                db.table(table).disable_fts()
                db.table(table).drop()
            created = db.create_table(table, {"id": int, "text": str}, pk="id")
            created.enable_fts(["text"], create_triggers=True)
        db.execute(f"PRAGMA main.user_version = {identity}")
    with db.conn:
        # Ids of trajectories ascend in the order of their commits; a known prompt may get its text later.
        db.execute(
            "INSERT INTO responses SELECT id, text FROM buffer.trajectory_rows WHERE text IS NOT NULL"
            " AND id > (SELECT COALESCE(MAX(id), 0) FROM main.responses)"
        )
        db.execute(
            "INSERT INTO main.prompts SELECT id, text FROM buffer.prompts WHERE text IS NOT NULL"
            " AND id NOT IN (SELECT id FROM main.prompts)"
        )
