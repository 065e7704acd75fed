"""The `tba` command.

A command imports what it needs in its body: `tba --help` loads no role and none of their libraries.
"""

import faulthandler
import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tba
from tba.buffer import for_commands
from tba.buffer.commands import app as buffer_app
from tba.common.errors import EXIT_FAILED, EXIT_INTERRUPTED, TbaError, UsageError, as_missing_extra
from tba.common.system.process import SAFE_PATH, StopSignal
from tba.common.terminal import (
    Assume,
    ConfigOptions,
    Json,
    console,
    discard_output,
    need,
    not_both,
    note,
    own_command,
    print_json,
    print_table,
    start_process,
    with_config,
)
from tba.deploy.commands import doctor_command, plot, runs_command, status_command
from tba.deploy.init_command import init_command
from tba.deploy.keys_commands import app as keys_app
from tba.searcher.commands import eval_command, generate_command
from tba.searcher.task_commands import app as task_app
from tba.trainer.commands import Resume, choose_device, export_model, is_first_rank, sft_command
from tba.ui.commands import app as ui_app

if TYPE_CHECKING:
    from tba.buffer.offline.recorded_run import RecordedRun
    from tba.common.config import Config
    from tba.common.config.layers import Resolved
    from tba.deploy.doctor import Checks

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement-learning post-training of language models.",
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration: show every value with its origin, or check it.")
app.add_typer(buffer_app, name="buffer")
app.add_typer(config_app, name="config")
app.add_typer(ui_app)
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


# ---------------------------------------------------------------- the roles


@app.command()
@with_config
def search(
    options: ConfigOptions,
    gpus: Annotated[str | None, typer.Option(help="One searcher per GPU: 0-6, 0,2,4, UUIDs, all.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs per searcher.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Number of searchers on the CPU, instead of GPUs.")] = None,
    evaluates: Annotated[
        bool, typer.Option("--eval", help="Evaluate kept snapshots on the held-out prompts instead; deliver nothing.")
    ] = False,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Generate and score responses until the run is finished."""
    not_both(cpu is not None, gpus is not None, "--cpu", "--gpus")
    flags = {"search.gpus": "cpu" if cpu else gpus, "search.cpu_searchers": cpu}
    resolved = options.resolve_start({**flags, "search.tensor_parallel": tensor_parallel})
    from tba.common.system.devices import CPU, label, pin
    from tba.deploy.fleet import searcher_groups

    search = resolved.config.search
    if search.gpus == CPU:
        if evaluates or search.cpu_searchers == 1:
            return _search_here(resolved, CPU, f"cpu{index}", evaluates=evaluates)
        return _search_in_children(resolved, options.arguments())
    groups = searcher_groups(resolved.config, "--cpu 1")
    if evaluates and len(groups) > 1:
        raise UsageError("--eval runs one engine: name its GPU, such as --gpus 7")
    if len(groups) > 1:
        return _search_in_children(resolved, options.arguments())
    pin(groups[0])
    return _search_here(resolved, "cuda", label(groups[0]), evaluates=evaluates)


def _search_here(resolved: "Resolved", device: str, label: str, *, evaluates: bool) -> None:
    stop = start_process(f"eval-{label}" if evaluates else f"search-{label}", gpu=label)
    # torch reads it when it is loaded. OpenMP threads that spin while they wait for each other become many times slower
    # as soon as another thread, such as the one that prepares weights, runs on one of their cores (docs/vllm.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if evaluates:
        from tba.searcher.evaluation.follower import follow as run_searcher
    else:
        from tba.searcher.run import search as run_searcher

    run_searcher(resolved.config, device=device, label=label, stop=stop)


def _search_in_children(resolved: "Resolved", arguments: Sequence[str]) -> None:
    from tba.common.config.paths import check_data
    from tba.common.weights.model_files import check_model

    # Checked once, so that not every child reports the same error.
    check_model(resolved.config.model.path)
    check_data(resolved.config.task)
    stop = start_process("search")
    from tba.deploy.fleet import Fleet

    Fleet(resolved.config, arguments).run(stop)


@app.command()
@with_config
def train(
    options: ConfigOptions,
    gpu: Annotated[
        str | None, typer.Option("--gpu", "--gpus", help="The trainer's GPU; several (6,7 or 4-7) train together.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes that train together on the CPU.")] = None,
    resume: Resume = False,
    buffer: Annotated[Path | None, typer.Option(help="Offline: the database of a recorded run.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Train on --buffer, without a server or searchers.")
    ] = False,
    as_of: Annotated[
        int | None, typer.Option(min=0, help="Offline: use only what existed when this step's batch was sampled.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Offline: train on the batches of the recorded run.")
    ] = False,
    source_run: Annotated[str | None, typer.Option(help="Offline: name of the run, if the file holds several.")] = None,
) -> None:
    """Train on the data of the buffer and publish weights; with --offline, on a recorded run."""
    not_both(cpu, gpu is not None, "--cpu", "--gpu")
    recorded = _recorded_run(buffer, offline=offline, as_of=as_of, replay=replay, source_run=source_run)
    resolved = options.resolve_start({"train.gpu": "cpu" if cpu else gpu, "train.processes": processes})
    from tba.common.weights.model_files import local_model
    from tba.deploy.drain import trainer_drain_seconds
    from tba.searcher.checks import with_reward_floor

    need("torch", "train")
    config = with_reward_floor(resolved.config)
    # Checked before anything is loaded or created. A trainer needs no tokenizer.
    local_model(config.model.path)
    for_commands.refuse_other_work(config)
    device, count = choose_device(config)
    stop = start_process("train", level="INFO" if is_first_rank() else "ERROR")
    stop.drain_seconds = trainer_drain_seconds(config)
    if count > 1:
        return _train_together(config, count, stop)
    from tba.trainer.loop import train as run_trainer

    last_step = recorded.step if recorded and replay else None
    run_trainer = partial(run_trainer, config, resume=resume, device=device, stop=stop, last_step=last_step)
    # Only rank 0 talks to the buffer.
    if recorded is None or not is_first_rank():
        return run_trainer()
    from tba.buffer.offline.offline_buffer import train_offline

    return train_offline(config, recorded, run_trainer, replay=replay, origins=resolved.origins)


def _recorded_run(
    file: Path | None, *, offline: bool, as_of: int | None, replay: bool, source_run: str | None
) -> "RecordedRun | None":
    """Return the recorded run to train on, None to train online."""
    if not offline:
        only_offline = {"--buffer": file, "--as-of": as_of, "--replay": replay or None, "--source-run": source_run}
        for name, given in only_offline.items():
            if given is not None:
                raise UsageError(f"{name} needs --offline")
        return None
    if file is None:
        raise UsageError("--offline needs --buffer FILE: the database of a recorded run")
    from tba.buffer.offline.recorded_run import read_recorded_run

    return read_recorded_run(file, run=source_run, as_of=as_of)


def _train_together(config: "Config", count: int, stop: StopSignal) -> None:
    """Run this command as several ranks."""
    from tba.deploy.rank_launcher import train_together

    train_together(config, sys.argv[1:], count, stop)


app.command()(sft_command(_train_together))


# ---------------------------------------------------------------- a whole run


@app.command()
@with_config
def run(
    options: ConfigOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in run.dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show processes and what tba doctor finds; start and write nothing.")
    ] = False,
    assume: Assume = None,
) -> None:
    """Run buffer, searchers and trainer on this machine, with one live display."""
    if dry_run:
        _dry_run(options, resume=resume, assume=assume)
        return
    if assume:
        raise UsageError("--assume is for --dry-run: a run uses the GPUs of this machine")
    resolved = options.resolve_start()
    stop = start_process("", level="WARNING")
    from tba.deploy.launcher import check_start, check_task, download_models
    from tba.deploy.run_directory import await_previous
    from tba.searcher.checks import check_number_of_prompts
    from tba.trainer.preflight.before_start import check_memory

    await_previous(resolved.config, stop, note)
    if not stop():
        check_start(resolved.config, for_commands.read_results, for_commands.refuse_other_work, resume=resume)
        with stop.exits_immediately(interrupted=EXIT_INTERRUPTED):
            download_models(resolved.config, note)
        check_memory(resolved.config)
        check_task(resolved.config, options.arguments(), stop, check_number_of_prompts)
    if not stop():
        _launch(resolved, options, stop, resume=resume)
    if stop.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _dry_run(options: ConfigOptions, *, resume: bool = False, assume: str | None = None) -> None:
    from tba.deploy.dry_run import describe

    config, arguments = options.resolve_start().config, options.arguments()
    describe(
        config,
        arguments,
        _checks(),
        for_commands.read_results,
        for_commands.refuse_other_work,
        resume=resume,
        assume=assume,
    )


app.command("init")(init_command(_dry_run))


def _launch(resolved: "Resolved", options: ConfigOptions, stop: StopSignal, *, resume: bool) -> None:
    """Run all roles to the end of the run or until `stop()`, and print how to continue."""
    from tba.common.run_snapshots import MEMORY, weights_directory
    from tba.common.weights.node_store import clear
    from tba.deploy.display import Display
    from tba.deploy.launcher import Launcher, evaluate_at_end
    from tba.deploy.run_directory import holds_run, sole_launcher

    config, terminal = resolved.config, console()
    command = shlex.join([*own_command(), "run", *options.arguments(option=False)])
    with sole_launcher(config, command):
        launcher = Launcher(config, options.arguments(), resume=resume)
        if launcher.run(stop, Display(terminal, steps=config.train.steps)):
            if config.eval.at_end:
                evaluate_at_end(config, options.arguments(), stop, terminal)
            # No searcher asks for the weights of a finished run.
            clear(weights_directory(config))
        else:
            how, flag = ("continue", " --resume") if resume or holds_run(config) else ("start again", "")
            terminal.print(f"stopped; {how} with: {command}{flag}", soft_wrap=True, highlight=False)
            if (kept := weights_directory(config)).is_relative_to(MEMORY) and kept.exists():
                free = shlex.join(["rm", "-r", str(kept)])
                terminal.print(f"the newest weights stay in memory for that; to free it: {free}", soft_wrap=True)
        terminal.print(f"everything is in {config.run.dir}", soft_wrap=True)


app.command("eval")(eval_command(for_commands.store_evaluation, for_commands.as_evaluated, for_commands.read_wrong))


@contextmanager
def _model_directory(config: "Config", source: Path) -> Iterator[Path]:
    from tba.trainer.export import complete_directory

    with complete_directory(source, config) as directory:
        yield directory


app.command("generate")(generate_command(_model_directory, partial(for_commands.as_recorded, evaluates=False)))
app.command("export-model")(export_model)
app.command()(plot)


# ---------------------------------------------------------------- inspection


app.command()(status_command(for_commands.read_results))
app.command()(runs_command(for_commands.read_results))


@config_app.command("show")
@with_config
def config_show(options: ConfigOptions, as_json: Json = False) -> None:
    """Show every value with its origin."""
    resolved = options.resolve()
    from tba.common.config.layers import fields, value_of

    values = resolved.config
    rows = [{"key": key, "value": value_of(values, key), "origin": resolved.origin(key)} for key, _ in fields()]
    if as_json:
        return print_json(rows)
    for row in rows:
        # As in the file: TOML writes truth values and lists as JSON does.
        row["value"] = json.dumps(row["value"]) if isinstance(row["value"], bool | tuple) else row["value"]
    return print_table(["key", "value", "origin"], rows)


@config_app.command("check")
@with_config
def config_check(options: ConfigOptions) -> None:
    """Check that the configuration is valid, its files exist, and the task loads with prompts that fit batch and
    context. The exit code is 0, or 78 with one sentence, and 2 without a configuration."""
    config = options.resolve_start().config
    from tba.common.config.paths import check_hub_models, check_paths, hub_data

    for sentence in check_paths(config) + check_hub_models(config):
        note(sentence)
    if config.task.checked_by_loading or not hub_data(config.task):
        from tba.common.system.process import die_with_parent
        from tba.searcher.checks import check_task_and_prompts

        # `tba run` starts this command as a child to check the task.
        die_with_parent()
        if warning := check_task_and_prompts(config):
            note(warning)
    typer.echo(f"ok: run {config.run.name} in {config.run.dir}")


def _checks() -> "Checks":
    from tba.deploy.doctor import Checks
    from tba.searcher.checks import check_reward_model, check_task_and_prompts
    from tba.trainer.preflight.before_start import model_parameters, trainer_memory

    return Checks(check_task_and_prompts, check_reward_model, trainer_memory, model_parameters)


app.command()(doctor_command(_checks))
