"""Move the tokens of old trajectories to Parquet files: `tba buffer archive`, with and without a running server.

    ask what may go ──► write a file ──► read it back, compare with the database ──► drop, and record the file

Invariant: the database drops nothing before a complete file was read back and equals it, and it records the file in the
same transaction. A file is never changed or deleted: one that a killed command left is compared and recorded by the
next.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.store.archives import LOG_RATIOS, NAME_KEY, ArchivedRow, ArchiveFile, archive_errors, check_place
from tba.buffer.store.reader import open_reader
from tba.buffer.store.starts import choose_run
from tba.buffer.store.store import Store
from tba.buffer.store.tables.batches import STEPS_DONE
from tba.buffer.tools.backup import replacing
from tba.buffer.tools.export import OnProgress, archive_record, archive_schema
from tba.buffer.tools.import_file import ImportTarget, open_target
from tba.buffer.tools.prune import first_kept
from tba.common import data_files
from tba.common.config import Config
from tba.common.errors import LockTaken, StorageError, UsageError
from tba.common.system import durable
from tba.common.wire.messages import MAX_ARCHIVED, Archive, Movable
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE

# Bytes of tokens that are read together, and how many such groups are in a file.
_GROUP_BYTES, _FILE_GROUPS = 8 << 20, 32
# Rows of `archive_schema`.
_Records = list[dict[str, Any]]


def archive(config: Config, destination: str, *, keep_steps: int, on_progress: OnProgress) -> dict[str, Any]:
    """Move the tokens that `prune_tokens` would drop to files below a directory or URL, and say what was moved.

    Raises UsageError if the database or the run does not exist or the URL means nothing here, MissingExtra without
    the packages, LockTaken if another such command runs, StorageError if a file cannot be written or read back,
    BufferFault if a server does not reply. Then a part may have been moved.
    """
    path, taken = config.database, f"another `tba buffer archive` moves tokens of {config.database}"
    system, root = _place(destination)
    with open_reader(path) as reader, durable.exclusive_lock(path.with_name(f"{path.name}.archive.lock"), taken):
        runs = {name: (id_, uuid) for id_, name, uuid in reader.execute("SELECT id, name, uuid FROM runs")}
        run, uuid = runs[choose_run(path, runs, config.run.name, "--run")]
        since_step = first_kept(path, reader.execute(STEPS_DONE, (run,)).fetchone()[0], keep_steps)
        before = path.stat().st_size
        with open_target(config) as target:
            root = f"{root.rstrip('/')}/{config.run.name}-{uuid[:8]}"
            moved = _Mover(target, reader, system, root, since_step).move(on_progress)
    if not target.is_server:
        # Worth a try, after all was moved: a server may have started, and the disk may have no room.
        with contextlib.suppress(LockTaken, StorageError):
            _shrink(path)
    return {"run": config.run.name, **moved, "file_bytes_before": before, "file_bytes_after": path.stat().st_size}


def _place(destination: str) -> tuple[Any, str]:
    """Return the file system of a destination and the path in it. Raises UsageError if it could not be read later."""
    system, root = data_files.file_system(destination)
    if _is_local(system):
        return system, os.path.realpath(root)
    if system.protocol == "memory":
        raise UsageError(f"{destination} ends with this command: name a directory or an object store")
    try:
        check_place(f"{system.unstrip_protocol(root)}/{0:012d}-{0:08x}.parquet")
    except StorageError as error:
        raise UsageError(f"{destination}: {error}") from error
    return system, root


def _is_local(system: Any) -> bool:
    from fsspec.implementations.local import LocalFileSystem

    return type(system) is LocalFileSystem


class _Mover:
    """Moves tokens of one run to files in its directory `root`."""

    def __init__(
        self, target: ImportTarget, reader: sqlite3.Connection, system: Any, root: str, since_step: int
    ) -> None:
        self._target = target
        self._reader = reader
        self._system = system
        self._is_local = _is_local(system)
        self._root = root
        self._since_step = since_step

    def move(self, on_progress: OnProgress) -> dict[str, Any]:
        """Move all that may go. Returns what was moved."""
        with archive_errors(self._root):
            self._system.makedirs(self._root, exist_ok=True)
            # Of a killed command: this one holds the lock.
            for leftover in Path(self._root).glob(".*.tmp") if self._is_local else ():
                leftover.unlink()
            self._system.invalidate_cache()
            listed = self._system.ls(self._root, detail=False)
            there = {self._url(path) for path in listed if path.endswith(".parquet")}
        known = {url for (url,) in self._reader.execute("SELECT url FROM archives WHERE complete")}
        groups, moved, files = self._groups(), 0, []
        for url in itertools.chain(sorted(there - known), iter(lambda: self._write(groups), "")):
            moved += self._adopt(url, is_new=url not in there)
            files.append(url)
            on_progress("archiving", moved, None)
        return {"moved": moved, "files": files}

    def _url(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def _ask(self, message: Archive) -> Movable:
        reply = self._target.ask(message)
        assert isinstance(reply, Movable)
        return reply

    def _groups(self) -> Iterator[_Records]:
        """Yield what may go, as rows that are read together."""
        reply, group, size = Movable([], 0), _Records(), 0
        while reply.after is not None:
            reply = self._ask(Archive(since_step=self._since_step, after=reply.after))
            for record in filter(None, (archive_record(self._reader, id_) for id_ in reply.trajectories)):
                group.append(record)
                size += 4 * len(record["prompt_ids"]) + 8 * len(record["response_ids"])
                if size >= _GROUP_BYTES or len(group) == MAX_ARCHIVED:
                    yield group
                    group, size = [], 0
        if group:
            yield group

    def _write(self, groups: Iterator[_Records]) -> str:
        """Write the next file. Returns its URL, empty if no group is left."""
        pa, parquet = data_files.pyarrow()
        if (first := next(groups, None)) is None:
            return ""
        # Never the name of another file: a copy of this database may refer to that one.
        name = f"{first[0]['id']:012d}-{secrets.token_hex(4)}.parquet"
        schema = archive_schema(pa).with_metadata({NAME_KEY: name})
        with (
            archive_errors(url := self._url(f"{self._root}/{name}")),
            self._writing(name) as file,
            parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for records in itertools.chain([first], itertools.islice(groups, _FILE_GROUPS - 1)):
                writer.write_table(pa.Table.from_pylist(records, schema=schema))
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

    def _adopt(self, url: str, *, is_new: bool) -> int:
        """Read a file back, and have the database drop what both have. Returns the number of trajectories.

        Raises StorageError if a new file differs; an old one may be of another copy of the database.
        """
        file, dropped = ArchiveFile(url), 0
        for number in range(len(file.groups)):
            archived = file.read(number)
            stored = {id_: record for id_ in archived if (record := archive_record(self._reader, id_))}
            same = [id_ for id_, record in stored.items() if archived[id_] == _as_read(record)]
            if is_new and len(same) < len(stored):
                raise StorageError(f"the archive {url} has other tokens than the database: nothing of it was dropped")
            is_last = number + 1 == len(file.groups)
            message = Archive(since_step=self._since_step, url=url, trajectories=same, complete=is_last)
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
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (database.one(f"PRAGMA {name}")[0] for name in names)
        if free and shutil.disk_usage(path.absolute().parent).free > (pages - free) * size:
            database.shrink()
