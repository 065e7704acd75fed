"""The commands on the models of a run: `tba eval`, `generate`, `export-model` and `buffer rescore`."""

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.buffer.commands import Database, Where, resolve
from tba.buffer.commands import app as buffer_app
from tba.common import run_files
from tba.common.errors import TbaError, UsageError
from tba.common.terminal import (
    ConfigFile,
    ConfigOptions,
    FileArgument,
    Json,
    Sets,
    cell,
    console,
    need,
    not_both,
    note,
    print_json,
    print_table,
    printable,
    row_progress,
    start_process,
)

if TYPE_CHECKING:
    from tba.common.config import Config

app = typer.Typer()
_COLUMNS = ("version", "step", "accuracy", "reward", "prompts", "unfinished", "failed")
# Shown as columns where they were measured.
_MORE_COLUMNS = ("accuracy_of_", "reward_of_", "pass_at_", "kl", "kl_per_token", "distinct_", "embedding_distance")


@app.command("eval")
def evaluate(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="A snapshot or model directory; by default the newest of the run.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All snapshots that the run has kept.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also those that were evaluated already.")] = False,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Show what the newest evaluation got wrong; evaluate nothing.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Evaluate on the CPU.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate snapshots on the held-out prompts. What was evaluated with these prompts and settings is only shown."""
    options = ConfigOptions.of(file, config, sets)
    of_run = snapshot is None or (options.file is not None and options.file.is_dir())
    resolve = options.resolve_run if of_run else options.resolve
    resolved = resolve({"search.gpus": "cpu" if cpu else None})
    from tba.buffer.store.starts import as_recorded, refuse_other_work

    settings = as_recorded(resolved).config
    refuse_other_work(settings, evaluates=True)
    if wrong:
        from tba.buffer.tools.record_evaluation import read_wrong

        found = read_wrong(settings.database, settings.run.name)
        headings = list(found[0]) if found else ["no stored response is wrong"]
        return print_json(found) if as_json else print_table(headings, found)
    start_process("eval", level="WARNING", drains=False)
    need("torch", "train")
    rows = _evaluate(settings, snapshot, every=every, again=again)
    if as_json:
        print_json(rows)
    else:
        headings = _headings(rows)
        _print_in_parts(headings, [dict.fromkeys(headings) | _with_intervals(row) for row in rows])
    return _check_measured(rows, snapshot)


def _evaluate(config: "Config", snapshot: Path | None, *, every: bool, again: bool) -> list[dict[str, Any]]:
    """Evaluate snapshots. Each result goes to the run's eval.jsonl and to its database as soon as it is there.

    That of a model directory is only returned.
    """
    from tba.buffer.tools.record_evaluation import record_evaluation
    from tba.common.evaluations import all_evaluations, is_measured, key_of, record_evaluations
    from tba.common.run_snapshots import is_model_directory

    device = _choose_device(config, needs_run=snapshot is None)
    from tba.searcher.evaluation.evaluator import evaluate_snapshots

    earlier = [] if again else all_evaluations(config.run.dir)
    known = {key_of(row): row for row in earlier if is_measured(row)}
    rows, stored = [], True
    with row_progress() as show:

        def report(doing: str, done: int, total: int) -> bool:
            show(doing, done, total)
            return True

        for row, is_new in evaluate_snapshots(config, snapshot, every=every, device=device, known=known, report=report):
            rows.append({name: value for name, value in row.items() if name != "responses"})
            if not (is_new or every):
                note(f"v{row['version']} is evaluated already: --again repeats it")
            # A model that is no version of the run is not in its curve.
            if is_new and not (snapshot is not None and is_model_directory(snapshot)):
                record_evaluations(config.run.dir, [row])
                if not sys.stderr.isatty():
                    note(f"v{row['version']} is evaluated, in {row['seconds']:.0f} s")
                if stored and (reason := record_evaluation(config, row)):
                    note(f"v{row['version']} and later ones are in {run_files.EVALUATIONS} alone, {reason}")
                    # Each attempt may wait for a buffer that is not there.
                    stored = False
    return sorted(rows, key=lambda row: (row["step"], row["version"]))


def _check_measured(rows: list[dict[str, Any]], named: Path | None) -> None:
    """Raise TbaError with the reasons if metrics are missing, also those of a model directory that is `named`."""
    from tba.common.run_snapshots import is_model_directory

    model = named if named is not None and is_model_directory(named) else None
    versions: dict[str, list[str]] = {}
    for row in rows:
        versions.setdefault(row.get("not_measured", ""), []).append(str(model or f"v{row['version']}"))
    versions.pop("", None)
    if versions:
        what = "; ".join(f"{', '.join(of)} not measured: {reason}" for reason, of in versions.items())
        command = f"tba eval --snapshot {model}" if model else "tba eval --all"
        raise TbaError(f"{what}; mend what fails, then `{command}` repeats this")


def _choose_device(config: "Config", *, needs_run: bool = False) -> str:
    """Return the device of one engine. On a GPU this process sees no other.

    Raises UsageError with `needs_run` if the run has no snapshots: that matters more than a GPU that is missing.
    """
    from tba.common.run_snapshots import weights_directory
    from tba.common.system.devices import CPU, choose_and_pin
    from tba.common.weights.snapshot import choose_snapshots

    if needs_run:
        choose_snapshots(config.snapshots, weights_directory(config), None, every=False)
    if config.search.gpus == CPU:
        return CPU
    choose_and_pin(config.search.gpus, "search.gpus", most=config.search.tensor_parallel)
    return "cuda"


def _headings(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of a table: those that every evaluation has, and further ones that some row has."""
    names = dict.fromkeys(name for row in rows for name in row)
    more = [name for start in _MORE_COLUMNS for name in names if name.startswith(start) and name not in _COLUMNS]
    has = [name for name in _COLUMNS if name in names or not rows]
    return list(dict.fromkeys([*has, *more]))


def _with_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for people: accuracy and reward with the ends of their intervals."""
    shown = dict(row)
    for name in ("accuracy", "reward"):
        if name in row and name in row.get("intervals", {}):
            low, high = row["intervals"][name]
            shown[name] = f"{row[name]:.4g} [{low:.4g}, {high:.4g}]"
    return shown


def _print_in_parts(headings: list[str], rows: list[dict[str, Any]]) -> None:
    """Print a table as several, one below the other, where a terminal is too narrow: each begins with the version."""
    first, *others = headings
    wide = {name: max(len(cell(value)) for value in (name, *(row[name] for row in rows))) + 2 for name in headings}
    parts, space = [[first]], console().width
    for name in others:
        if sum(wide[one] for one in (*parts[-1], name)) > space:
            parts.append([first])
        parts[-1].append(name)
    for number, part in enumerate(parts):
        typer.echo("\n" * (number > 0), nl=False)
        print_table(part, rows)


_Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; by default standard input.", show_default=False)
]


@app.command()
def generate(
    prompt: _Prompt = None,
    config: ConfigFile = None,
    sets: Sets = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A snapshot, checkpoint, run or model directory; by default the run's newest snapshot."),
    ] = None,
    version: Annotated[int | None, typer.Option(min=0, help="A snapshot that the run has kept.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation: each line is a message. Ctrl-D ends it.")
    ] = False,
    play: Annotated[
        bool, typer.Option("--play", help="Play an episode of the task: PROMPT is the key of its prompt.")
    ] = False,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, max=4096, help="Number of responses.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Instead of search.max_tokens.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Generate on the CPU.")] = False,
    as_json: Json = False,
) -> None:
    """Generate responses to a prompt with a snapshot of a run or any model."""
    options = ConfigOptions.next_to(prompt, config, sets)
    not_both(chat, samples > 1, "--chat", "--samples")
    not_both(chat, prompt is not None, "--chat", "PROMPT")
    not_both(play, chat or samples > 1 or as_json, "--play", "--chat, --samples or --json")
    if not chat and not play and prompt is None and sys.stdin.isatty():
        raise UsageError("there is no prompt: write it as an argument or to standard input, or use --chat")
    settings, device = _what_generates(options, model, cpu=cpu)
    text = prompt or ""
    if not chat and not play and prompt is None and not (text := sys.stdin.read().removesuffix("\n")):
        raise UsageError("the prompt on standard input is empty: write it there or as an argument, or use --chat")
    from tba.common.run_snapshots import held_source

    with ExitStack() as held:
        # A wrong name is found before torch is loaded, which takes many seconds.
        source = held.enter_context(held_source(settings, model, version))
        from tba.searcher.engines.engine import SamplingSettings
        from tba.searcher.generate import Generator, converse, play_one
        from tba.searcher.tasks.task import Prompt
        from tba.trainer.export import complete_directory

        directory = held.enter_context(complete_directory(source, settings))
        sampling = SamplingSettings(temperature, top_p, max_tokens or settings.search.max_tokens)
        if play:
            for who, said in play_one(settings, directory, text, sampling, device=device):
                typer.echo(printable(f"{who}: {said.strip()}", keep="\n\t"))
            return
        # On the CPU the weights are those of the file, which is mapped: it is held to the end.
        generator = held.enter_context(closing(Generator(settings, directory, device=device, chat=chat)))
        if not chat:
            _print_responses(generator.generate(Prompt("prompt", text), sampling, samples), as_json=as_json)
            return
        for reply in converse(generator, iter(sys.stdin.readline, ""), sampling):
            _print_responses([reply], as_json=as_json)


def _what_generates(options: ConfigOptions, model: Path | None, *, cpu: bool) -> tuple["Config", str]:
    """Return the configuration and the device. Raises TbaError for wrong arguments."""
    from tba.buffer.store.starts import as_recorded

    of_run = model is None or (options.file is not None and options.file.is_dir())
    resolved = (options.resolve_run if of_run else options.resolve)({"search.gpus": "cpu" if cpu else None})
    config = (as_recorded(resolved) if of_run else resolved).config
    start_process("generate", level="WARNING", drains=False)
    need("torch", "train")
    config = _with_installed_engine(config, chosen="search.engine" in resolved.origins)
    return config, _choose_device(config, needs_run=model is None)


def _with_installed_engine(config: "Config", *, chosen: bool) -> "Config":
    """Return the configuration with the Transformers engine if vLLM is the default and not installed."""
    from importlib.util import find_spec

    if config.search.engine != "vllm" or chosen or find_spec("vllm") is not None:
        return config
    note("vLLM, the default of search.engine, is not installed: generating with Transformers")
    return config.model_copy(update={"search": config.search.model_copy(update={"engine": "transformers"})})


def _print_responses(responses: Any, *, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        return print_json([asdict(one) for one in responses])
    for one in responses:
        # A model's output may contain control sequences.
        typer.echo(printable(one.text, keep="\n\t"))
    return None


@app.command()
def export_model(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, or one of its snapshots or checkpoints.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    config: ConfigFile = None,
    sets: Sets = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="A snapshot that the run has kept; by default the newest.")
    ] = None,
) -> None:
    """Write a snapshot or checkpoint as a Hugging Face model directory, with adapters merged."""
    settings = ConfigOptions.next_to(source, config, sets).resolve().config
    start_process("export", level="WARNING", drains=False)
    need("torch", "train")
    from tba.common.run_snapshots import check_export, held_source

    with held_source(settings, source, version) as found:
        # Before torch is loaded, which takes many seconds.
        check_export(found, out)
        from tba.trainer.export import export_model as export

        export(found, out, settings)
        typer.echo(f"{found} is in {out}")


@buffer_app.command()
def rescore(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    at: Annotated[int | None, typer.Option(min=0, help="A kept version; default: those that sampled.")] = None,
    where: Where = "1",
    cpu: Annotated[bool, typer.Option("--cpu", help="Score on the CPU.")] = False,
    as_json: Json = False,
) -> None:
    """Compute log-probabilities of stored responses at versions of the policy, from their snapshots. The server must be
    stopped, or --buffer name a copy; what was scored is not repeated."""
    from tba.buffer.store.starts import as_recorded

    settings = as_recorded(resolve(ConfigOptions.of(file, config, sets), buffer, exists=True)).config
    start_process("rescore", level="WARNING", drains=False)
    need("torch", "train")
    device = "cpu" if cpu or _choose_device(settings) == "cpu" else "cuda:0"
    from tba.buffer.tools.rescore import rescore as run_rescore
    from tba.trainer.export import complete_directory
    from tba.trainer.step.build import open_scorer

    def load(snapshot: Path) -> Any:
        with complete_directory(snapshot, settings) as directory:
            return open_scorer(directory, settings, device)

    with row_progress() as on_progress:
        done = run_rescore(settings, at, where, load, on_progress)
    if as_json:
        return print_json(done)
    for reason, count in done["left_out"].items():
        note(f"{count} left out: {reason}")
    return print_table(["version", "trajectories", "max_difference"], done["versions"])
