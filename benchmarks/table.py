"""Printing of results, with the machine that they belong to."""

import os
import platform
from collections.abc import Sequence
from typing import Any


def machine() -> str:
    """One line that says where the figures come from."""
    return f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A plain table: first column left, the others right."""
    table = [list(map(str, headings)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    print(f"\n{title}\n{machine()}")
    for row in table:
        first, rest = (
            row[0].ljust(widths[0]),
            (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        )
        print("  ".join([first, *rest]))
