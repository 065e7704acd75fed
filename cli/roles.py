"""The commands `tba search`, `tba train` and `tba sft`: one role each, as one process or several."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common.errors import EXIT_INTERRUPTED, UsageError
from tba.common.system.process import importing
from tba.common.terminal import (
    ConfigFile,
    ConfigOptions,
    FileArgument,
    Json,
    Sets,
    need,
    not_both,
    start_process,
    training_progress,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tba.buffer.offline.offline_buffer import RecordedRun
    from tba.common.config import Config
    from tba.common.config.layers import Resolved

app = typer.Typer()
_Gpu = Annotated[
    str | None, typer.Option("--gpu", "--gpus", help="The GPU to train on; several (6,7 or 4-7) train together.")
]
_Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")]


@app.command()
def search(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    gpus: Annotated[str | None, typer.Option(help="One searcher per GPU: 0-6, 0,2,4, UUIDs, all.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs per searcher.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, help="Number of searchers on the CPU, instead of GPUs.")] = None,
    evaluates: Annotated[
        bool, typer.Option("--eval", help="Evaluate kept snapshots on the held-out prompts instead; deliver nothing.")
    ] = False,
    index: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Generate and score responses until the run is finished."""
    options = ConfigOptions.of(file, config, sets)
    not_both(cpu is not None, gpus is not None, "--cpu", "--gpus")
    flags = {"search.gpus": "cpu" if cpu else gpus, "search.cpu_searchers": cpu}
    from tba.buffer.store.starts import resolve_start

    resolved = resolve_start(options, {**flags, "search.tensor_parallel": tensor_parallel})
    from tba.common.system.devices import CPU, label, pin
    from tba.deploy.fleet import searcher_groups

    if resolved.config.search.gpus == CPU:
        if evaluates or resolved.config.search.cpu_searchers == 1:
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
        from tba.searcher.evaluation.follower import follow

        return follow(resolved.config, device=device, label=label, stop=stop)
    from tba.searcher.loop import search as run_searcher

    return run_searcher(resolved.config, device=device, label=label, stop=stop)


def _search_in_children(resolved: "Resolved", arguments: "Sequence[str]") -> None:
    from tba.common.config.paths import check_data
    from tba.common.weights.model_files import check_model

    # Checked once, so that not every child reports the same error.
    check_model(resolved.config.model.path)
    check_data(resolved.config.task)
    stop = start_process("search")
    from tba.deploy.fleet import run_searchers

    run_searchers(resolved.config, arguments, stop)


@app.command()
def train(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    gpu: _Gpu = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Processes that train together on the CPU.")] = None,
    resume: _Resume = False,
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
    options = ConfigOptions.of(file, config, sets)
    not_both(cpu, gpu is not None, "--cpu", "--gpu")
    recorded = _recorded_run(buffer, offline=offline, as_of=as_of, replay=replay, source_run=source_run)
    from tba.buffer.store.starts import resolve_start

    resolved = resolve_start(options, {"train.gpu": "cpu" if cpu else gpu, "train.processes": processes})
    from tba.deploy.child import drain_seconds

    settings = resolved.config
    _check_training(settings)
    device, count = _choose_device(settings)
    # The first rank of each node.
    stop = start_process("train", level="INFO" if os.environ.get("LOCAL_RANK", "0") == "0" else "ERROR")
    stop.drain_seconds = drain_seconds(settings, trains=True)
    if count:
        from tba.deploy.rank_launcher import train_together

        return train_together(settings, sys.argv[1:], count, stop)
    with importing():
        from tba.trainer.loop import train as run_trainer

    last_step = recorded.step if recorded and replay else None
    run_trainer = partial(run_trainer, settings, resume=resume, device=device, stop=stop, last_step=last_step)
    # Only rank 0 talks to the buffer.
    if recorded is None or not _is_first_rank():
        return run_trainer()
    from tba.buffer.offline.offline_buffer import train_offline

    return train_offline(settings, recorded, run_trainer, replay=replay, origins=resolved.origins)


def _check_training(config: "Config") -> None:
    """Raise TbaError before anything is loaded or created."""
    from tba.buffer.store.starts import refuse_other_work
    from tba.common.weights.model_files import local_model

    need("torch", "train")
    # A trainer needs no tokenizer.
    local_model(config.model.path)
    refuse_other_work(config)


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
    from tba.buffer.offline.offline_buffer import read_recorded_run

    return read_recorded_run(file, run=source_run, as_of=as_of)


@app.command()
def sft(
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="jsonl, csv or parquet files: prompt and response, or chat messages."),
    ],
    out: Annotated[Path, typer.Option(help="The model directory to write.")],
    config: ConfigFile = None,
    sets: Sets = None,
    model: Annotated[str | None, typer.Option(help="The model to start from, instead of model.path.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="File to measure the loss on.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data; 1 by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps, instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per optimiser step.")] = 64,
    learning_rate: Annotated[float | None, typer.Option(help="Instead of sft.learning_rate.")] = None,
    gpu: _Gpu = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
    resume: _Resume = False,
    as_json: Json = False,
) -> None:
    """Train a model on prompts with given responses: the warm start of a run."""
    options = ConfigOptions.next_to(data[0], config, sets)
    not_both(cpu, gpu is not None, "--cpu", "--gpu")
    not_both(epochs is not None, steps is not None, "--epochs", "--steps")
    overrides = {"train.gpu": "cpu" if cpu else gpu, "model.path": model, "sft.learning_rate": learning_rate}
    if any(assignment.startswith("train.learning_rate=") for assignment in options.sets):
        raise UsageError("train.learning_rate is that of tba train: use --learning-rate, or --set sft.learning_rate")
    for file in [*data, *([held_out] if held_out else [])]:
        if not file.exists():
            raise UsageError(f"{file} does not exist: name a jsonl file")
    # Here too, since torch is loaded for many seconds. One rank may look after another has finished.
    if _is_first_rank() and out.exists():
        raise UsageError(f"{out} exists already: name another --out")
    plan = (data, out, held_out, epochs or 1, steps, batch_size)
    _sft(options.resolve_start(overrides).config, plan, resume=resume, as_json=as_json)


def _sft(config: "Config", plan: tuple[Any, ...], *, resume: bool, as_json: bool) -> None:
    need("torch", "train")
    device, count = _choose_device(config)
    level = "ERROR" if not _is_first_rank() else "WARNING" if as_json or sys.stderr.isatty() else "INFO"
    stop, out = start_process("sft", level=level), plan[1]
    if count:
        if as_json:
            raise UsageError(f"--json is for one process: with several read {out}.work/metrics.jsonl")
        from tba.deploy.rank_launcher import train_together

        train_together(config, sys.argv[1:], count, stop)
        return
    with importing():
        from tba.trainer.sft import Plan
        from tba.trainer.sft import sft as run_sft

    with training_progress(as_json=as_json) as report:
        finished = run_sft(config, Plan(*plan), resume=resume, device=device, stop=stop, on_step=report)
    if _is_first_rank() and not as_json:
        typer.echo(f"the model is in {out}" if finished else "stopped; the same command with --resume continues")
    if stop.interrupted and not finished:
        raise typer.Exit(EXIT_INTERRUPTED)


def _is_first_rank() -> bool:
    """Return whether this process is rank 0, also if it is the only one."""
    return os.environ.get("RANK", "0") == "0"


def _choose_device(config: "Config") -> tuple[str, int]:
    """Pin the GPUs to train on. Returns this process's device, and how many ranks it starts: 0 if it trains itself."""
    from tba.common.system.devices import CPU, choose_and_pin
    from tba.common.system.process import node_number

    rank, device, count = os.environ.get("LOCAL_RANK"), CPU, config.train.processes
    if config.train.gpu != CPU:
        device, count = f"cuda:{rank or 0}", len(choose_and_pin(config.train.gpu, "train.gpu"))
    _, nodes = (0, 1) if rank is not None else node_number()
    return device, 0 if rank is not None or count * nodes == 1 else count
