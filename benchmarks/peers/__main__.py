"""Other replay buffers on this machine, in one run: ingest, batches, memory, and what outlives SIGKILL.

    python -m benchmarks.peers [--rounds 3] [--kills 3] [--peers .venv-peers/bin/python] [--only NAME]

Each peer runs in its own processes with its own interpreter; its module says how it is set up, and worker.py what is
measured. One peer at a time; medians over the rounds. `make bench-peers` installs the peers and runs this.

The peers do not do the same work. TorchRL and the list are in the process that puts and samples: they have no
transport. Only tba syncs the disk before it confirms. Sampling differs: tba and the list draw groups by prompt, the
others rows. A kill ends the process, not the power: the kernel's page cache survives it.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import ROWS, WARM_UP
from benchmarks.table import machine

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 180
# Range of the time of a kill after the first confirmation, drawn uniformly.
KILL_AFTER_SECONDS = (2.0, 6.0)
# Time for confirmations that are on their way to a producer that outlives the server.
LAST_REPLIES_SECONDS = 0.3
# Without these a peer prints its own log over the table, or looks for an accelerator.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the table."""

    name: str
    module: str
    # The package that must be installed, and whether it is in this environment instead of that of `--peers`.
    package: str
    own: bool
    location: str
    killed: str
    saves: bool = False


MEMORY, FILE, MAPPED = "in process, RAM only", "in process, RAM + file", "in process, mapped files"
PEERS = (
    Peer("tba buffer serve", "tba_server", "tba", True, "server + SQLite, power-durable", "the server"),
    Peer("reverb", "reverb_server", "reverb", False, "server, RAM only", "the server, without a checkpoint"),
    Peer(
        "reverb, checkpoints", "reverb_server", "reverb", False, "server, RAM + files",
        "the server, a checkpoint requested each second", saves=True,
    ),
    Peer("torchrl memmap", "torchrl_memmap", "torchrl", False, MAPPED, "the process, no dumps()"),
    Peer(
        "torchrl memmap, dumps", "torchrl_memmap", "torchrl", False, MAPPED,
        "the process, dumps() into the storage's own folder each second", saves=True,
    ),
    Peer("list", "python_lists", "numpy", True, MEMORY, "the process (the paper's code never saves)"),
    Peer(
        "list, pickles", "python_lists", "numpy", True, FILE,
        "the process, the buffer pickled each second", saves=True,
    ),
)  # fmt: skip


def main() -> None:
    options = _options()
    print(machine())
    print_table([table_row(peer, options) for peer in PEERS if options.only in peer.name])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="other replay buffers against tba's")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer")
    parser.add_argument("--kills", type=int, default=3, help="SIGKILLs of each peer")
    parser.add_argument("--peers", default=ROOT / ".venv-peers/bin/python", help="the peers' interpreter")
    parser.add_argument("--only", default="", help="only peers with this text in their name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    return parser.parse_args()


def table_row(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a peer, or `error`: why there are none."""
    python = sys.executable if peer.own else str(options.peers)
    if not installed(python, peer.package):
        return {"peer": peer, "error": "not installed: make bench-peers, or requirements/bench-peers.txt"}
    try:
        figures = measure(peer, python, options.rounds)
        times = random.Random(options.seed)
        kills = [survival(peer, python, times.uniform(*KILL_AFTER_SECONDS)) for _ in range(options.kills)]
    except (subprocess.SubprocessError, OSError, WorkerFailed) as error:
        return {"peer": peer, "error": f"failed: {error}"}
    return {"peer": peer, **figures, "kills": kills}


def installed(python: str, package: str) -> bool:
    """Return whether an interpreter exists and can import a package."""
    command = [python, "-c", f"import {package}"]
    try:
        return subprocess.run(command, env=_environment(), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# ---------------------------------------------------------------- one peer


class WorkerFailed(Exception):
    """A worker ended without a result."""


def measure(peer: Peer, python: str, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds, each in a new process and folder."""
    measured = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            measured.append(run_worker(command(peer, python, "measure", folder)))
    figures = {name: statistics.median(m[name] for m in measured) for name in measured[0] if name != "versions"}
    rates = [m["rows_per_second"] for m in measured]
    return {**figures, "spread": (min(rates), max(rates)), "versions": measured[0]["versions"]}


def survival(peer: Peer, python: str, seconds: float) -> dict[str, Any]:
    """Kill the process that holds the rows while a producer writes, then open what is left and count the rows."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        confirmed = kill_while_writing(command(peer, python, "write", folder), seconds)
        found = run_worker([*command(peer, python, "count", folder), "--confirmed", str(confirmed)])
    return {"confirmed": confirmed, **found}


def kill_while_writing(worker: list[str], seconds: float) -> int:
    """Start a writer and kill its victim after that time of writing. Returns the number of confirmed rows.

    The pipe keeps what was written to it before the kill: its 64 KiB are 20 seconds at the writer's rate.
    """
    with tempfile.TemporaryFile() as errors:
        process = _start(worker, errors)
        assert process.stdout is not None
        try:
            victim = json.loads(process.stdout.readline() or "{}").get("victim")
            if victim is None:
                raise WorkerFailed(_last_line(errors))
            # The first confirmation.
            process.stdout.readline()
            time.sleep(seconds)
            os.kill(victim, signal.SIGKILL)
            time.sleep(LAST_REPLIES_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        lines = process.stdout.read().splitlines()
        process.wait()
        return max((json.loads(line)["confirmed"] for line in lines if line.endswith(b"}")), default=0)


def command(peer: Peer, python: str, mode: str, folder: str) -> list[str]:
    """Return the command of a peer's worker."""
    return [python, "-m", f"benchmarks.peers.{peer.module}", mode, folder, *(["--save"] if peer.saves else [])]


def run_worker(worker: list[str]) -> dict[str, Any]:
    """Run a worker and return the one object that it prints. Raises WorkerFailed with its last line of stderr."""
    with tempfile.TemporaryFile() as errors:
        process = _start(worker, errors)
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            raise WorkerFailed(_last_line(errors))
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _start(worker: list[str], errors: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        worker, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )


def _environment() -> dict[str, str]:
    return {**os.environ, **QUIET}


def _last_line(errors: Any) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the worker printed nothing"


# ---------------------------------------------------------------- the table

COLUMNS: tuple[tuple[str, int, Callable[[dict[str, Any]], str]], ...] = (
    ("rows/s", 8, lambda row: f"{row['rows_per_second']:.0f}"),
    ("to tba", 7, lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "-"),
    ("min-max", 14, lambda row: "-".join(f"{rate:.0f}" for rate in row["spread"])),
    ("batch ms", 9, lambda row: f"{row['batch_ms']:.1f}"),
    # Negative where a save has mapped new files: their pages only count after the next access.
    ("RSS B/row", 10, lambda row: f"{max(0, row['resident_bytes']):.0f}"),
    ("anon B/row", 11, lambda row: f"{row['anonymous_bytes']:.0f}"),
    ("file B/row", 11, lambda row: f"{row['file_bytes']:.0f}"),
    ("outlives SIGKILL", 17, lambda row: f"{_survived(row):.2%}"),
)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the figures, then what was killed and counted, then the versions."""
    own = next((row["rows_per_second"] for row in rows if row["peer"].package == "tba" and "kills" in row), None)
    print("\n4 KB trajectories (512 ids, 512 log-probabilities); 64 in a put; batches of 512; one producer")
    print(f"{'peer':22} {'where':30}" + "".join(f" {title:>{width}}" for title, width, _ in COLUMNS))
    for row in rows:
        row["ratio"] = row["rows_per_second"] / own if own and "kills" in row else None
        cells = [f" {show(row):>{width}}" for _, width, show in COLUMNS] if "kills" in row else [f" {row['error']}"]
        print(f"{row['peer'].name:22} {row['peer'].location:30}" + "".join(cells))
    print("\nSIGKILL: intact rows / rows that the API had confirmed")
    for row in filter(lambda row: "kills" in row, rows):
        counts = ", ".join(f"{kill['rows']}/{kill['confirmed']}" for kill in row["kills"])
        print(f"{row['peer'].name:22} {counts}; killed: {row['peer'].killed}{_saving(row)}{_in_files(row)}")
    print("\nversions")
    for module, versions in {row["peer"].module: row["versions"] for row in rows if "kills" in row}.items():
        print(f"{module:22} {', '.join(f'{name} {version}' for name, version in versions.items())}")


def _survived(row: dict[str, Any]) -> float:
    return sum(kill["rows"] for kill in row["kills"]) / max(1, sum(kill["confirmed"] for kill in row["kills"]))


def _saving(row: dict[str, Any]) -> str:
    return f"; one save of {WARM_UP + ROWS:,} rows takes {row['save_seconds']:.2f} s" if row["peer"].saves else ""


def _in_files(row: dict[str, Any]) -> str:
    found = [f"{kill['in_files']}/{kill['confirmed']}" for kill in row["kills"] if "in_files" in kill]
    return f"; in the bare files, which do not record how many rows are valid: {', '.join(found)}" if found else ""


if __name__ == "__main__":
    main()
