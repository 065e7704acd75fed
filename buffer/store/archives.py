"""Read the files of `tba buffer archive`: zstd Parquet, at any place that fsspec knows.

With a row of a file come back, bit for bit, the tokens of a trajectory and the log-ratios that steps reported of them.
Every page has a checksum. A file knows its name, so that another one in its place is noticed.

A database comes from anywhere, and so do the URLs in it. Some kinds run code (`reference://`), others connect to a host
of their author. Only files of this machine are opened, and those below a place that the environment names.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba.common import data_files
from tba.common.errors import StorageError, TbaError, first_line
from tba.common.system.durable import open_regular
from tba.common.wire.messages import FILE_URL, MAX_ARCHIVED
from tba.common.wire.trajectory import ARRAY_KINDS, LOG_RATIO_DTYPE

# The key in the metadata of a file under which it has its name.
NAME_KEY = b"tba.archive"
LOG_RATIOS = "log_ratios"
# The environment variable with the URLs of directories elsewhere that may be read, separated by spaces.
PLACES = "TBA_ARCHIVES"
LOCAL = "file:///"
# Numbers of one column that are read at once: far more than the tokens that one file has together.
_MOST_NUMBERS = 1 << 26
_CACHED_FILES, _CACHED_GROUPS = 64, 16


class ArchivedRow(NamedTuple):
    """The blobs of a trajectory in the order of ARRAY_KINDS, and its log-ratios by (step, slot)."""

    payload: tuple[bytes, ...]
    log_ratios: dict[tuple[int, int], bytes]


class ArchiveFile:
    """One file. `groups` has the first and the last id of each part that is read at once.

    Raises StorageError, with the URL and the cause, if it cannot be read or is not the one that it was.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        check_place(url)
        with self._opened() as file:
            metadata = file.metadata
            name = (metadata.metadata or {}).get(NAME_KEY, b"").decode(errors="replace")
            if name != url.rpartition("/")[2]:
                raise StorageError(
                    f"the archive {url} is another file, {name or 'which tba did not write'}: put it back"
                )
            column = metadata.schema.names.index("id")
            groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
            for group in groups:
                most = max(group.column(n).num_values for n in range(group.num_columns))
                if group.num_rows > MAX_ARCHIVED or most > _MOST_NUMBERS:
                    raise StorageError(f"the archive {url} has more in one part than tba writes")
            parts = (group.column(column).statistics for group in groups)
            self.groups = [(part.min, part.max) for part in parts]

    def read(self, group: int) -> dict[int, ArchivedRow]:
        """Return the rows of a group by trajectory."""
        with self._opened() as file:
            table = file.read_row_group(group, columns=["id", *(kind.name for kind in ARRAY_KINDS), LOG_RATIOS])
            return {id_: _row(table, position) for position, id_ in enumerate(table["id"].to_pylist())}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        _, parquet = data_files.pyarrow()
        with archive_errors(self.url), self._file() as file:
            yield parquet.ParquetFile(file, page_checksum_verification=True)

    def _file(self) -> Any:
        if self.url.startswith(LOCAL):
            # A FIFO in its place stops nothing.
            return open_regular(Path(self.url[len(LOCAL) - 1 :]))
        system, path = data_files.file_system(self.url)
        return system.open(path, "rb")


def check_place(url: str) -> None:
    """Raise StorageError unless a URL is of a file of `tba buffer archive` at a place that may be read."""
    if not re.fullmatch(FILE_URL, url):
        raise StorageError(f"{url!r} is no file of `tba buffer archive`, so it is not opened")
    places = os.environ.get(PLACES, "").split()
    if not url.startswith((LOCAL, *(f"{place.rstrip('/')}/" for place in places))):
        place = url.rpartition("/")[0]
        raise StorageError(
            f"the archive {url} is not on this machine: {PLACES}={place} in the environment lets it be read"
        )


def _row(table: Any, position: int) -> ArchivedRow:
    payload = []
    for kind in ARRAY_KINDS:
        values = table[kind.name][position].values
        numbers = (values if kind.width == 1 else values.flatten()).to_numpy(zero_copy_only=False)
        payload.append(numbers.astype(kind.dtype, copy=False).tobytes())
    reported = table[LOG_RATIOS][position].as_py()
    ratios = {(one["step"], one["slot"]): np.array(one["values"], LOG_RATIO_DTYPE).tobytes() for one in reported}
    return ArchivedRow(tuple(payload), ratios)


class Archives:
    """Reads archived trajectories, and keeps what it read last."""

    def __init__(self) -> None:
        self._file = functools.lru_cache(_CACHED_FILES)(ArchiveFile)
        self._group = functools.lru_cache(_CACHED_GROUPS)(lambda url, group: self._file(url).read(group))

    def read(self, trajectory: int, url: str) -> ArchivedRow:
        """Return a row. Raises StorageError if its file cannot be read, MissingExtra if a package is not installed."""
        for group, (first, last) in enumerate(self._file(url).groups):
            if first <= trajectory <= last and (row := self._group(url, group).get(trajectory)):
                return row
        raise StorageError(f"the archive {url} has no trajectory {trajectory}")


@contextlib.contextmanager
def archive_errors(url: str) -> Iterator[None]:
    """Raise StorageError, with the URL and the cause, for whatever a file system or pyarrow raises."""
    try:
        yield
    except TbaError:
        raise
    except FileNotFoundError as error:
        raise StorageError(
            f"the archive {url} is not there: put it back, or say where it is now (docs/storage.md#archive)"
        ) from error
    # Each file system has errors of its own.
    except Exception as error:
        raise StorageError(f"the archive {url} cannot be read or written: {first_line(error)}") from error
