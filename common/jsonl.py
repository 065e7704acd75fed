"""JSON lines: one JSON value per line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(
    path: Path, *, skip_malformed: bool = False, malformed: type[Exception] = ValueError
) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) for each line that is not blank.

    `skip_malformed` drops lines that are not JSON, such as a last line that is still being written. Otherwise they
    raise `malformed`, with file and line number. Raises OSError if the file cannot be read.
    """
    # Iterating bytes splits at \n only. Text would also be split at other line ends that JSON strings may contain.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            # json raises RecursionError for deeply nested values.
            except (ValueError, RecursionError) as error:
                if skip_malformed:
                    continue
                raise malformed(f"{path}:{number}: the line is not JSON: {error}") from error
            yield number, value
