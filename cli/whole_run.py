"""The commands `tba init` and `tba run`: write a configuration, and run buffer, searchers and trainer of one."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common.errors import EXIT_INTERRUPTED, ConfigError, UsageError
from tba.common.terminal import (
    DEFAULT_FILE,
    Assume,
    ConfigFile,
    ConfigOptions,
    FileArgument,
    Sets,
    console,
    not_both,
    note,
    own_command,
    print_columns,
    print_table,
    start_process,
)

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.system.devices import Gpu
    from tba.common.system.process import StopSignal
    from tba.deploy.child import Child

app = typer.Typer()


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = DEFAULT_FILE,
    model: Annotated[str | None, typer.Option(help="A model directory or a hub id.")] = None,
    task: Annotated[str | None, typer.Option(help="A built-in task, or the file of your own.")] = None,
    train_data: Annotated[str | None, typer.Option(help="answers, gsm8k, math: a file or a hub id.")] = None,
    test_data: Annotated[str | None, typer.Option(help="answers, gsm8k, math: the held-out file.")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="SEARCH:TRAIN", help="GPUs of searchers and trainer, such as 0-6:7.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Everything on the CPU.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the run; its directory is runs/NAME.")] = None,
) -> None:
    """Write a commented tba.toml from a few answers, and check it. Options answer instead of questions."""
    not_both(cpu, gpus is not None, "--cpu", "--gpus")
    from tba.deploy.new_configuration import write_configuration

    write_configuration(file, model, task, (train_data, test_data), "cpu" if cpu else gpus, name)
    typer.echo(f"wrote {file}. What a run would do:\n")
    try:
        _dry_run(ConfigOptions(None if file == DEFAULT_FILE else file, []))
    except ConfigError as error:
        raise ConfigError(f"{error}\n{file} is written: correct it, then try `tba run {file} --dry-run`") from error
    typer.echo(f"\nstart it with: tba run {file}")


@app.command()
def run(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in run.dir.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show processes and what tba doctor finds; start and write nothing.")
    ] = False,
    assume: Assume = None,
) -> None:
    """Run buffer, searchers and trainer on this machine, with one live display."""
    options = ConfigOptions.of(file, config, sets)
    if dry_run:
        return _dry_run(options, resume=resume, assume=assume)
    if assume:
        raise UsageError("--assume is for --dry-run: a run uses the GPUs of this machine")
    from tba.buffer.store.starts import resolve_start

    resolved = resolve_start(options)
    stop = start_process("", level="WARNING")
    _check_start(resolved.config, options, stop, resume=resume)
    if not stop():
        if resume:
            _print_changes(resolved.config)
        _launch(resolved.config, options, stop, resume=resume)
    if stop.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    return None


def _check_start(config: "Config", options: ConfigOptions, stop: "StopSignal", *, resume: bool) -> None:
    """Raise TbaError for a run that would fail later, before anything of it is created. Returns early if `stop()`."""
    from tba.cli.checks import Plan, check_start
    from tba.common.config.paths import hub_data
    from tba.common.run_status import check_address
    from tba.deploy.launcher import check_task_in_child, download_models
    from tba.deploy.run_directory import await_previous
    from tba.searcher.build import check_number_of_prompts
    from tba.trainer.preflight.before_start import check_memory

    await_previous(config, stop, note)
    if stop():
        return
    check_start(Plan(config, resume=resume, starts=True))
    check_address(config)
    with stop.exits_immediately(interrupted=EXIT_INTERRUPTED):
        download_models(config, note)
    check_memory(config)
    # A task of code is loaded as the searchers will do, one of files here unless its data is to be downloaded.
    if config.task.checked_by_loading:
        check_task_in_child(config, options.arguments(), stop)
    elif not hub_data(config.task):
        check_number_of_prompts(config)


def _print_changes(config: "Config") -> None:
    from tba.buffer.store.starts import changes_since_last_start

    changes = changes_since_last_start(config)
    print_columns(("setting", "last start", "now"), changes) if changes else typer.echo("no setting has changed")


def _launch(config: "Config", options: ConfigOptions, stop: "StopSignal", *, resume: bool) -> None:
    """Run all roles to the end of the run or until `stop()`, and print how to continue."""
    from tba.common.config.layers import secrets_of
    from tba.common.run_snapshots import MEMORY, weights_directory
    from tba.common.weights.node_store import clear
    from tba.deploy.display import Display
    from tba.deploy.launcher import Launcher, evaluate_at_end
    from tba.deploy.run_directory import holds_run, resume_command, sole_launcher

    terminal = console()
    with sole_launcher(config):
        launcher = Launcher(config, options.arguments(), resume=resume)
        if launcher.run(stop, Display(terminal, steps=config.train.steps)):
            if config.eval.at_end:
                evaluate_at_end(config, options.arguments(), stop, terminal)
            # No searcher asks for the weights of a finished run.
            clear(weights_directory(config))
        else:
            again = shlex.join([*own_command(), "run", *options.arguments(option=False)])
            resumed = resume_command(config.run.dir, secrets=secrets_of(config))
            how = f"continue with: {resumed}" if resume or holds_run(config) else f"start again with: {again}"
            terminal.print(f"stopped; {how}", soft_wrap=True, highlight=False)
            if (kept := weights_directory(config)).is_relative_to(MEMORY) and kept.exists():
                free = shlex.join(["rm", "-r", str(kept)])
                terminal.print(f"the newest weights stay in memory for that; to free it: {free}", soft_wrap=True)
        terminal.print(f"everything is in {config.run.dir}", soft_wrap=True)


def _dry_run(options: ConfigOptions, *, resume: bool = False, assume: str | None = None) -> None:
    """Print processes and checks of a run, `assume` for another node. Raises ConfigError if it would not start."""
    from tba.buffer.store.starts import resolve_start

    config = resolve_start(options).config
    from tba.cli.checks import COLUMNS, Finding, Plan, as_rows, examine
    from tba.common.errors import TbaError
    from tba.common.system.devices import assumed_gpus

    plan = Plan(config, assumed_gpus(assume) if assume else None, resume=resume, starts=True)
    findings, processes = examine(plan), []
    if resume and config.database.is_file():
        _print_changes(config)
    try:
        processes = _processes(config, options.arguments(), resume=resume, assumed=plan.assumed)
    except TbaError as error:
        if not any(str(error) in finding.detail for finding in findings):
            findings.append(Finding("processes", "fail", str(error), error))
    print_table(["process", "device", "command"], processes)
    print_table(COLUMNS, as_rows(findings))
    failed = {finding.check: finding.detail for finding in findings if finding.result == "fail"}
    if failed:
        elsewhere = "; --assume 8x80 describes the run on another node" if "gpus" in failed and not assume else ""
        reasons = "".join(f"\n{detail}" for detail in dict.fromkeys(failed.values()))
        raise ConfigError(f"this run would not start: {', '.join(failed)} (nothing was started{elsewhere}){reasons}")
    unchecked = [finding.check for finding in findings if finding.result == "unchecked"]
    typer.echo("this run would start" + (f"; not checked: {', '.join(unchecked)}" if unchecked else ""))


def _processes(
    config: "Config", arguments: Sequence[str], *, resume: bool, assumed: "Sequence[Gpu] | None"
) -> list[dict[str, str]]:
    """Return processes, devices and commands, also of GPUs that do not exist. Raises UsageError for a wrong list."""
    from tba.common.system.devices import Gpu, list_gpus, nominal_gpus
    from tba.deploy.launcher import children_of

    named = nominal_gpus(config.search.gpus, config.train.gpu, config.eval.gpu)
    # Of GPUs only the names count here: what they hold now is a matter of the checks.
    present = [Gpu(gpu.index, gpu.uuid) for gpu in assumed or list_gpus()] or named
    roles = children_of(config, arguments, resume=resume, present=present)
    share = f", {config.search.gpu_memory_utilization:.0%} of its memory" if config.search.engine == "vllm" else ""
    engines = [(child, _device(child, share)) for child in [*roles.searchers, *roles.evaluators]]
    rows = [(roles.buffer, "CPU"), *engines, (roles.trainer, _device(roles.trainer))]
    program = own_command()
    return [
        {"process": child.name, "device": device, "command": shlex.join([*program, *child.arguments])}
        for child, device in rows
    ]


def _device(child: "Child", share: str = "") -> str:
    from tba.common.system.devices import CPU

    if child.gpus != CPU:
        behind = ", ".join(engine.name for engine in child.behind)
        return f"GPU {child.gpus}{share}{f', when {behind} is ready' if behind else ''}"
    return f"CPU, cores {','.join(map(str, child.cores))}" if child.cores else "CPU"
