"""The `tba` command, and the commands that need more than one role.

A command imports what it needs in its body: `tba --help` loads no role and none of their libraries.
"""

import faulthandler
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tba
from tba.buffer.commands import app as buffer_app
from tba.cli import inspection, models, roles, whole_run
from tba.common.errors import EXIT_FAILED, TbaError, UsageError, as_missing_extra
from tba.common.system.process import SAFE_PATH
from tba.deploy.keys_commands import app as keys_app
from tba.searcher.task_commands import app as task_app


class _Commands(TyperGroup):
    """The commands of `tba`. One that earlier builds had is refused with what is in its place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click does. Raises UsageError for a command that was removed."""
        from tba.common.config.layers import removed

        for name, instead in removed()["commands"].items():
            words, _, option = name.partition(" --")
            given = {argument.partition("=")[0] for argument in args}
            if args[: len(words.split())] == words.split() and (not option or f"--{option}" in given):
                raise UsageError(f"there is no `tba {name}` any more: {instead}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Joins the lines of a paragraph.
    rich_markup_mode="markdown",
    help="Asynchronous reinforcement-learning post-training of language models.",
)
app.add_typer(roles.app)
app.add_typer(whole_run.app)
app.add_typer(models.app)
app.add_typer(inspection.app)
app.add_typer(buffer_app, name="buffer")
app.add_typer(inspection.config_app, name="config")
app.add_typer(task_app, name="task")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Run `tba`. An error becomes one sentence on standard error and an exit code."""
    # For child processes, too: files are for this user alone, and a random.py of the working directory is not imported.
    os.umask(0o077)
    os.environ[SAFE_PATH] = "1"
    # A fatal signal, such as the SIGABRT of systemd's watchdog, shows where the process was.
    faulthandler.enable()
    try:
        app(standalone_mode=True)
    except (TbaError, ModuleNotFoundError) as raised:
        error = as_missing_extra(raised) if isinstance(raised, ModuleNotFoundError) else raised
        if error is None:
            raise
        if "TBA_DEBUG" in os.environ:
            traceback.print_exc()
        mark = "\033[31merror:\033[0m" if sys.stderr.isatty() else "error:"
        print(f"{mark} {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    # The reader of a pipe has ended, as in `tba status | head`.
    except BrokenPipeError:
        # So that the flush at exit raises no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tba {tba.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if debug:
        os.environ["TBA_DEBUG"] = "1"
