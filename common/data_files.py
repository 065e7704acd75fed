"""Rows of a data file: JSON lines, a JSON array, CSV or parquet, all but parquet also compressed by gzip."""

import csv
import gzip
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from tba.common.errors import MissingExtra, TaskError, UsageError, first_line

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
# What other files begin with, and what they are.
_OTHERS = {
    **dict.fromkeys((b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"), "compressed by bzip2, xz or zstd: decompress it"),
    **dict.fromkeys((b"PK\x03\x04", b"\xd0\xcf\x11\xe0"), "a zip archive or a workbook: unpack it, or export CSV"),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "text in UTF-16: save it as UTF-8"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "an Arrow file: write it as parquet"),
    **dict.fromkeys((b"<!", b"<html"), "a page in HTML, such as that of a failed download: download the data itself"),
    b"version https://git-lfs": "a pointer of Git LFS: `git lfs pull` brings the file",
    b"SQLite format 3": "an SQLite database: export its rows",
    b"\x80": "a pickle: write it as JSON lines",
    _PARQUET: "parquet that is compressed as a whole: decompress it",
}
# Rows of parquet in memory at once.
_BATCH = 256
# Bytes in which a file begins.
_BEGIN = 64


def as_text(value: Any, column: str) -> str:
    """Return the text or finite number of a column as text. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float | Decimal) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"the column {column} has {value!r:.60}, which is neither a text nor a finite number")
    if not isinstance(value, float):
        return f"{value:f}" if isinstance(value, Decimal) else str(value)
    # As people write it: a column of integers with an empty cell has 18.0 for 18, and repr has 1e-07.
    text = f"{Decimal(repr(value)):f}".removesuffix(".0")
    return "0" if text == "-0" else text


def is_data_file(name: str) -> bool:
    """Return whether a name is that of a local file, to be read by `read`. Other names may be hub ids."""
    return name.removesuffix(".gz").endswith(_SUFFIXES) or os.path.exists(name)


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row); `place` is `file:line`, or `file row n` of parquet, for messages. Cells of CSV are texts.

    Raises TaskError, with the place, for a file that cannot be read or is malformed; MissingExtra without pyarrow.
    """
    try:
        with path.open("rb") as file:
            magic = file.peek(len(_PARQUET))
            if magic.startswith(_PARQUET):
                rows = enumerate(read_parquet(path, TaskError, short=True), 1)
                yield from ((f"{path} row {number}", without_nested_nulls(row)) for number, row in rows)
                return
            plain: Any = gzip.GzipFile(fileobj=file) if magic.startswith(_GZIP) else file
            separator = _SEPARATORS.get(Path(path.name.removesuffix(".gz")).suffix.lower())
            begin = plain.peek(_BEGIN).lstrip(b"\xef\xbb\xbf \t\r\n")
            if other := next((what for bytes_, what in _OTHERS.items() if begin.startswith(bytes_)), ""):
                raise TaskError(f"{path} is {other}")
            if separator and begin.startswith((b"{", b"[")):
                raise TaskError(f"{path} is named as CSV, and has JSON: name it .jsonl")
            if begin.startswith(b"["):
                yield from ((f"{path} row {number}", row) for number, row in enumerate(_json_array(plain, path), 1))
                return
            lines = _csv(plain, path, separator) if separator else _json_objects(plain, path)
            yield from ((f"{path}:{number}", row) for number, row in lines)
    except IsADirectoryError:
        inside = sorted(one.name for one in path.rglob("*") if one.name.removesuffix(".gz").endswith(_SUFFIXES))
        raise TaskError(f"{path} is a directory: name one data file in it; it has {inside[:3] or 'none'}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"{path} cannot be read: {getattr(error, 'strerror', '') or first_line(error)}") from error


def json_lines(path: Path, *, malformed: type[Exception] | None) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of each line of a file of JSON lines that is not blank. Raises OSError.

    What is not JSON, such as a last line in writing, is dropped, or `malformed` is raised, with its place.
    """
    # Iterating bytes splits at \n only. Text would also be split at other line ends that JSON strings may contain.
    with path.open("rb") as file:
        yield from _json_lines(file, path, malformed)


def _json_lines(lines: Iterable[bytes], path: Path, malformed: type[Exception] | None) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        # json raises RecursionError for deeply nested values.
        except (ValueError, RecursionError) as error:
            if malformed is None:
                continue
            shown = line[:60].decode("utf-8", "replace").strip()
            raise malformed(f"{path}:{number}: the line is not JSON: {error}; it begins {shown!r}") from error
        yield number, value


def _json_objects(file: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield JSON lines, or one object that has several lines."""
    rows = _json_lines(file, path, TaskError)
    try:
        first = [*islice(rows, 1)]
    except TaskError:
        file.seek(0)
        try:
            whole = json.load(file)
        except (ValueError, RecursionError):
            whole = None
        if whole is None:
            raise
        first = [(1, whole)]
    yield from first
    yield from rows


def rows_within(row: dict[str, Any]) -> str:
    """Return advice if a row that lacks columns is the object around the rows, as `{"data": [...]}`; else ""."""
    held = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return f"; if `{held[0]}` has the rows, write that list alone" if held else ""


def _json_array(file: Any, path: Path) -> list[Any]:
    try:
        rows: list[Any] = json.load(file)
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path} begins as a JSON array, and is none ({error}): write one array, or one object per line"
        ) from error
    return rows


def _csv(file: Any, path: Path, separator: str) -> Iterator[tuple[int, dict[str, str]]]:
    # By default a cell has at most 131,072 characters.
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader((line.decode("utf-8-sig") for line in file), delimiter=separator, strict=True)
    try:
        names = rows.fieldnames or ()
        if len({*names}) < len(names):
            raise csv.Error("two columns have one name")
        if len(names) == 1 and (other := {*";\t,|"} & {*names[0]} - {separator}):
            raise csv.Error(f"the header has one column, and {other} in it: separate columns by {separator!r}")
        for row in rows:
            if None in row or None in row.values():
                raise csv.Error("it has more or fewer cells than the header")
            yield rows.line_num, row
    # UnicodeDecodeError: the bytes are not UTF-8.
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskError(f"{path}:{rows.line_num}: the row is not CSV: {error}") from error


def read_parquet(path: Path, malformed: type[Exception], *, short: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file, with `short` as `shortest` makes them.

    Raises MissingExtra without pyarrow, `malformed` for another file.
    """
    pa, pq = pyarrow()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from shortest(batch.to_pylist(), batch.schema) if short else batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise malformed(f"{path} is not a readable parquet file: {first_line(error)}") from error


def shortest(rows: Iterable[dict[str, Any]], schema: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with the shortest number of their type in columns of float32 and float16: 0.1, not 0.10000000149.

    `schema` is pyarrow's.
    """
    narrow = {field.name: field.type for field in schema if re.search(r"\b(half)?float\b", str(field.type))}
    for row in rows:
        yield row | {name: _shortest(row[name], type_) for name, type_ in narrow.items()}


def _shortest(value: Any, type_: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortest(inner, type_.field(name).type) for name, inner in value.items()}
    if isinstance(value, list) and hasattr(type_, "item_type"):
        return [(key, _shortest(inner, type_.item_type)) for key, inner in value]
    if isinstance(value, list):
        return [_shortest(inner, type_.value_type) for inner in value]
    # A dictionary-encoded column has the type of its values.
    narrow = {"float": "f4", "halffloat": "f2"}.get(str(getattr(type_, "value_type", type_)))
    if narrow is None or value is None or value.is_integer():
        return value
    # Imports NumPy, which reading other files does not need.
    import numpy as np

    return float(str(np.dtype(narrow).type(value)))


def pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for parquet. Raises MissingExtra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", "parquet") from None
    return pyarrow, pyarrow.parquet


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or path, and the path in it. Raises MissingExtra, UsageError."""
    try:
        import fsspec.core
    except ModuleNotFoundError:
        raise MissingExtra("fsspec", "archive") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened: {first_line(error)}") from error
    return system, path


def without_nested_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the nulls below the columns of a table, where each row has the fields that any of them has."""
    return {name: _dense(value) for name, value in row.items()}


def _dense(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dense(inner) for name, inner in value.items() if inner is not None}
    return [_dense(inner) for inner in value] if isinstance(value, list) else value


def require_unicode(value: Any) -> None:
    """Raise ValueError if a text in a JSON value has a lone surrogate: half of a character, which UTF-8 lacks."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half, before, after = error.object[error.start], error.object[: error.start], error.object[error.end :]
        near = before.rpartition('"')[2][-20:] + half + after.partition('"')[0][:20]
        raise ValueError(f"half of a character ({half!r}, a lone surrogate) in {near!r}: correct the text") from error
