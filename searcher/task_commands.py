"""The commands `tba task`: write a task, check it, and see how it scores. Slow imports are in their bodies."""

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common.errors import EXIT_FAILED, TaskError, UsageError
from tba.common.terminal import ConfigFile, ConfigOptions, Json, Sets, print_json, print_table, start_process

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.searcher.tasks.task import Prompt, Task

app = typer.Typer(no_args_is_help=True, help="Tasks: write one of your own, check it, and see how it scores.")

_Named = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK",
        help="A task as in task.name, such as my_task.py, or a TOML file; by default that of the configuration.",
        show_default=False,
    ),
]
_TEXT_CHARACTERS = 500
_SHOWN_PROMPTS = 3


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the task: lower-case letters, digits and _.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to write NAME.py.")] = Path(),
) -> None:
    """Write NAME.py: a commented task that runs, to be changed."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UsageError(f"{name!r} is no name for a task: use lower-case letters, digits and _, such as word_problems")
    file = directory / f"{name}.py"
    if file.exists():
        raise UsageError(f"{file} exists: choose another name, or delete it")
    if name in sys.stdlib_module_names or find_spec(name):
        raise UsageError(
            f"{name} is a module of Python or of a package, which {file} would hide from programs next to it: choose "
            f"another name, such as {name}_task"
        )
    template = Path(__file__).with_name("tasks") / "template.py"
    kind = "".join(part.capitalize() for part in name.split("_"))
    text = template.read_text(encoding="utf-8").replace("class Template", f"class {kind}")
    text = text.replace('name = "template"', f'name = "{name}"')
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}: choose another --dir") from error
    typer.echo(f"wrote {file}; check it with: tba task check {file}")


@app.command()
def check(
    task: _Named = None,
    config: ConfigFile = None,
    sets: Sets = None,
    responses: Annotated[
        list[str] | None, typer.Option("--response", "-r", help="Show how this response is scored; may be repeated.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", "-n", min=1, help="Show as many prompts and the scores of their answers.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Show the prompt with this key.")] = None,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show held-out prompts.")] = False,
    as_json: Json = False,
) -> None:
    """Try a task: types, the same prompts and rewards in every process, errors, speed, and a rendered prompt.

    With --response, --prompts, --key or --held-out it shows prompts and scores instead, without limits.
    """
    settings, loaded, seconds = _load(ConfigOptions.of(None, config, sets), task)
    if responses or prompts or key is not None or held_out:
        rows = _scored(loaded, responses, key, prompts or _SHOWN_PROMPTS, held_out=held_out)
        return print_json(rows) if as_json else print_table(list(rows[0]), rows)
    from tba.searcher.task_check import check as findings_of

    findings = list(findings_of(settings, loaded, seconds))
    if as_json:
        print_json(findings)
    else:
        print_table(["check", "result", "detail"], findings)
    if any(finding["result"] == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)
    return None


def _scored(
    task: "Task", responses: list[str] | None, key: str | None, count: int, *, held_out: bool
) -> list[dict[str, Any]]:
    """Return a row for each response to each prompt; without responses, for the prompt's answer."""
    prompts = task.held_out() if held_out else task.prompts()
    chosen = [prompt for prompt in prompts if key is None or prompt.key == key][:count]
    if not chosen:
        raise UsageError(f"task {task.name} has no such prompt: leave out --key, or --held-out")
    return [_row(task, prompt, text) for prompt in chosen for text in (responses or [prompt.answer])]


def _load(options: ConfigOptions, named: str | None) -> "tuple[Config, Task, float]":
    """Return the configuration, the task that is named or configured, and the seconds that it took to load."""
    import time

    if named is not None and named.endswith(".toml"):
        options, named = replace(options, file=Path(named)), None
    resolved = options.resolve({"task.name": named})
    config = resolved.config
    start_process("task", level="ERROR", drains=False)
    from tba.searcher.tasks import load_task

    begin = time.monotonic()
    try:
        return config, load_task(config.task), time.monotonic() - begin
    except TaskError as error:
        if named is None or not config.task.options or not re.search(r"task\.options|has no option", str(error)):
            raise
        origin = resolved.origin("task.options")
        raise TaskError(f"{error}; task.options are set by {origin}: -c FILE names another configuration") from error


def _row(task: "Task", prompt: "Prompt", response: str) -> dict[str, Any]:
    from tba.searcher.scoring.scoring import score
    from tba.searcher.tasks.task import Reward, has_environment

    if has_environment(task, prompt):
        scored: tuple[Reward, str | None] = Reward(0.0, {}), "episodes: tba generate --play"
    else:
        scored = score(task, prompt, response, finished=True)
    reward, error = scored
    text = prompt.text or "\n".join(f"{role}: {content}" for role, content, *_ in prompt.messages)
    return {
        "key": prompt.key,
        "prompt": text[:_TEXT_CHARACTERS],
        "response": response[:_TEXT_CHARACTERS],
        "reward": reward.total if error is None else error,
        "parts": ", ".join(f"{name} {value:g}" for name, value in reward.parts.items()),
    }
