"""`tba run` with searcher and trainer on one GPU: the trainer is killed, and its repeated steps are compared."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_check.findings import Findings
from benchmarks.harness import tba
from tba.common.system.process import PARENT_VARIABLE, descendants

_ROOT = Path(__file__).resolve().parents[2]
_METRICS = ("seconds_", "tokens_per_second", "mfu", "staleness_mean", "mismatch_kl")


def run(findings: Findings, options: Any) -> None:
    """The demo, on a GPU in bfloat16, with a kill between two checkpoints."""
    folder, cuda = options.work / "run", options.device == "cuda"
    steps, every, kill_after = (20, 10, 11) if options.tiny else (80, 40, 48)
    where = {"search.gpus": "0", "train.gpu": "0", "model.dtype": "bfloat16"} if cuda else {"search.cpu_searchers": 1}
    settings = where | {"train.steps": steps, "train.checkpoint_every": every, "eval.at_end": not options.tiny}
    assignments = [f"run.dir={folder}", *(f"{key}={str(value).lower()}" for key, value in settings.items())]
    command = tba("run", str(_ROOT / "examples/arithmetic/demo.toml"), settings=assignments)
    deadline = time.monotonic() + options.limit - 10
    # tba ends with this process, also if that is killed.
    process = subprocess.Popen(command, cwd=_ROOT, env=os.environ | {PARENT_VARIABLE: str(os.getpid())})
    before = _kill_trainer(process, folder, kill_after)
    # Steps without an end tell something, too.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(deadline - time.monotonic())
    findings.check("exit code", process.poll(), 0)
    after = _lines(folder / "metrics.jsonl")
    findings.check("steps in metrics.jsonl", [row["step"] for row in after], list(range(steps)))
    _compare_repeated(findings, before, after, exact=not cuda)
    events = [line for path in sorted((folder / "logs").glob("*")) for line in _lines(path)]
    _compare_database(findings, folder / "buffer.sqlite", after, events)
    _note(findings, after, events)
    findings.note("accuracy", [[row["step"], row["accuracy"]] for row in _lines(folder / "eval.jsonl")])


def _note(findings: Findings, after: list[Any], events: list[Any]) -> None:
    """Note the medians of the later steps, the pauses of the searcher, and what was logged."""
    known = {name: [row[name] for row in after[len(after) // 3 :] if name in row] for name in after[0]}
    medians = {name: median(values) for name, values in known.items() if name.startswith(_METRICS) and values}
    findings.note("medians of the later steps", medians)
    pauses = [line["swap_pause_seconds"] for line in events if "swap_pause_seconds" in line]
    shown = [len(pauses), median(pauses), max(pauses), sum(pauses) / (after[-1]["time"] - after[0]["time"])]
    findings.note("pauses for a swap: number, median s, longest s, share of the run", shown)
    findings.note("estimate", next(line["estimate"] for line in events if line.get("event") == "memory"))
    findings.note("warnings", sorted({line["event"] for line in events if line.get("level") in ("warning", "error")}))


def _kill_trainer(process: Any, folder: Path, kill_after: int) -> list[dict[str, Any]]:
    """Wait for some steps, and kill the trainer. Returns the metrics of the steps until then."""
    while len(_lines(folder / "metrics.jsonl")) <= kill_after:
        if process.poll() is not None:
            raise RuntimeError(f"tba run ended with {process.returncode} before {kill_after} steps")
        time.sleep(0.02)
    with contextlib.closing(sqlite3.connect(f"file:{folder}/buffer.sqlite?mode=ro", uri=True)) as database:
        pids = [row[0] for row in database.execute("SELECT pid FROM senders WHERE role = 'trainer' ORDER BY id")]
    assert pids[-1] in descendants(process.pid)
    os.kill(pids[-1], signal.SIGKILL)
    return _lines(folder / "metrics.jsonl")


def _compare_repeated(findings: Findings, before: list[Any], after: list[Any], *, exact: bool) -> None:
    """Compare the steps that were made again after the kill with the first time; a step of the same time was not."""
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if old["time"] != new["time"]]
    findings.note("repeated steps", [old["step"] for old, _ in pairs])
    findings.check("steps were repeated", bool(pairs), True)
    for name, limit in (("reward_mean", 0.0), ("tokens", 0.0), ("loss", 0.05), ("grad_norm", 0.05)):
        largest = max((abs(old[name] - new[name]) / (abs(old[name]) + 1e-3) for old, new in pairs), default=0.0)
        # On a CPU they are equal bit for bit. On a GPU the difference is what is to be measured.
        findings.check(f"repeated steps: {name}, largest relative difference", largest, 0.0, 0.0 if exact else limit)


def _compare_database(findings: Findings, path: Path, steps: list[Any], events: list[Any]) -> None:
    """Compare the rows of the database with what the processes logged."""
    sent = sum(line["rows"] for line in events if line.get("event") == "left")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        for table, logged in {"trajectory_rows": sent, "batches WHERE trained_at > 0": len(steps)}.items():
            rows = database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            findings.check(f"rows of {table}, and what was logged", rows, logged)
        versions = {row[0] for row in database.execute("SELECT version FROM snapshots")}
    for event in ("snapshot published", "weights loaded"):
        named = {line["version"] for line in events if line.get("event") == event}
        findings.check(f"{event}: logged versions that the database lacks", sorted(named - versions), [])


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole JSON lines of a file, without other lines."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines() if line.startswith("{")]
