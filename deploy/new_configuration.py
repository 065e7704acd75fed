"""The configuration that `tba init` writes, from the answers to a few questions."""

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import typer
from pydantic import ValidationError

from tba.common.config import Config
from tba.common.config.task import FROM_FILES, TASKS
from tba.common.data_files import is_data_file
from tba.common.errors import HubUnavailable, MissingExtra, TbaError, UsageError, problems
from tba.common.system.devices import list_gpus
from tba.common.terminal import note
from tba.common.weights.model_files import check_hub, check_model, is_hub_name

_TEMPLATE = """\
# Written by `tba init`. `tba config show` prints every key with its value and origin, `tba run --dry-run` what a run
# would start and need. All keys: docs/configuration.md.

[run]
name = {name}
# Database, snapshots, checkpoints, metrics and logs.
dir = {dir}

[model]
# A Hugging Face model directory or a hub id. It should solve some prompts already: `tba sft` gives it a warm start.
path = {model}
dtype = {dtype}

[task]
# answers, arithmetic, calculator, gsm8k, guess, gymnasium, math, reasoning_gym, or your own file.py: docs/tasks.md.
name = {task}
{data}
[buffer]
# Train on responses of policies at most this many optimiser steps old; 0 is synchronous.
max_staleness = 6
# How often a response is trained on, on average: the trainer waits for new ones rather than exceed it, and searchers
# that are far ahead wait too. In three tasks 2 reached what "unbounded" does, with up to two thirds fewer tokens
# generated: docs/evidence.md, "Reuse".
samples_per_insert = 2
# Equal responses to a prompt count each: of short ones, only repeats show how likely each is.
dedup = false

[search]
# vllm, or transformers, which needs no GPU.
engine = {engine}
gpus = {search_gpus}
# Responses to each prompt, and the longest response in tokens.
samples_per_prompt = 8
max_tokens = {max_tokens}

[objective]
# For reward, also from stale responses; "tb" is for diverse answers in proportion to reward: docs/objectives.md.
name = "tb_stale"

[train]
gpu = {train_gpu}
steps = 200
# A batch has this many prompts, with this many responses each.
prompts_per_step = 16
samples_per_prompt = 8
# 1e-6 to 1e-5 for models of 1 B parameters and more.
learning_rate = {learning_rate}
schedule = "constant"
warmup_steps = 5
# Strength of the KL term: a small beta lets the policy move further from the model that it started from.
beta = 0.05
beta_final = 0.05
# Snapshots that stay, for the curve of `tba eval --all`.
keep_snapshot_every = 20

[eval]
# Evaluate the kept snapshots when training is done, and draw the run.
at_end = true
"""


def write_configuration(
    file: Path,
    model: str | None,
    task: str | None,
    data: tuple[str | None, str | None],
    gpus: str | None,
    name: str | None,
) -> None:
    """Write a commented configuration from the answers; what is None is asked for on the terminal.

    `data` are the files or hub ids to train and to test on, `gpus` as SEARCH:TRAIN, or cpu. Raises UsageError for a
    file that exists or cannot be written, and for an answer that no configuration may have.
    """
    if file.exists():
        raise UsageError(f"{file} exists: name another file, as in `tba init other.toml`, or delete it")
    model = model or _ask("Model (a directory or a hub id)", "--model", check=_check_model)
    own = f"Task ({', '.join(TASKS[:-1])}, or your own file.py)"
    task = task or _ask(own, "--task", "arithmetic", _check_task)
    lines = _data(task, *data)
    devices = _devices(gpus or _ask("GPUs, as SEARCH:TRAIN, or cpu", "--gpus", _found(), _devices))
    text = _text(model, task, lines, devices, name or Path(task.partition(":")[0]).stem)
    _check(text)
    _check_task(task)
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}: name another file") from error
    if is_hub_name(model):
        note(f"{model} is not a directory here. If you mean one, correct model.path in {file}.")


def _ask(
    question: str, option: str, default: str | None = None, check: Callable[[str], object] = lambda _: None
) -> str:
    """Ask until `check` accepts. Without a terminal, return the default, or raise UsageError if there is none."""
    while sys.stdin.isatty():
        answer = str(typer.prompt(question, default=default or "", show_default=default is not None, err=True))
        try:
            if not answer.strip():
                raise UsageError("this has no default: answer it, or press Ctrl-C to end without a file")
            check(answer)
        except TbaError as error:
            note(str(error))
        else:
            return answer
    if default is None:
        raise UsageError(f"there is no terminal to ask for the {question.partition(' ')[0].lower()}: pass {option}")
    return default


def _data(task: str, train: str | None, test: str | None) -> str:
    """Return the lines of [task] that name data."""
    if task not in FROM_FILES:
        if train or test:
            raise UsageError(
                f"task {task} brings its prompts: --train-data and --test-data are for {', '.join(FROM_FILES)}"
            )
        return ""
    train = train or _ask("Data to train on (a file or a hub id)", "--train-data", check=_check_data)
    if test is None and is_data_file(train):
        test = _ask("Held-out data, on which accuracy is measured (a file)", "--test-data", check=_check_data)
    stub = '# Of other columns than prompt and answer:\n# options = { prompt = "COLUMN", answer = "COLUMN" }\n'
    named = f"train = {_quoted(train)}\n" + (f"test = {_quoted(test)}\n" if test else "")
    return named + (stub if task == "answers" else "")


def _found() -> str:
    """Return the devices of this machine: the last GPU trains, the others search."""
    count = len(list_gpus())
    if count <= 1:
        return "0:0" if count else "cpu"
    return f"0-{count - 2}:{count - 1}" if count > 2 else "0:1"


def _devices(answer: str) -> tuple[str, str]:
    """Return search.gpus and train.gpu."""
    if answer == "cpu":
        return "cpu", "cpu"
    search, colon, train = answer.partition(":")
    if not (search and colon and train):
        raise UsageError(f"{answer}: name the GPUs of the searchers and of the trainer, such as 0-6:7, or cpu")
    return search, train


def _text(model: str, task: str, data: str, devices: tuple[str, str], name: str) -> str:
    """Return the file. A model on the CPU is small: it takes larger steps, and gives short answers."""
    is_small = devices == ("cpu", "cpu")
    text = _TEMPLATE.format(
        name=_quoted(name),
        dir=_quoted(f"runs/{name}"),
        model=_quoted(model),
        dtype=_quoted("float32" if is_small else "bfloat16"),
        task=_quoted(task),
        engine=_quoted("transformers" if is_small else "vllm"),
        search_gpus=_quoted(devices[0]),
        train_gpu=_quoted(devices[1]),
        max_tokens=32 if is_small else 512,
        learning_rate="1e-5" if is_small else "2e-6",
        data=data,
    )
    if devices[0] == devices[1] and not is_small:
        share = "# Searchers and trainer share a GPU.\ngpu_memory_utilization = 0.4\n"
        text = text.replace("# Responses to each prompt,", f"{share}# Responses to each prompt,")
    return text


def _check(text: str) -> None:
    """Raise UsageError for an answer that no configuration may have."""
    try:
        Config.model_validate(tomllib.loads(text))
    except ValidationError as error:
        field, message = problems(error)[0]
        raise UsageError(f"{'.'.join(field[:2])}: {message}; nothing was written") from error


def _check_model(model: str) -> None:
    """Raise ConfigError for a model that is neither here nor on the hub. Without a hub, say that it was not asked."""
    try:
        if not check_model(model):
            check_hub(model)
    except (HubUnavailable, MissingExtra) as error:
        note(f"not checked: {error}")


def _check_data(path: str) -> None:
    if is_data_file(path) and not Path(path).is_file():
        raise UsageError(f"{path} does not exist")


def _check_task(task: str) -> None:
    """Raise UsageError for a task that is neither built in nor a file here."""
    own = Path(task.partition(":")[0])
    if own.suffix == ".py" and not own.is_file():
        raise UsageError(f"--task {own} does not exist: `tba task new {own.stem}` writes one")
    if own.suffix != ".py" and task not in TASKS and ":" not in task:
        raise UsageError(f"--task {task} is none of {', '.join(TASKS)}, nor a file.py")


def _quoted(value: str) -> str:
    """Return a TOML string. Raises UsageError for characters that none may hold, or that are not UTF-8."""
    if not value.isprintable():
        raise UsageError(f"{value!a} has characters that cannot be printed: leave them out")
    # With escapes it is written as in JSON.
    return json.dumps(value, ensure_ascii=False)
