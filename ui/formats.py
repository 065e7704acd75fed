"""Values as text for a page: every string of a run with its control characters visible, numbers with units."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from tba.common.config.layers import as_toml
from tba.common.errors import format_time
from tba.common.evaluations import represents
from tba.common.terminal import cell, printable


def visible(text: str) -> str:
    """Return text with control, direction and other unprintable characters escaped; lines and tabs stay."""
    if text.isprintable():
        return text
    return "\n".join(line if line.isprintable() else printable(line, keep="\t") for line in text.split("\n"))


def finalize(value: Any) -> Any:
    """Prepare the value of any template expression for output: text becomes visible, settings TOML, None empty."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, bool | dict | list | tuple):
        value = as_toml(value)
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) else value


def number(value: Any) -> str:
    """Format a number in a few characters: integers with separators, others with four digits; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if isinstance(value, float) and 1000 <= abs(value) < 1e15 else cell(value)


def column(rows: Sequence[Any], key: Any) -> list[str]:
    """Format a column of numbers with the same number of decimals, so that they can be compared at a glance."""
    values = [row[key] for row in rows]
    known = [abs(value) for value in values if isinstance(value, int | float) and abs(value) < 1e15]
    largest = max(known, default=0)
    # Four digits of the largest.
    decimals = max(1, 3 - math.floor(math.log10(largest or 1)))
    if decimals > 6 or all(float(value).is_integer() for value in known):
        return [number(value) for value in values]
    return [f"{value:,.{decimals}f}" if isinstance(value, int | float) and abs(value) < 1e15 else number(value)
            for value in values]  # fmt: skip


def percent(value: float | None) -> str:
    # A database of foreign origin may have text there.
    return f"{100 * value:.0f} %" if isinstance(value, int | float) else "–"


def of_the_rest(errors: int, rows: int) -> str:
    """Say what a mean is of, if it does not stand for all rows because too many have errors; "" otherwise."""
    return "" if represents(errors, rows) else f"of the {rows - errors:,} of {rows:,} without an error"


def time_text(seconds: float | None) -> str:
    """Format Unix seconds in UTC. A time outside the calendar, as an import may have, stays a number."""
    return "–" if seconds is None else format_time(seconds) or str(seconds)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            # With zeros at the end, so that the durations of a column can be compared at a glance.
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 86_400:.3g} d"


def excerpt(text: str | None, length: int) -> str:
    if not text:
        return ""
    # A line of a megabyte is cut before it is searched for white space.
    line = " ".join(text[: 4 * length].split())
    return line if len(line) <= length and len(text) <= 4 * length else f"{line[:length]}…"


FILTERS = {
    "number": number,
    "percent": percent,
    "column": column,
    "of_the_rest": of_the_rest,
    "time": time_text,
    "duration": duration,
    "excerpt": excerpt,
    "toml": as_toml,
}
