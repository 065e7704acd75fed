"""The `tba` command. Nothing heavy is imported before a command runs: `tba --help` answers at once."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tba
from tba.buffer.commands import app as buffer_app
from tba.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, TbaError, UsageError
from tba.common.quantity import quantity
from tba.common.terminal import (
    Assignments,
    ConfigFile,
    File,
    Json,
    console,
    discard_output,
    need,
    not_both,
    note,
    one_file,
    print_json,
    print_table,
    resolve,
    start_process,
    training_progress,
)

if TYPE_CHECKING:
    from tba.buffer.offline import Past
    from tba.common.config import RewardModelSection
    from tba.common.config_layers import Resolved
    from tba.common.process import StopSignal

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement-learning post-training of language models.",
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration: show it with origins, check it.")
app.add_typer(buffer_app, name="buffer")
app.add_typer(config_app, name="config")


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
        discard_output()
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


@app.command()
def search(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    gpus: Annotated[str | None, typer.Option(help="One searcher per GPU: 0-6, 0,2,4, UUIDs, all.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs per searcher.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="This many searchers on the CPU instead.")] = None,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Generate and score responses until the run is finished."""
    not_both(cpu is not None, gpus is not None, "--cpu", "--gpus")
    flags = {"search.gpus": "cpu" if cpu else gpus, "search.cpu_searchers": cpu}
    config = one_file(file, config)
    resolved = resolve(config, sets, {**flags, "search.tensor_parallel": tensor_parallel})
    from tba.common.devices import CPU, label, pin
    from tba.deploy.launcher import searcher_groups

    search = resolved.config.search
    if search.gpus == CPU:
        if search.cpu_searchers == 1:
            return _search_here(resolved, CPU, f"cpu{index}")
        return _search_in_children(resolved, _pass_on(config, sets))
    groups = searcher_groups(resolved.config, "--cpu 1")
    if len(groups) > 1:
        return _search_in_children(resolved, _pass_on(config, sets))
    pin(groups[0])
    return _search_here(resolved, "cuda", label(groups[0]))


def _search_here(resolved: "Resolved", device: str, label: str) -> None:
    stop = start_process(f"search-{label}", gpu=label)
    # Read when torch is loaded. Threads that spin while they wait for each other lose what anything else takes of their
    # cores, such as the thread that prepares weights, many times over (docs/vllm.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from tba.searcher.run import search as run_searcher

    run_searcher(resolved.config, device=device, label=label, stop=stop)


def _search_in_children(resolved: "Resolved", arguments: Sequence[str]) -> None:
    from tba.common.model_files import check_model
    from tba.common.paths import check_data

    check_model(resolved.config.model.path)  # once, and not by each of them
    check_data(resolved.config.task)
    stop = start_process("search")
    from tba.deploy.launcher import Fleet

    Fleet(resolved.config, arguments).run(stop)


@app.command()
def train(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", "--gpus", help="The trainer's GPU; several (6,7 or 4-7) train together.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes that train together on the CPU.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    buffer: Annotated[Path | None, typer.Option(help="Offline: the database of a recorded run.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Train on --buffer, with no server and no searcher.")
    ] = False,
    as_of: Annotated[
        int | None, typer.Option(min=0, help="Offline: only what was there when the batch of this step was sampled.")
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Offline: the recorded run's own batches.")] = False,
    source_run: Annotated[str | None, typer.Option(help="Offline: which run, if the file holds several.")] = None,
) -> None:
    """Train on what the buffer holds, and publish weights; offline, on what it held."""
    not_both(cpu, gpu is not None, "--cpu", "--gpu")
    travel = _time_travel(buffer, offline=offline, as_of=as_of, replay=replay, source_run=source_run)
    overrides = {"train.gpu": "cpu" if cpu else gpu, "train.processes": processes}
    resolved = resolve(one_file(file, config), sets, overrides)
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin
    from tba.common.model_files import local_model

    need("torch", "train")
    local_model(resolved.config.model.path)  # told before anything is loaded or made; a trainer needs no tokenizer
    rank, device, count = os.environ.get("LOCAL_RANK"), CPU, resolved.config.train.processes
    if resolved.config.train.gpu != CPU:
        gpus = choose_gpus(resolved.config.train.gpu, list_gpus(), "train.gpu", "--cpu")
        pin(gpus)
        device, count = f"cuda:{rank or 0}", len(gpus)
    stop = start_process("train", level="INFO" if os.environ.get("RANK", "0") == "0" else "ERROR")
    if count > 1 and rank is None:
        from tba.deploy.ranks import train_together

        return train_together(resolved.config, sys.argv[1:], count, stop)
    from tba.trainer.loop import train as run_trainer

    run_trainer = partial(run_trainer, resolved.config, resume=resume, device=device, stop=stop)
    if travel is None:
        return run_trainer()
    return _train_offline(resolved, travel, run_trainer, replay=replay)


@app.command()
def sft(
    data: Annotated[list[Path], typer.Argument(help="jsonl files: prompt and response, or chat messages.")],
    out: Annotated[Path, typer.Option(help="The model directory to make.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    model: Annotated[str | None, typer.Option(help="The model to start from, instead of model.path.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="jsonl file to measure the loss on.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data; 1 by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of an optimiser step.")] = 64,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of train.learning_rate.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU to train on.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model on prompts with given responses: the warm start of a run."""
    not_both(cpu, gpu is not None, "--cpu", "--gpu")
    not_both(epochs is not None, steps is not None, "--epochs", "--steps")
    overrides = {"train.gpu": "cpu" if cpu else gpu, "model.path": model, "train.learning_rate": learning_rate}
    resolved = resolve(config, sets, overrides)
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin

    device = CPU
    if resolved.config.train.gpu != CPU:
        gpus = choose_gpus(resolved.config.train.gpu, list_gpus(), "train.gpu", "--cpu")
        if len(gpus) > 1:
            raise UsageError("tba sft trains on one GPU: name one with --gpu")
        pin(gpus)
        device = "cuda"
    stop = start_process("sft", level="WARNING" if as_json or sys.stderr.isatty() else "INFO")
    need("torch", "train")
    from tba.trainer.sft import Plan
    from tba.trainer.sft import sft as run_sft

    plan = Plan(data, out, held_out, epochs or 1, steps, batch_size)
    with training_progress("sft", as_json=as_json) as tell:
        finished = run_sft(resolved.config, plan, resume=resume, device=device, stop=stop, tell=tell)
    if not as_json:
        typer.echo(f"the model is in {out}" if finished else "stopped; the same command with --resume goes on")
    if stop.interrupted and not finished:
        raise typer.Exit(EXIT_INTERRUPTED)


def _time_travel(
    file: Path | None, *, offline: bool, as_of: int | None, replay: bool, source_run: str | None
) -> "Past | None":
    """The recorded run to train on, None to train online."""
    if not offline:
        for given, name in (
            (file, "--buffer"),
            (as_of, "--as-of"),
            (replay or None, "--replay"),
            (source_run, "--source-run"),
        ):
            if given is not None:
                raise UsageError(f"{name} needs --offline")
        return None
    if file is None:
        raise UsageError("--offline needs --buffer FILE: the database of a recorded run")
    from tba.buffer.offline import read_past

    return read_past(file, run=source_run, as_of=as_of)


def _train_offline(resolved: "Resolved", past: "Past", run_trainer: Callable[..., None], *, replay: bool) -> None:
    from tba.buffer.offline import OfflineBuffer

    last_step = past.step if replay else None
    if os.environ.get("RANK", "0") != "0":  # rank 0 alone talks to the buffer
        return run_trainer(last_step=last_step)
    if replay and past.step < resolved.config.train.steps:
        there = quantity(past.step, "trained step")
        typer.echo(f"{past.path} has {there} to replay, of train.steps = {resolved.config.train.steps}")
    buffer = OfflineBuffer(resolved.config, past, replay=replay)
    try:
        run_trainer(dial=buffer.client, last_step=last_step)
        if replay:
            typer.echo(_compared(*buffer.compare_losses()))
    finally:
        buffer.close()


def _compared(steps: int, difference: float) -> str:
    if steps == 0:
        return "no step whose loss could be compared with the recorded one"
    same = "bit for bit the same" if difference == 0.0 else f"largest difference {difference:.3g}"
    return f"replayed {quantity(steps, 'step')}; losses: {same}"


# ---------------------------------------------------------------- all of them


@app.command()
def run(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in run.dir.")] = False,
) -> None:
    """Run buffer, searchers and trainer on this machine, with one live display."""
    config = one_file(file, config)
    resolved = resolve(config, sets)
    stop = start_process("", level="WARNING")
    from tba.deploy.launcher import check_start, check_task
    from tba.deploy.run_directory import await_former

    await_former(resolved.config, stop, note)
    if not stop():
        check_start(resolved.config, resume=resume)
        check_task(resolved.config, _pass_on(config, sets), stop)
    if not stop():
        _launch(resolved, config, sets, stop, resume=resume)
    if stop.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _launch(
    resolved: "Resolved", file: Path | None, sets: Sequence[str] | None, stop: "StopSignal", *, resume: bool
) -> None:
    """Run all roles to the end of the run, or until `stop()`, and say what to do next."""
    from tba.deploy.display import Display
    from tba.deploy.launcher import Launcher
    from tba.deploy.run_directory import holds_run, sole_launcher

    arguments, directory, terminal = _pass_on(file, sets), resolved.config.run.dir, console()
    with sole_launcher(resolved.config):
        launcher = Launcher(resolved.config, arguments, resume=resume)
        finished = launcher.run(stop, Display(terminal, steps=resolved.config.train.steps))
        if not finished:
            how = "go on" if (begun := resume or holds_run(resolved.config)) else "start again"
            flags = [*_assignments(sets), *(["--resume"] if begun else [])]
            again = shlex.join(["tba", "run", *([str(file)] if file else []), *flags])
            terminal.print(f"stopped; {how} with: {again}", soft_wrap=True, highlight=False)
        elif resolved.config.eval.at_end:
            _evaluate_at_end(resolved, arguments, stop)
        if finished:
            _clear_weights(resolved)
        terminal.print(f"everything is in {directory}", soft_wrap=True)


def _clear_weights(resolved: "Resolved") -> None:
    """Of a finished run, no searcher will ask for what this node has of its weights."""
    from tba.searcher.node_cache import clear
    from tba.searcher.prefetch import weights_directory

    clear(weights_directory(resolved.config))


def _evaluate_at_end(resolved: "Resolved", arguments: Sequence[str], stop: Callable[[], bool]) -> None:
    from tba.deploy.launcher import evaluate_in_child
    from tba.deploy.picture import EVALUATIONS_FILE, draw, read_json_lines

    terminal, directory = console(), resolved.config.run.dir
    terminal.print("evaluating the kept snapshots on the held-out prompts")
    if not evaluate_in_child(resolved.config, arguments, stop):
        return
    rows = read_json_lines(directory / EVALUATIONS_FILE)
    picture = draw(directory, title=resolved.config.run.name)
    terminal.print(f"held-out greedy accuracy: {rows[0]['accuracy']:.1%} before, {rows[-1]['accuracy']:.1%} after")
    terminal.print(f"picture: {picture}", soft_wrap=True)


@app.command("eval")
def evaluate(
    file: File = None,
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
    resolved = resolve(one_file(file, config), sets, {"search.gpus": "cpu" if cpu else None})
    start_process("eval", level="WARNING", drains=False)
    rows = _evaluate(resolved, snapshot, every=every)
    if as_json:
        print_json(rows)
    else:
        print_table(["version", "step", "accuracy", "reward", "prompts"], rows)


def _evaluate(resolved: "Resolved", snapshot: Path | None, *, every: bool) -> list[dict[str, Any]]:
    """Evaluate, and append the results to the run's eval.jsonl."""
    from tba.common.devices import CPU, choose_gpus, list_gpus, pin

    if (device := resolved.config.search.gpus) != CPU:
        pin(choose_gpus(device, list_gpus(), "search.gpus", "--cpu")[: resolved.config.search.tensor_parallel])
        device = "cuda"
    need("torch", "train")
    from dataclasses import asdict

    from tba.deploy.picture import record_evaluations
    from tba.searcher.evaluate import evaluate_snapshots

    config = resolved.config
    rows = []
    for result in evaluate_snapshots(config, snapshot, every=every, device=device):
        rows.append(asdict(result))
        record_evaluations(config.run.dir, rows[-1:])
    return rows


@app.command()
def plot(file: File = None, config: ConfigFile = None, sets: Assignments = None) -> None:
    """Draw reward, held-out accuracy and staleness of a run as run.png."""
    resolved = resolve(one_file(file, config), sets)
    from tba.deploy.picture import draw

    typer.echo(draw(resolved.config.run.dir, title=resolved.config.run.name))


# ---------------------------------------------------------------- looking


@app.command()
def status(file: File = None, config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Who is connected, at which weights, and who waits for what."""
    resolved = resolve(one_file(file, config), sets)
    from tba.common.client import BufferClient
    from tba.common.wire import GetStatus, Status
    from tba.deploy.display import clients_table, explain

    client = BufferClient(resolved.config.buffer.address, role="monitor", name="status")
    try:
        answer, _ = client.call(GetStatus(), Status, deadline_seconds=3.0)
    finally:
        client.close()
    if as_json:
        return print_json({**answer.model_dump(), "explanation": explain(answer)})
    terminal = console()
    address = resolved.config.buffer.address
    terminal.print(f"run {answer.run_name} at {address}: {explain(answer)}", highlight=False, soft_wrap=True)
    terminal.print(clients_table(answer))
    return None


@config_app.command("show")
def config_show(file: File = None, config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Every value with its origin."""
    resolved = resolve(one_file(file, config), sets)
    from tba.common.config_layers import fields, value_of

    values = resolved.config
    rows = [{"key": key, "value": value_of(values, key), "origin": resolved.origin(key)} for key, _ in fields()]
    if as_json:
        return print_json(rows)
    return print_table(["key", "value", "origin"], rows)


@config_app.command("check")
def config_check(file: File = None, config: ConfigFile = None, sets: Assignments = None) -> None:
    """Exit 0 if the configuration is valid, what it names is there and a task of one's own loads; 78 with one sentence
    if not."""
    resolved = resolve(one_file(file, config), sets)
    from tba.common.paths import check_paths

    for sentence in check_paths(resolved.config):
        note(sentence)
    if resolved.config.task.is_own:
        from tba.common.process import die_with_parent
        from tba.searcher.tasks import load_task

        die_with_parent()  # `tba run` checks so
        load_task(resolved.config.task)
    typer.echo(f"ok: run {resolved.config.run.name} in {resolved.config.run.dir}")


@app.command()
def doctor(file: File = None, config: ConfigFile = None, sets: Assignments = None, as_json: Json = False) -> None:
    """Check this machine: packages, GPUs, disk, address, model, task, reward model."""
    resolved = resolve(one_file(file, config), sets)
    from tba.deploy.doctor import examine
    from tba.searcher.tasks import load_task

    findings = examine(resolved.config, load_task, _check_reward_model)
    if as_json:
        print_json(findings)
    else:
        print_table(["check", "result", "detail"], findings)
    if any(finding["result"] == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


# ---------------------------------------------------------------- helpers


def _check_reward_model(section: "RewardModelSection") -> str:
    """What the reward model is. Imports torch, which a machine without a reward model need not have."""
    need("torch", "train")
    need("transformers", "train")
    from tba.searcher.reward_model_files import check_files

    return check_files(section)


def _pass_on(file: Path | None, sets: Sequence[str] | None) -> list[str]:
    """The options that make a child resolve the same configuration."""
    return [*(["--config", str(file)] if file else []), *_assignments(sets)]


def _assignments(sets: Sequence[str] | None) -> list[str]:
    return [part for assignment in sets or [] for part in ("--set", assignment)]
