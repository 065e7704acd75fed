"""Tables of results, with a description of the machine."""

import os
import platform
from collections.abc import Sequence
from typing import Any


def machine() -> str:
    """Describe this machine in one line."""
    return f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, with the first column left-aligned and the others right-aligned."""
    table = [list(map(str, headings)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    print(f"\n{title}\n{machine()}")
    for row in table:
        first, rest = (
            row[0].ljust(widths[0]),
            (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        )
        print("  ".join([first, *rest]))
