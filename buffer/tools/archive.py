"""Move the tokens of old trajectories to Parquet files: `tba buffer archive`, with and without a running server.

    ask what may go ──► write a file ──► read it back, compare with the database ──► drop, and record the file

Invariant: the database drops nothing before a complete file was read back and equals it, and it records the file in the
same transaction. A file is never changed or deleted: one that a killed command left is compared and recorded by the
next.
"""

import contextlib
import itertools
import json
import secrets
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.store.archives import LOG_RATIOS, NAME_KEY, ArchivedRow, ArchiveFile, archive_errors
from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import choose_run
from tba.buffer.store.store import Store
from tba.buffer.tools.backup import replacing
from tba.buffer.tools.export import OnProgress, archive_record, archive_schema
from tba.buffer.tools.import_target import ImportTarget, ServerTarget, open_target
from tba.buffer.tools.prune import first_kept
from tba.common import data_files
from tba.common.config import Config
from tba.common.errors import StorageError
from tba.common.system import durable
from tba.common.wire.archive_messages import MAX_ARCHIVED, Archive, Movable
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE

# Bytes of tokens of a file, and of a part of it that is read at once.
_FILE_BYTES = 256 << 20
_GROUP_BYTES = 8 << 20
_SIZES = "SELECT t.id, t.payload_bytes FROM json_each(?) asked CROSS JOIN trajectory_rows t ON t.id = asked.value"
_STEPS_DONE = "SELECT COALESCE(MAX(step) + 1, 0) FROM batches WHERE run = ? AND trained_at IS NOT NULL"
# Trajectories that are read together, and the bytes of their tokens.
_Group = tuple[list[int], int]


def archive(
    config: Config, destination: str, *, keep_steps: int, dry_run: bool, on_progress: OnProgress
) -> dict[str, Any]:
    """Move the tokens that `prune_tokens` would drop to files below a directory or URL, and say what was moved.

    Raises UsageError if the database or the run does not exist or the URL means nothing here, MissingExtra without
    the packages, LockTaken if another such command runs, StorageError if a file cannot be written or read back,
    BufferFault if a server does not reply. Then a part may have been moved.
    """
    path, taken = config.database, f"another `tba buffer archive` moves tokens of {config.database}"
    system, root = data_files.file_system(destination)
    with open_reader(path) as reader, durable.exclusive_lock(path.with_name(f"{path.name}.archive.lock"), taken):
        runs = {name: (id_, uuid) for id_, name, uuid in reader.execute("SELECT id, name, uuid FROM runs")}
        run, uuid = runs[choose_run(path, runs, config.run.name, "--run")]
        since_step = first_kept(path, reader.execute(_STEPS_DONE, (run,)).fetchone()[0], keep_steps)
        before = path.stat().st_size
        with open_target(config) as target:
            mover = _Mover(target, reader, system, f"{root.rstrip('/')}/{config.run.name}-{uuid[:8]}", since_step)
            done = mover.count() if dry_run else mover.move(on_progress)
    if not dry_run and not isinstance(target, ServerTarget):
        _shrink(path)
    return {"run": config.run.name, **done, "file_bytes_before": before, "file_bytes_after": path.stat().st_size}


class _Mover:
    """Moves tokens of one run to files in its directory `root`."""

    def __init__(
        self, target: ImportTarget, reader: sqlite3.Connection, system: Any, root: str, since_step: int
    ) -> None:
        self._target = target
        self._reader = reader
        self._system = system
        self._is_local = "file" in system.protocol
        self._root = root
        self._since_step = since_step

    def count(self) -> dict[str, Any]:
        """Return what would be moved."""
        groups = list(self._groups())
        return {"would_move": sum(len(ids) for ids, _ in groups), "token_bytes": sum(size for _, size in groups)}

    def move(self, on_progress: OnProgress) -> dict[str, Any]:
        """Move all that may go. Returns what was moved."""
        with archive_errors(self._root):
            self._system.makedirs(self._root, exist_ok=True)
            # Of a killed command: this one holds the lock.
            for leftover in Path(self._root).glob(".*.tmp") if self._is_local else ():
                leftover.unlink()
            self._system.invalidate_cache()
            there = {self._url(path) for path in self._system.glob(f"{self._root}/*.parquet")}
        known = {url for (url,) in self._reader.execute("SELECT url FROM archives WHERE complete")}
        groups, moved, urls = self._groups(), 0, []
        for url in itertools.chain(sorted(there - known), iter(lambda: self._write(groups), "")):
            moved += self._adopt(url)
            urls.append(url)
            on_progress("archiving", moved, None)
        return {"moved": moved, "files": urls}

    def _url(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def _ask(self, message: Archive) -> Movable:
        reply = self._target.ask(message)
        assert isinstance(reply, Movable)
        return reply

    def _groups(self) -> Iterator[_Group]:
        """Yield trajectories that may go."""
        reply, group, total = Movable([], 0), list[int](), 0
        while reply.after is not None:
            reply = self._ask(Archive(since_step=self._since_step, after=reply.after))
            for id_, size in self._reader.execute(_SIZES, (json.dumps(reply.trajectories),)).fetchall():
                if group and (total + size > _GROUP_BYTES or len(group) == MAX_ARCHIVED):
                    yield group, total
                    group, total = [], 0
                group.append(id_)
                total += size
        if group:
            yield group, total

    def _write(self, groups: Iterator[_Group]) -> str:
        """Write the next file. Returns its URL, empty if no group is left."""
        pa, parquet = data_files.pyarrow()
        if (first := next(groups, None)) is None:
            return ""
        # Never the name of another file: a copy of this database may refer to that one.
        name = f"{first[0][0]:012d}-{secrets.token_hex(4)}.parquet"
        schema, total = archive_schema(pa).with_metadata({NAME_KEY: name}), 0
        with (
            archive_errors(url := self._url(f"{self._root}/{name}")),
            self._writing(name) as file,
            parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for ids, size in itertools.chain([first], groups):
                writer.write_table(pa.Table.from_pylist([*self._stored(ids).values()], schema=schema))
                total += size
                if total >= _FILE_BYTES:
                    break
        return url

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[Any]:
        """Yield a file to write. It gets its name when it is complete, on this machine when it is on the disk."""
        path = f"{self._root}/{name}"
        if self._is_local:
            with replacing(Path(path)) as temporary, temporary.open("xb") as file:
                yield file
        else:
            with self._system.transaction, self._system.open(path, "wb") as file:
                yield file

    def _stored(self, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the rows of a file for those of the trajectories whose tokens the database has."""
        found = {id_: archive_record(self._reader, id_) for id_ in ids}
        return {id_: record for id_, record in found.items() if record is not None}

    def _adopt(self, url: str) -> int:
        """Read a file back, and have the database drop what it has of it. Returns the number of trajectories.

        Raises StorageError if the file and the database differ.
        """
        file, dropped = ArchiveFile(url), 0
        for number in range(len(file.groups)):
            archived = file.read(number)
            stored = self._stored(archived)
            if wrong := [id_ for id_, record in stored.items() if archived[id_] != _as_read(record)]:
                raise StorageError(f"the archive {url} has other tokens of trajectory {wrong[0]} than the database")
            is_last = number + 1 == len(file.groups)
            message = Archive(since_step=self._since_step, url=url, trajectories=list(stored), complete=is_last)
            dropped += len(self._ask(message).trajectories)
        return dropped


def _as_read(record: dict[str, Any]) -> ArchivedRow:
    """Return what a reader must find of a row of a file."""
    blobs = (np.array(record[kind.name], kind.dtype).tobytes() for kind in ARRAY_KINDS)
    ratios = {(one["step"], one["slot"]): one["values"].astype(LOG_RATIO_DTYPE).tobytes() for one in record[LOG_RATIOS]}
    return ArchivedRow(tuple(blobs), ratios)


def _shrink(path: Path) -> None:
    """Give the free pages of a file back, if the disk has room for what stays: else they are used again."""
    with contextlib.closing(Store(path, durability="power")) as store:
        database = store.database
        pages, free, size = (
            database.one(f"PRAGMA {name}")[0] for name in ("page_count", "freelist_count", "page_size")
        )
        if free and shutil.disk_usage(path.absolute().parent).free > (pages - free) * size:
            database.shrink()
