"""What the commands of `tba` share: options, the configuration, tables for people and JSON for machines.

Imported by everything that declares a command, so it imports nothing heavy itself.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tba.common.config_layers import Resolved
    from tba.common.process import StopSignal

_CONFIG_VARIABLE = "TBA_CONFIG"
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar=_CONFIG_VARIABLE, help="TOML file; by default ./tba.toml if it is there."),
]
# Every command takes --config; one without an argument of its own takes the file as its argument too.
File = Annotated[Path | None, typer.Argument(metavar="FILE", help="The same as --config FILE.", show_default=False)]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set train.steps=10")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV for machines.")]
DEFAULT_FILE = Path("tba.toml")
_PIPE_WIDTH = 1000


def one_file(argument: Path | None, option: Path | None) -> Path | None:
    """The configuration file, given as an argument or by --config. Raises UsageError if both were given."""
    given = option is not None and str(option) != os.environ.get(_CONFIG_VARIABLE)
    not_both(argument is not None, given, f"FILE {argument}", f"--config {option}")
    return option if argument is None else argument


def resolve(
    file: Path | None,
    sets: Sequence[str] | None,
    overrides: dict[str, Any] | None = None,
    *,
    unless: Collection[str] = (),
) -> "Resolved":
    """The configuration of a command; without `DEFAULT_FILE` where one of the keys `unless` is set by other means.

    Raises ConfigError with one sentence.
    """
    from tba.common.config_layers import resolve as resolve_layers

    default = DEFAULT_FILE if DEFAULT_FILE.exists() else None
    return resolve_layers(file, overrides=overrides, assignments=sets or [], default_file=default, unless=unless)


def not_both(first: bool, second: bool, *names: str) -> None:
    """Raise UsageError if two flags were given that exclude each other."""
    if first and second:
        raise UsageError(f"{' and '.join(names)} exclude each other")


def start_process(role: str, *, level: str = "INFO", drains: bool = True, gpu: str = "") -> "StopSignal":
    """What every long-running command does first. Returns the stop signal.

    A command that does not drain ends at the first signal, as programs do.
    """
    from tba.common.log import configure
    from tba.common.process import StopSignal, die_with_parent

    die_with_parent()
    configure(role, level=level, gpu=gpu)
    return StopSignal(listens=drains)


def need(module: str, extra: str) -> None:
    """Raise MissingExtra unless a module can be imported."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingExtra(module, extra)


def note(sentence: str) -> None:
    """Say something beside the output: on standard error."""
    typer.echo(sentence, err=True)


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    import json

    typer.echo(json.dumps(value, default=str))


def print_json_rows(rows: Iterable[dict[str, Any]]) -> None:
    """A JSON list, one row on a line, written as the rows come."""
    import json

    separator = "["
    for row in rows:
        typer.echo(f"{separator}{json.dumps(row, default=str)}", nl=False)
        separator = ",\n "
    typer.echo("[]" if separator == "[" else "]")


def print_csv(headings: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> None:
    """CSV with a line of headings, unless that was written before; written as the rows come."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    if headings is not None:
        writer.writerow(headings)
    writer.writerows(rows)
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """A table for people."""
    print_columns(headings, ([row[heading] for heading in headings] for row in rows))


def print_columns(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for people from rows whose headings may repeat."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console().print(table)


def cell(value: Any) -> str:
    """A value as a table shows it: short numbers, blobs by their size, nothing for None."""
    if isinstance(value, float):
        return f"{value:.10g}" if abs(value) >= 1e6 else f"{value:.4g}"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return "" if value is None else printable(str(value), keep="\n\t")


def printable(text: str, *, keep: str = "") -> str:
    """Text for a terminal: what a model wrote may hold escape sequences, which are spelt out."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def console() -> "Console":
    """Standard output; lines are not folded where they go into a pipe or a file."""
    from rich.console import Console

    standard = Console()
    return standard if standard.is_terminal else Console(width=_PIPE_WIDTH)


def discard_output() -> None:
    """After a broken pipe: what Python flushes at its end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def byte_progress(doing: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar with its rate on standard error, if that is a terminal: hears (bytes done, bytes in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, disable=quiet or not errors.is_terminal, transient=True) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def row_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar with its rate on standard error, if that is a terminal: hears (what is done, rows done, rows in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    errors = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=errors, disable=not errors.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=None, rate="")

        def show(doing: str, done: int, total: int | None) -> None:
            if progress.tasks[0].description != doing:
                progress.reset(task, description=doing, total=total)
            rate = f"{speed:,.0f} rows/s" if (speed := progress.tasks[0].speed) else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield show


@contextlib.contextmanager
def training_progress(doing: str, *, as_json: bool) -> Iterator[Callable[[dict[str, float]], None]]:
    """Hears the numbers of each step, `step` and `steps` among them.

    A bar with rate and remaining time on standard error if that is a terminal, JSON lines for machines, else log lines.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    if as_json:
        yield print_json
        return
    if not errors.is_terminal:
        from tba.common.log import get_logger

        yield lambda numbers: get_logger(__name__).info("step", **numbers)
        return
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, TimeRemainingColumn(), console=errors) as progress:
        task = progress.add_task(doing, total=None, numbers="")

        def show(numbers: dict[str, float]) -> None:
            shown = {"loss": ".4f", "held_out_loss": ".4f", "tokens_per_second": ",.0f"}
            text = "  ".join(
                f"{name.replace('_', ' ')} {numbers[name]:{form}}" for name, form in shown.items() if name in numbers
            )
            progress.update(task, completed=numbers["step"], total=numbers["steps"], numbers=text)

        yield show
