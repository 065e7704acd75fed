"""`tba status`, `tba runs`, `tba plot` and `tba doctor`. Slow imports are inside, so that `tba --help` stays fast."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common.errors import EXIT_FAILED, BufferUnavailable, UsageError
from tba.common.terminal import (
    NO_FILE,
    Assume,
    ConfigOptions,
    Json,
    console,
    note,
    print_json,
    print_table,
    with_config,
)

if TYPE_CHECKING:
    from tba.common.run_status import Facts
    from tba.common.wire.client import BufferClient
    from tba.deploy.doctor import Checks
    from tba.deploy.run_list import ReadResults

_WATCH_SECONDS = 1.0
_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Where to look, up to three levels below.")]


@with_config
def plot(
    options: ConfigOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN", help="Run directories, or their configuration files; by default the configured run."
        ),
    ] = None,
    x: Annotated[str, typer.Option("--x", help="The axis: steps, seconds or tokens.")] = "steps",
    out: Annotated[
        Path | None, typer.Option(help="The picture; by default run.png in the directory of one run.")
    ] = None,
) -> None:
    """Draw reward, held-out metrics and staleness of one run or several, and reward against KL and diversity."""
    from tba.deploy.plot import AXES, PICTURE_FILE, draw_curves, read_curve

    if x not in AXES:
        raise UsageError(f"--x {x}: choose {', '.join(AXES)}")
    found = [_run_of(run, options) for run in runs] if runs else [_configured(options)]
    if out is None and len(found) > 1:
        raise UsageError("several runs are one picture: name it with --out")
    curves = [read_curve(directory, name) for directory, name in found]
    typer.echo(draw_curves(curves, out or found[0][0] / PICTURE_FILE, x=x))


def _run_of(argument: Path, options: ConfigOptions) -> tuple[Path, str | None]:
    """Return the directory of a run and, if its configuration file is named, its name."""
    return (argument, None) if argument.is_dir() else _configured(ConfigOptions(argument, options.sets))


def _configured(options: ConfigOptions) -> tuple[Path, str | None]:
    run = options.resolve_run().config.run
    return run.dir, run.name


def status_command(read_results: "ReadResults") -> Callable[..., None]:
    """Return the command. `read_results` is passed in, because this package does not import the buffer."""

    @with_config
    def status(
        options: ConfigOptions,
        as_json: Json = False,
        watch: Annotated[
            bool, typer.Option("--watch", help="Repeat every second until Ctrl-C; JSON lines with --json.")
        ] = False,
    ) -> None:
        """Show the connected clients, their weights, what each one waits for, and why the run stands still."""
        config = options.resolve_run().config
        from contextlib import closing

        from tba.common.run_status import Facts, monitor
        from tba.common.wire.messages import GetStatus, Status
        from tba.deploy.display import status_view
        from tba.deploy.run_list import ended_run

        with closing(monitor(config, "status")) as client:
            ended = ended_run(config, read_results) if watch else None
            # A run that was stopped may be continued while someone watches.
            if watch and (ended is None or ended["state"] != "finished"):
                return _watch(client, as_json=as_json)
            try:
                answer, _ = client.call(GetStatus(), Status, deadline_seconds=3.0)
            except BufferUnavailable:
                if (ended := ended_run(config, read_results)) is None:
                    raise
                return print_json(ended) if as_json else typer.echo(ended["explanation"])
        if as_json:
            return print_json(for_machines(Facts(answer, config.address)))
        return console().print(status_view(answer, config.address), soft_wrap=True)

    return status


def _watch(client: "BufferClient", *, as_json: bool) -> None:
    """Show the status again and again, also that the buffer does not answer, until the run is finished or Ctrl-C."""
    import contextlib
    import time

    from rich.live import Live
    from rich.text import Text

    from tba.common.run_status import Facts, ask_status
    from tba.deploy.display import explain, status_view

    terminal = console()
    finished = False
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=terminal) if not as_json else contextlib.nullcontext() as live,
    ):
        while not finished:
            facts = Facts(ask_status(client), client.address, client.silent_seconds)
            finished = facts.status is not None and facts.status.finished
            if live is None:
                print_json(for_machines(facts))
            else:
                live.update(status_view(facts.status, client.address) if facts.status else Text(explain(facts)))
            time.sleep(_WATCH_SECONDS)


def runs_command(read_results: "ReadResults") -> Callable[..., None]:
    """Return the command. `read_results` is passed in, because this package does not import the buffer."""

    def runs(directory: _Directory = Path("runs"), as_json: Json = False) -> None:
        """List runs with their state (running, finished, stopped, crashed), steps, last reward and last evaluation."""
        from tba.deploy.run_list import list_runs

        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory: name the one that holds your runs, as in `tba runs DIR`")
        rows = list_runs(directory, read_results)
        if as_json:
            return print_json(rows)
        return print_table(["name", "state", "steps", "reward", "accuracy", "changed", "directory", "why"], rows)

    return runs


def doctor_command(checks: Callable[[], "Checks"]) -> Callable[..., None]:
    """Return the command. `checks` are passed in, because this package imports neither searcher nor trainer."""

    @with_config
    def doctor(options: ConfigOptions, as_json: Json = False, assume: Assume = None) -> None:
        """Check this machine: packages, GPUs and driver, compiler, caches, disk, addresses, model, task, reward
        model."""
        resolved = options.resolve()
        config = resolved.config
        if not resolved.configured:
            note(f"{NO_FILE}. These are checks of this machine with the default settings:")
        from tba.common.system.devices import assumed_gpus
        from tba.deploy.doctor import FAIL, examine

        findings = examine(config, checks(), assumed_gpus(assume) if assume else None)
        if as_json:
            print_json(findings)
        else:
            print_table(["check", "result", "detail"], findings)
        if any(finding["result"] == FAIL for finding in findings):
            raise typer.Exit(EXIT_FAILED)

    return doctor


def for_machines(facts: "Facts") -> dict[str, object]:
    """Return the status with the explanation and the stall, None if the run moves."""
    import msgspec

    from tba.common.run_status import find_stall
    from tba.deploy.display import explain

    stall = find_stall(facts)
    return {
        **(msgspec.to_builtins(facts.status) if facts.status is not None else {}),
        "explanation": explain(facts),
        "stall": {"reason": stall.reason, "sentence": stall.sentence} if stall is not None else None,
    }
