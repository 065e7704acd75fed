"""The commands `tba sft` and `tba export-model`. Slow imports are in their bodies, so that `tba --help` stays fast."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common.errors import EXIT_INTERRUPTED, UsageError
from tba.common.terminal import (
    ConfigOptions,
    Json,
    need,
    not_both,
    start_process,
    training_progress,
    with_config,
)

if TYPE_CHECKING:
    from tba.common.config import Config

Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")]


# Runs this command as several ranks: the configuration, their number, and when to stop.
Together = Callable[[Any, int, Any], None]


def sft_command(train_together: Together) -> Callable[..., None]:
    """Return the command. `train_together` is passed in, because this package does not import the launcher."""

    @with_config
    def sft(
        data: Annotated[
            list[Path],
            typer.Argument(metavar="DATA", help="jsonl, csv or parquet files: prompt and response, or chat messages."),
        ],
        out: Annotated[Path, typer.Option(help="The model directory to write.")],
        options: ConfigOptions,
        model: Annotated[str | None, typer.Option(help="The model to start from, instead of model.path.")] = None,
        held_out: Annotated[Path | None, typer.Option(help="File to measure the loss on.")] = None,
        epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data; 1 by default.")] = None,
        steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps, instead of epochs.")] = None,
        batch_size: Annotated[int, typer.Option(min=1, help="Rows per optimiser step.")] = 64,
        learning_rate: Annotated[float | None, typer.Option(help="Instead of sft.learning_rate.")] = None,
        gpu: Annotated[
            str | None,
            typer.Option("--gpu", "--gpus", help="The GPU to train on; several (6,7 or 4-7) train together."),
        ] = None,
        cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU instead.")] = False,
        resume: Resume = False,
        as_json: Json = False,
    ) -> None:
        """Train a model on prompts with given responses: the warm start of a run."""
        not_both(cpu, gpu is not None, "--cpu", "--gpu")
        not_both(epochs is not None, steps is not None, "--epochs", "--steps")
        overrides = {"train.gpu": "cpu" if cpu else gpu, "model.path": model, "sft.learning_rate": learning_rate}
        if any(assignment.startswith("train.learning_rate=") for assignment in options.sets):
            raise UsageError(
                "train.learning_rate is that of tba train: use --learning-rate, or --set sft.learning_rate"
            )
        for file in [*data, *([held_out] if held_out else [])]:
            if not file.exists():
                raise UsageError(f"{file} does not exist: name a jsonl file")
        resolved = options.resolve_start(overrides)
        plan = (data, out, held_out, epochs or 1, steps, batch_size)
        _run(resolved.config, plan, train_together, resume=resume, as_json=as_json)

    return sft


@with_config
def export_model(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, or one of its snapshots or checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    options: ConfigOptions,
    version: Annotated[
        int | None, typer.Option(min=0, help="A snapshot that the run has kept; by default the newest.")
    ] = None,
) -> None:
    """Write a snapshot or checkpoint as a Hugging Face model directory, with adapters merged."""
    config = options.resolve().config
    start_process("export", level="WARNING", drains=False)
    need("torch", "train")
    from tba.common.run_snapshots import check_export, held_source

    with held_source(config, source, version) as found:
        # Before torch is loaded, which takes many seconds.
        check_export(found, out)
        from tba.trainer.export import export_model as export

        export(found, out, config)
        typer.echo(f"{found} is in {out}")


def is_first_rank() -> bool:
    """Return whether this process is rank 0, also if it is the only one."""
    return os.environ.get("RANK", "0") == "0"


def choose_device(config: "Config") -> tuple[str, int]:
    """Pin the GPUs to train on. Returns this process's device, and how many ranks it starts: 1 if it trains itself."""
    from tba.common.system.devices import CPU, choose_and_pin

    rank, device, count = os.environ.get("LOCAL_RANK"), CPU, config.train.processes
    if config.train.gpu != CPU:
        device, count = f"cuda:{rank or 0}", len(choose_and_pin(config.train.gpu, "train.gpu"))
    return device, count if rank is None else 1


def _run(config: "Config", plan: tuple[Any, ...], train_together: Together, *, resume: bool, as_json: bool) -> None:
    need("torch", "train")
    device, count = choose_device(config)
    level = "ERROR" if not is_first_rank() else "WARNING" if as_json or sys.stderr.isatty() else "INFO"
    stop, out = start_process("sft", level=level), plan[1]
    if count > 1:
        if as_json:
            raise UsageError(f"--json is for one process: with several read {out}.work/metrics.jsonl")
        train_together(config, count, stop)
        return
    from tba.trainer.sft import Plan
    from tba.trainer.sft import sft as run_sft

    with training_progress(as_json=as_json) as report:
        finished = run_sft(config, Plan(*plan), resume=resume, device=device, stop=stop, on_step=report)
    if is_first_rank() and not as_json:
        typer.echo(f"the model is in {out}" if finished else "stopped; the same command with --resume continues")
    if stop.interrupted and not finished:
        raise typer.Exit(EXIT_INTERRUPTED)
