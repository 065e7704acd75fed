"""The commands that look at runs and at this machine: `tba report`, `ui`, `status`, `runs`, `config` and `doctor`."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common.errors import EXIT_FAILED, BufferUnavailable, ConfigError, UsageError
from tba.common.terminal import (
    NO_FILE,
    Assume,
    ConfigFile,
    ConfigOptions,
    FileArgument,
    Json,
    Sets,
    console,
    need,
    note,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from tba.common.run_status import Facts
    from tba.common.wire.client import BufferClient

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="The configuration: show every value with its origin.")
_WATCH_SECONDS = 1.0
# Checks that say nothing of a machine.
_OF_CONFIGURATION = ("settings", "model", "trainer memory")
_PICTURES = (".png", ".svg", ".pdf")
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where to look, up to three levels below.")]
_Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Directories of runs, or database files; default: all in runs/."),
]


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories, databases or TOML files; default: the configured run."),
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file: .html, or .png, .svg, .pdf; default: report.html of the run."),
    ] = None,
    x: Annotated[str, typer.Option("--x", help="The axis of a picture: steps, seconds or tokens.")] = "steps",
    name: Annotated[str | None, typer.Option("--run", help="Name of the run, if a file holds several.")] = None,
) -> None:
    """Write a run as one HTML file (numbers, charts, best and worst responses), or one run or several as a picture."""
    from tba.buffer.store.starts import choose_run
    from tba.common.evaluations import all_evaluations
    from tba.deploy.plot import AXES, draw_curves, read_curve
    from tba.ui.runs import find_runs

    kind = out.suffix.lower() if out is not None else ".html"
    if kind not in (".html", *_PICTURES):
        raise UsageError(f"--out {out}: name a file that ends in .html, or {', '.join(_PICTURES)} for a picture")
    if x not in AXES:
        raise UsageError(f"--x {x}: choose {', '.join(AXES)}")
    options = ConfigOptions.of(None, config, sets)
    found = [_run_of(run, options) for run in runs or (None,)]
    if name and len(found) > 1:
        raise UsageError("--run names a run of one file: leave it out, or name one RUN")
    if out is not None and kind in _PICTURES:
        directory, path, _ = found[0]
        if name and name not in {row["run"] for row in all_evaluations(directory)}:
            choose_run(path, (run.name for run in find_runs([path], note)), name, "--run")
        return typer.echo(draw_curves([read_curve(directory, name or run) for directory, _, run in found], out, x=x))
    if len(found) > 1:
        raise UsageError("several runs are one picture: name it with --out, such as --out both.png")
    need("jinja2", "ui")
    from tba.ui.pages.run import write_report

    ((_, path, run),) = found
    return typer.echo(write_report(path, out, name=name or run))


def _run_of(argument: Path | None, options: ConfigOptions) -> tuple[Path, Path, str | None]:
    """Return directory, database and, if configured, name of a run; None is the configured one."""
    if argument is not None and argument.suffix != ".toml":
        return argument.parent if argument.is_file() else argument, argument, None
    config = (options if argument is None else ConfigOptions(argument, options.sets)).resolve_run().config
    return config.run.dir, config.database, config.run.name


@app.command()
def status(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat every second until Ctrl-C; JSON lines with --json.")
    ] = False,
) -> None:
    """Show the connected clients, their weights, what each one waits for, and why the run stands still."""
    from tba.buffer.store.starts import as_recorded

    settings = as_recorded(ConfigOptions.of(file, config, sets).resolve_run()).config
    from tba.buffer.tools.stats import read_results
    from tba.common.run_status import Facts, monitor
    from tba.common.wire.messages import GetStatus, Status
    from tba.deploy.display import status_view
    from tba.deploy.run_directory import local_state

    here = partial(local_state, settings, read_results)
    with contextlib.closing(monitor(settings, "status")) as client:
        if watch:
            return _watch(client, here, as_json=as_json)
        try:
            answer, _ = client.call(GetStatus(), Status, deadline_seconds=3.0, stop=lambda: bool(client.obstacle))
            state = here(answer)
        except BufferUnavailable as error:
            state = here()
            if state is None and settings.buffer.address == "auto" and not settings.database.exists():
                raise BufferUnavailable(f"there is no run in {settings.run.dir} yet: `tba run` starts one") from error
            if state is None or state["state"] == "running":
                raise
            return print_json(state) if as_json else typer.echo(state["explanation"])
    if as_json:
        return print_json(for_machines(Facts(answer, settings.address), state))
    return console().print(status_view(answer, settings.address, state), soft_wrap=True)


def _watch(client: "BufferClient", here: Callable[[], dict[str, Any] | None], *, as_json: bool) -> None:
    """Show the status again and again, also that the buffer does not answer, until the run is finished or Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    from tba.common.run_status import Facts, ask_status
    from tba.deploy.display import status_view

    terminal, finished = console(), False
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=terminal) if not as_json else contextlib.nullcontext() as live,
    ):
        while not finished:
            facts = Facts(ask_status(client), client.address, client.silent_seconds)
            shown = for_machines(facts, None if facts.status else here())
            if facts.status is None and client.obstacle:
                shown["explanation"] = f"the buffer at {client.address}: {client.obstacle}"
            finished = shown["state"] == "finished"
            if live is None:
                print_json(shown)
            elif facts.status:
                live.update(status_view(facts.status, client.address))
            else:
                live.update(Text(str(shown["explanation"])))
            # A run that was stopped may be continued while someone watches.
            time.sleep(0 if finished else _WATCH_SECONDS)


def for_machines(facts: "Facts", state: dict[str, Any] | None = None) -> dict[str, object]:
    """Return the status with state, explanation and stall; `state` is what this machine knows of the run."""
    import msgspec

    from tba.common.run_status import describe, stall_of

    stall, found = stall_of(facts), describe(facts)
    return {
        **(msgspec.to_builtins(facts.status) if facts.status is not None else {}),
        "state": state["state"] if state else found.name,
        "explanation": state["explanation"] if state else found.sentence,
        "stall": {"reason": stall.reason, "sentence": stall.sentence} if stall is not None else None,
    }


@app.command()
def runs(directory: _Directory = Path("runs"), as_json: Json = False) -> None:
    """List runs with their state, steps, last reward and last evaluation, and why they are in it."""
    from tba.buffer.tools.stats import read_results
    from tba.deploy.run_directory import list_runs

    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: name the one that holds your runs, as in `tba runs DIR`")
    rows = list_runs(directory, read_results)
    if as_json:
        return print_json(rows)
    return print_table(["name", "state", "steps", "reward", "accuracy", "changed", "directory", "why"], rows)


@app.command()
def ui(
    runs: _Runs = None,
    host: Annotated[str, typer.Option(help="Address to listen at. Others than loopback need --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 5780,
    token: Annotated[
        str | None,
        typer.Option(envvar="TBA_UI_TOKEN", help="Secret that every browser must give, of at least 16 characters."),
    ] = None,
) -> None:
    """Show runs in a browser: charts, steps, prompts, trajectories, SQL. Only reads, also while a run goes on."""
    need("starlette", "ui")
    from tba.ui.app import serve

    serve(runs or [], host=host, port=port, token=token, report=note)


@config_app.command("show")
def config_show(file: FileArgument = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show every value with its origin."""
    resolved = ConfigOptions.of(file, config, sets).resolve()
    from tba.common.config.layers import as_toml, fields, value_of

    values = resolved.config
    rows = [{"key": key, "value": value_of(values, key), "origin": resolved.origin(key)} for key, _ in fields()]
    if as_json:
        return print_json(rows)
    for row in rows:
        row["value"] = row["value"] if row["value"] is None else as_toml(row["value"])
    return print_table(["key", "value", "origin"], rows)


@app.command()
def doctor(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Make this check alone, such as settings or task; may be repeated."),
    ] = None,
    as_json: Json = False,
    assume: Assume = None,
    strict: Annotated[bool, typer.Option("--strict", hidden=True)] = False,
) -> None:
    """Check the configuration and this machine. Exits with 1 if a check fails, with --only with its error code."""
    options = ConfigOptions.of(file, config, sets)
    from tba.buffer.store.starts import resolve_start
    from tba.cli.checks import COLUMNS, Plan, as_rows, examine
    from tba.common.system.devices import CPU, assumed_gpus, list_gpus
    from tba.common.system.process import die_with_parent

    resolved = resolve_start(options) if options.file is not None else options.resolve()
    if not resolved.configured:
        note(f"{NO_FILE}. These are checks of this machine with the default settings:")
        # A machine without a GPU lacks nothing that the user has asked for.
        if not assume and not list_gpus():
            resolved = options.resolve({"search.gpus": CPU, "train.gpu": CPU})
    # `tba run` starts this command as a child, with --strict, to check the task.
    die_with_parent()
    plan = Plan(resolved.config, assumed_gpus(assume) if assume else None, loads=bool(only), strict=strict)
    findings = examine(plan, only or ())
    if not resolved.configured and not only:
        findings = [finding for finding in findings if finding.check not in _OF_CONFIGURATION]
    print_json(as_rows(findings)) if as_json else print_table(COLUMNS, as_rows(findings))
    failed = [finding for finding in findings if finding.result == "fail"]
    if failed and only:
        raise failed[0].error or ConfigError(failed[0].detail)
    if failed:
        raise typer.Exit(EXIT_FAILED)
