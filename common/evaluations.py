"""The evaluations of a run, in `eval.jsonl` of its directory: one line per snapshot, prompts and settings."""

import fcntl
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.common import run_files
from tba.common.data_files import json_lines
from tba.common.system.durable import open_lock, write_text
from tba.common.wire.messages import HeldOutResponse, PutEvaluation

# What a row has besides metrics.
_FIELDS = ("run", "version", "step", "prompts", "prompt_set", "settings", "evaluated_at", "seconds", "intervals",
    "not_measured", "responses")  # fmt: skip
# An evaluation of the same key replaces an earlier one.
KEY = ("run", "version", "prompt_set", "settings")
# With a larger share of failures, a mean says how the scorer fared and not how the model did.
_MOST_FAILED = 0.02
_REASON_CHARACTERS = 200

Row = dict[str, Any]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies an evaluation."""
    return tuple(row.get(name, "") for name in KEY)


def metrics_of(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in _FIELDS}


def represents(failed: float, total: float) -> bool:
    """Whether a mean stands for `total` rows of which this many have no score: at most 2 %."""
    return failed <= _MOST_FAILED * total


def why_not_measured(errors: Sequence[str | None], what: str = "responses") -> str:
    """Return "300 of 300 responses could not be scored: ConnectError", "" if those without an error represent all."""
    failed = Counter(error for error in errors if error is not None)
    if represents(failed.total(), len(errors)):
        return ""
    reason = failed.most_common(1)[0][0][:_REASON_CHARACTERS]
    return f"{failed.total()} of {len(errors)} {what} could not be scored: {reason}"


def is_measured(row: Row) -> bool:
    """Whether an evaluation measured all that it should; `tba eval --all` repeats one that did not."""
    return not row.get("not_measured") and represents(max(row.get("failed", 0), row.get("sampled_failed", 0)), 1)


def as_message(row: Row) -> PutEvaluation:
    """Return the message that stores an evaluation in the database."""
    fields = {name: row[name] for name in _FIELDS if name in row and name not in ("run", "intervals", "responses")}
    responses = [HeldOutResponse(**one) for one in row.get("responses", ())]
    intervals = {name: (low, high) for name, (low, high) in row["intervals"].items()}
    return PutEvaluation(**fields, metrics=metrics_of(row), intervals=intervals, responses=responses)


def read_json_lines(path: Path) -> list[Row]:
    """Return the rows of a JSON-lines file, [] if there is none. An unfinished last line is skipped."""
    return [row for _, row in json_lines(path, malformed=None)] if path.is_file() else []


def all_evaluations(directory: Path) -> list[Row]:
    """Return the rows of the file of a directory, without lines that are not evaluations."""
    return [row for row in read_json_lines(directory / run_files.EVALUATIONS) if _is_evaluation(row)]


def _is_evaluation(row: Any) -> bool:
    """Whether a value has what identifies and orders evaluations, and metrics that are numbers."""
    return (
        isinstance(row, dict)
        and {"run", "version", "step", "prompts"} <= row.keys()
        and all(isinstance(row.get(name, ""), str) for name in ("run", "prompt_set", "settings"))
        and all(isinstance(row.get(name, 0), int | float) for name in ("version", "step", "prompts", "evaluated_at"))
        and all(isinstance(value, int | float) for value in metrics_of(row).values())
        and isinstance(row.get("intervals", {}), dict)
    )


def record_evaluations(directory: Path, rows: Sequence[Row]) -> None:
    """Add evaluations to the file of a run. One of the same key is replaced, if measured only by a measured one.

    Raises ConfigError if the lock of the file cannot be opened, OSError if it cannot be written.
    """
    # `tba eval` and a searcher with --eval may add rows at the same time.
    with open_lock(directory / f".{run_files.EVALUATIONS}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        all_rows = (*all_evaluations(directory), *rows)
        merged: dict[tuple[Any, ...], Row] = {}
        for row in all_rows:
            key = key_of(row)
            if is_measured(row) or key not in merged or not is_measured(merged[key]):
                merged[key] = row
        # The responses are in the database alone.
        kept = ({name: value for name, value in merged[key].items() if name != "responses"} for key in sorted(merged))
        lines = [json.dumps(row) for row in kept]
        write_text(directory / run_files.EVALUATIONS, "\n".join(lines) + "\n")


def read_evaluations(directory: Path, run: str) -> list[Row]:
    """Return the evaluations of a run by step, those with the prompts and settings of one snapshot.

    It is the newest one that was evaluated, with the largest set of prompts, and the last settings in use.
    """
    rows = [row for row in all_evaluations(directory) if row["run"] == run]
    if not rows:
        return []
    chosen = max(rows, key=lambda row: (row["step"], row["prompts"], row.get("evaluated_at", 0.0)))
    same = [row for row in rows if key_of(row)[2:] == key_of(chosen)[2:]]
    return sorted(same, key=lambda row: (row["step"], row["version"]))
