"""Print rows and trajectories, for people and for machines."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from tba.common.errors import UsageError, format_time, quantity
from tba.common.terminal import cell, note, print_columns, print_csv, print_json_rows, print_table, printable


def print_fields(fields: dict[str, Any]) -> None:
    """Print names and values, one pair per line."""
    print_table(["", "value"], [{"": name, "value": value} for name, value in fields.items()])


def print_rows(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool, as_csv: bool) -> None:
    """Print the rows of a query. In JSON, infinite numbers, which it lacks, are text.

    Raises UsageError for two columns of the same name, of which a JSON object would lose one.
    """
    if as_json:
        if twice := [name for name, times in Counter(headings).items() if times > 1]:
            raise UsageError(f"two columns are named {twice[0]!r}, and a JSON object holds one: rename one with AS")
        finite = ([str(one) if one in (math.inf, -math.inf) else csv_value(one) for one in row] for row in rows)
        print_json_rows(dict(zip(headings, row, strict=True)) for row in finite)
    elif as_csv:
        print_csv(headings, (list(map(csv_value, row)) for row in rows))
    else:
        found = list(rows)
        print_columns(headings, found)
        if not found:
            note("no rows")


def csv_value(value: Any) -> Any:
    """Return a value for CSV: blobs in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else value


def print_csv_line(row: dict[str, Any]) -> None:
    """Print one row without headings."""
    print_csv(None, [list(row.values())])


def print_line(row: dict[str, Any]) -> None:
    """Print one trajectory on one line."""
    text = printable(row["error"] or row["text"] or "")
    tokens = quantity(row["response_tokens"], "token")
    typer.echo(
        f"{row['received_at_text']}  #{row['id']:<8} reward {cell(row['reward']):<8} v{row['policy_version']:<6} "
        f"{row['stop_reason']:<6} {tokens:>12}  {printable(row['searcher'])}  "
        f"{printable(row['prompt']):.40}: {text:.80}"
    )


def print_trajectory(known: dict[str, Any]) -> None:
    """Print one trajectory with its text and the steps that trained on it. Removes items from `known`."""
    tokens = {name: known.pop(name) for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask", "segments")}
    turns, pieces = known.pop("turns"), known.pop("pieces", [])
    texts = {name: known.pop(name) for name in ("prompt_text", "response_text", "text")}
    trained_by, references = known.pop("trained_by"), known.pop("reference_logprobs")
    runs, absent, rescored = known.pop("version_runs") or [], known.pop("no_tokens"), known.pop("rescored")
    known.pop("log_ratios")
    known.pop("received_at_text")
    fields = {name.replace("_", " "): _readable(name, value) for name, value in known.items()}
    for name, value in known["reward_parts"].items():
        fields[f"reward part {name}"] = value
    fields["metadata"] = json.dumps(known["metadata"])
    fields["versions"] = ", ".join(f"v{version} x {quantity(count, 'token')}" for version, count in runs)
    if known["policy_version"] < 0:
        fields["versions"] = "sampled by no policy of this run"
    fields |= {"turns": len(turns) or None, "contexts": len(tokens["segments"] or []) + 1 if turns else None}
    fields["masked tokens"] = (tokens["loss_mask"] or []).count(0)
    fields["sum of log-probabilities"] = sum(tokens["logprobs"]) if tokens["logprobs"] else None
    fields |= {f"rescored at v{version}": value for version, value in rescored.items()}
    fields |= {f"reference {name}": value for name, value in references.items()}
    print_fields({name: value for name, value in fields.items() if value is not None and name != "reward parts"})
    _print_text("prompt", texts["prompt_text"], tokens["prompt_ids"] if absent is None else absent)
    if pieces:
        _print_turns(turns, pieces, tokens["response_ids"], runs)
    else:
        response = tokens["response_ids"] if absent is None else absent
        _print_text("response", texts["text"] or texts["response_text"], response)
    typer.echo()
    if trained_by:
        steps = [{name: _readable(name, value) for name, value in step.items()} for step in trained_by]
        print_table(list(trained_by[0]), steps)
    else:
        typer.echo("no step has trained on it")


def _print_turns(
    turns: list[dict[str, Any]], pieces: list[dict[str, Any]], ids: list[int], runs: list[list[int]]
) -> None:
    """Print an episode piece by piece: what was sampled in a turn, and what was not."""
    numbers = {turn["start"]: number for number, turn in enumerate(turns)}
    versions = [version for version, count in runs for _ in range(count)]
    for piece in pieces:
        start, end = piece["start"], piece["start"] + piece["tokens"]
        heading = f"{quantity(piece['tokens'], 'token')}"
        if not piece["sampled"]:
            heading = f"not sampled, {heading}{', a new context' if piece['new_context'] else ''}"
        else:
            heading += " by " + ", ".join(f"v{version}" for version in dict.fromkeys(versions[start:end]))
        if (number := numbers.get(start)) is not None:
            turn = turns[number]
            parts = "".join(f", {name} {value:g}" for name, value in turn["parts"].items())
            heading = f"turn {number}, {heading} in {turn['seconds']:.3g} s, reward {turn['reward']:g}{parts}"
        _print_text(heading, piece["text"], ids[start:end])


def _readable(name: str, value: Any) -> Any:
    """Return a time in UTC for Unix seconds. Other values, and times outside the calendar, are returned unchanged."""
    if not name.endswith("_at") or value is None or (time := format_time(value, "milliseconds")) is None:
        return value
    return f"{time} UTC"


def _print_text(heading: str, text: str | None, ids: list[int] | str) -> None:
    typer.echo(f"\n{heading}:")
    if text is not None:
        typer.echo(printable(text, keep="\n\t"))
    else:
        typer.echo(ids if isinstance(ids, str) else f"token ids {ids}")
