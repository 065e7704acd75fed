"""JSON lines: one JSON value per line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def read(
    path: Path, *, skip_malformed: bool = False, malformed: type[Exception] = ValueError
) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of each line that is not blank. Raises OSError.

    `skip_malformed` drops what is not JSON, such as a last line in writing; else `malformed` is raised, with its place.
    """
    # Iterating bytes splits at \n only. Text would also be split at other line ends that JSON strings may contain.
    with path.open("rb") as file:
        yield from parse(file, path, skip_malformed=skip_malformed, malformed=malformed)


def parse(
    lines: Iterable[bytes], path: Path, *, skip_malformed: bool = False, malformed: type[Exception] = ValueError
) -> Iterator[tuple[int, Any]]:
    """As `read`, of lines that are already open; `path` is what errors name."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        # json raises RecursionError for deeply nested values.
        except (ValueError, RecursionError) as error:
            if skip_malformed:
                continue
            shown = line[:60].decode("utf-8", "replace").strip()
            raise malformed(f"{path}:{number}: the line is not JSON: {error}; it begins {shown!r}") from error
        yield number, value
