"""The `tba` command. Nothing heavy is imported before a command runs: `tba --help` answers at once."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tba
from tba.common.errors import EXIT_FAILED, ConfigError, TbaError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tba.common.config_layers import Resolved

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement-learning post-training of language models.",
)
buffer_app = typer.Typer(no_args_is_help=True, help="The replay buffer: serve it, ask it.")
config_app = typer.Typer(no_args_is_help=True, help="The configuration: show it with origins, check it.")
app.add_typer(buffer_app, name="buffer")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="TBA_CONFIG", help="TOML file; by default ./tba.toml if it is there."),
]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Override a key: --set train.steps=10")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DEFAULT_FILE = Path("tba.toml")
_PIPE_WIDTH = 1000


def main() -> None:
    """Entry point: errors become one sentence on standard error and an exit code."""
    try:
        app(standalone_mode=True)
    except TbaError as error:
        if "TBA_DEBUG" in os.environ:
            import traceback

            traceback.print_exc()
        mark = "\033[31merror:\033[0m" if sys.stderr.isatty() else "error:"
        print(f"{mark} {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `tba status | head`
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


# ---------------------------------------------------------------- the three roles


@buffer_app.command("serve")
def buffer_serve(config: ConfigFile = None, sets: Assignments = None) -> None:
    """Serve the replay buffer of a run until SIGTERM."""
    resolved = _resolve(config, sets)
    from tba.buffer.run import serve

    serve(resolved.config, _start_process("buffer"))


@app.command()
def search(
    config: ConfigFile = None,
    sets: Assignments = None,
    gpus: Annotated[str | None, typer.Option(help="One searcher per GPU: 0-6, 0,2,4, all.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="This many searchers on the CPU instead.")] = None,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Generate and score responses until the run is finished."""
    _not_both(cpu is not None, gpus is not None, "--cpu", "--gpus")
    resolved = _resolve(config, sets, {"search.gpus": "cpu" if cpu else gpus, "search.cpu_searchers": cpu})
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin

    if resolved.config.search.gpus == CPU:
        if (count := resolved.config.search.cpu_searchers) > 1:
            return _search_in_children(
                resolved, _pass_on(config, sets), [["--cpu", "1", "--index", str(n)] for n in range(count)]
            )
        return _search_here(resolved, CPU, f"cpu{index}")
    chosen = choose_gpus(resolved.config.search.gpus, list_gpus())
    if len(chosen) > 1:
        return _search_in_children(resolved, _pass_on(config, sets), [["--gpus", gpu] for gpu in chosen])
    pin(chosen[0])
    return _search_here(resolved, "cuda", f"gpu{chosen[0]}" if chosen[0].isdigit() else chosen[0])


def _search_here(resolved: "Resolved", device: str, label: str) -> None:
    stop = _start_process(f"search-{label}")
    from tba.searcher.run import search as run_searcher

    run_searcher(resolved.config, device=device, label=label, stop=stop)


def _search_in_children(resolved: "Resolved", arguments: Sequence[str], flags: Sequence[Sequence[str]]) -> None:
    stop = _start_process("search")
    from tba.deploy.launcher import run_searchers

    run_searchers(resolved.config, [["search", *arguments, *extra] for extra in flags], stop)


@app.command()
def train(
    config: ConfigFile = None,
    sets: Assignments = None,
    gpu: Annotated[str | None, typer.Option(help="The trainer's GPU.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
) -> None:
    """Train on what the buffer holds, and publish weights."""
    _not_both(cpu, gpu is not None, "--cpu", "--gpu")
    resolved = _resolve(config, sets, {"train.gpu": "cpu" if cpu else gpu})
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin

    device = CPU
    if resolved.config.train.gpu != CPU:
        pin(choose_gpus(resolved.config.train.gpu, list_gpus())[0])
        device = "cuda"
    stop = _start_process("train")
    _need("torch", "train")
    from tba.trainer.loop import train as run_trainer

    run_trainer(resolved.config, resume=resume, device=device, stop=stop)


# ---------------------------------------------------------------- all of them


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="TOML file; by default ./tba.toml if it is there.")] = None,
    sets: Assignments = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in run.dir.")] = False,
) -> None:
    """Run buffer, searchers and trainer on this machine, with one live display."""
    resolved = _resolve(config, sets)
    stop = _start_process("", level="WARNING")
    from tba.common.durable import exclusive_lock
    from tba.deploy.display import Display
    from tba.deploy.launcher import Launcher, check_start

    check_start(resolved.config, resume=resume)
    directory = resolved.config.run.dir
    with exclusive_lock(directory / "launcher.lock", f"{directory} is being run already by another `tba run`"):
        console = _console()
        launcher = Launcher(resolved.config, _pass_on(config, sets), resume=resume)
        finished = launcher.run(stop, Display(console, steps=resolved.config.train.steps))
        if not finished:
            again = shlex.join(["tba", "run", *([str(config)] if config else []), *_assignments(sets), "--resume"])
            console.print(f"stopped; go on with: {again}", soft_wrap=True, highlight=False)
        elif resolved.config.eval.at_end:
            _evaluate_at_end(resolved, _pass_on(config, sets), stop)
        console.print(f"everything is in {directory}", soft_wrap=True)


def _evaluate_at_end(resolved: "Resolved", arguments: Sequence[str], stop: Callable[[], bool]) -> None:
    from tba.deploy.launcher import evaluate_in_child
    from tba.deploy.picture import EVALUATIONS_FILE, draw, read_json_lines

    console, directory = _console(), resolved.config.run.dir
    console.print("evaluating the kept snapshots on the held-out prompts")
    if not evaluate_in_child(resolved.config, arguments, stop):
        return
    rows = read_json_lines(directory / EVALUATIONS_FILE)
    picture = draw(directory, title=resolved.config.run.name)
    console.print(f"held-out greedy accuracy: {rows[0]['accuracy']:.1%} before, {rows[-1]['accuracy']:.1%} after")
    console.print(f"picture: {picture}", soft_wrap=True)


@app.command("eval")
def evaluate(
    config: ConfigFile = None,
    sets: Assignments = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="One snapshot directory; by default the newest of the run.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All snapshots that the run has kept.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Evaluate on the CPU.")] = False,
    as_json: Json = False,
) -> None:
    """Greedy accuracy on the held-out prompts."""
    resolved = _resolve(config, sets, {"search.gpus": "cpu" if cpu else None})
    _start_process("eval", level="WARNING", drains=False)
    rows = _evaluate(resolved, snapshot, every=every)
    if as_json:
        _print_json(rows)
    else:
        _print_table(["version", "step", "accuracy", "reward", "prompts"], rows)


def _evaluate(resolved: "Resolved", snapshot: Path | None, *, every: bool) -> list[dict[str, Any]]:
    """Evaluate, and append the results to the run's eval.jsonl."""
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin

    if (device := resolved.config.search.gpus) != CPU:
        pin(choose_gpus(device, list_gpus())[0])
        device = "cuda"
    _need("torch", "train")
    from dataclasses import asdict

    from tba.common.snapshot import choose_snapshots
    from tba.deploy.picture import record_evaluations
    from tba.searcher.evaluate import evaluate_snapshots

    config = resolved.config
    paths = choose_snapshots(config.snapshots, snapshot, every=every)
    rows = [asdict(result) for result in evaluate_snapshots(config, paths, device=device)]
    record_evaluations(config.run.dir, rows)
    return rows


@app.command()
def plot(config: ConfigFile = None, sets: Assignments = None) -> None:
    """Draw reward, held-out accuracy and staleness of a run as run.png."""
    resolved = _resolve(config, sets)
    from tba.deploy.picture import draw

    typer.echo(draw(resolved.config.run.dir, title=resolved.config.run.name))


# ---------------------------------------------------------------- looking


@app.command()
def status(config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Who is connected, at which weights, and who waits for what."""
    resolved = _resolve(config, sets)
    from tba.common.client import BufferClient
    from tba.common.wire import GetStatus, Status
    from tba.deploy.display import clients_table, explain

    client = BufferClient(resolved.config.buffer.address, role="monitor", name="status")
    try:
        answer, _ = client.call(GetStatus(), Status, deadline_seconds=3.0)
    finally:
        client.close()
    if as_json:
        return _print_json({**answer.model_dump(), "explanation": explain(answer)})
    console = _console()
    console.print(f"run {answer.run_name}: {explain(answer)}", highlight=False)
    console.print(clients_table(answer))
    return None


@buffer_app.command("stats")
def buffer_stats(config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Counts, sizes and rewards, read from the database file; works while the server runs."""
    resolved = _resolve(config, sets)
    from tba.buffer.stats import read_stats

    stats = read_stats(resolved.config.database)
    if as_json:
        return _print_json(stats)
    for run_stats in stats:
        rows = [{"": name.replace("_", " "), "value": value} for name, value in run_stats.items()]
        _print_table(["", "value"], rows)
    return None


@config_app.command("show")
def config_show(config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Every value with its origin."""
    resolved = _resolve(config, sets)
    from tba.common.config_layers import fields, value_of

    values = resolved.config
    rows = [{"key": key, "value": value_of(values, key), "origin": resolved.origin(key)} for key, _ in fields()]
    if as_json:
        return _print_json(rows)
    return _print_table(["key", "value", "origin"], rows)


@config_app.command("check")
def config_check(config: ConfigFile = None, sets: Assignments = None) -> None:
    """Exit 0 if the configuration is valid, 78 with one sentence if it is not."""
    resolved = _resolve(config, sets)
    if not resolved.config.model.path:
        raise ConfigError("model.path is not set: name a Hugging Face model directory or a hub id")
    typer.echo(f"ok: run {resolved.config.run.name} in {resolved.config.run.dir}")


@app.command()
def doctor(config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Check this machine: packages, GPUs, disk, address, model."""
    resolved = _resolve(config, sets)
    from tba.deploy.doctor import examine

    findings = examine(resolved.config)
    if as_json:
        _print_json(findings)
    else:
        _print_table(["check", "result", "detail"], findings)
    if any(finding["result"] == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


# ---------------------------------------------------------------- helpers


def _resolve(file: Path | None, sets: Sequence[str] | None, overrides: dict[str, Any] | None = None) -> "Resolved":
    from tba.common.config_layers import resolve

    if file is None and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    return resolve(file, overrides=overrides, assignments=sets or [])


def _pass_on(file: Path | None, sets: Sequence[str] | None) -> list[str]:
    """The options that make a child resolve the same configuration."""
    return [*(["--config", str(file)] if file else []), *_assignments(sets)]


def _assignments(sets: Sequence[str] | None) -> list[str]:
    return [part for assignment in sets or [] for part in ("--set", assignment)]


def _not_both(first: bool, second: bool, *names: str) -> None:
    if first and second:
        raise UsageError(f"{' and '.join(names)} exclude each other")


def _start_process(role: str, *, level: str = "INFO", drains: bool = True) -> Callable[[], bool]:
    """What every long-running command does first. Returns the stop signal.

    A command that does not drain ends at the first signal, as programs do.
    """
    from tba.common.log import configure
    from tba.common.process import StopSignal, die_with_parent

    die_with_parent()
    configure(role, level=level)
    return StopSignal() if drains else lambda: False


def _need(module: str, extra: str) -> None:
    from importlib.util import find_spec

    from tba.common.errors import MissingExtra

    if find_spec(module) is None:
        raise MissingExtra(module, extra)


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, default=str))


def _print_table(headings: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"{row[h]:.4g}" if isinstance(row[h], float) else str(row[h])) for h in headings))
    _console().print(table)


def _console() -> "Console":
    """Standard output; lines are not folded where they go into a pipe or a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
