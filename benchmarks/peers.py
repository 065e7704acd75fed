"""Replay buffers of others, on this machine, in one run: ingest, batches, memory, and what outlives SIGKILL.

    python -m benchmarks.peers [--rounds 3] [--kills 3] [--peers .venv-peers/bin/python] [--only NAME]

Each peer runs in processes of its own (`peer_*.py`, which say how it is set up; `peer_worker.py` says what is
measured), with its own interpreter. One peer at a time; medians over the rounds. `make bench-peers` installs the
peers and runs this.

The peers do not do the same work. TorchRL and the list are in the process that puts and samples: nothing is sent
anywhere. Only tba syncs the disk before it confirms. Rules of sampling differ: tba and the list draw groups by
prompt, the others rows. A kill takes the process, not the power: what sits in the kernel's page cache survives it.
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

from benchmarks.peer_worker import ROWS, WARM_UP
from benchmarks.table import machine

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 180
KILL_AFTER = (2.0, 6.0)  # seconds after the first confirmation, drawn uniformly
# Without these a peer prints its own log over the table, or looks for an accelerator.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "NONE", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the table. `own` peers run with this interpreter, the others with that of `--peers`."""

    name: str
    module: str
    needs: str  # the module whose presence says that it is installed
    where: str
    killed: str
    saves: bool = False
    own: bool = False


PEERS = (
    Peer("tba buffer serve", "peer_tba", "tba", "server + SQLite, power-durable", "the server", own=True),
    Peer("reverb", "peer_reverb", "reverb", "server, RAM only", "the server, no checkpoint was asked for"),
    Peer(
        "reverb, checkpoints",
        "peer_reverb",
        "reverb",
        "server, RAM + files",
        "the server, a checkpoint asked for each second",
        saves=True,
    ),
    Peer("torchrl memmap", "peer_torchrl", "torchrl", "in process, mapped files", "the process, no dumps()"),
    Peer(
        "torchrl memmap, dumps",
        "peer_torchrl",
        "torchrl",
        "in process, mapped files",
        "the process, dumps() into the storage's own folder each second",
        saves=True,
    ),
    Peer("list", "peer_list", "numpy", "in process, RAM only", "the process (the paper's code never saves)", own=True),
    Peer(
        "list, pickles",
        "peer_list",
        "numpy",
        "in process, RAM + file",
        "the process, the buffer pickled each second",
        saves=True,
        own=True,
    ),
)


def main() -> None:
    options = _options()
    print(machine())
    rows = [line(peer, options) for peer in PEERS if options.only in peer.name]
    print_table(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="replay buffers of others against tba's")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each peer")
    parser.add_argument("--kills", type=int, default=3, help="SIGKILLs of each peer")
    parser.add_argument("--peers", default=ROOT / ".venv-peers/bin/python", help="the peers' interpreter")
    parser.add_argument("--only", default="", help="peers whose name has this in it")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    return parser.parse_args()


def line(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """A peer's figures, or why there are none."""
    python = sys.executable if peer.own else str(options.peers)
    if not installed(python, peer.needs):
        return {"peer": peer, "trouble": "not installed: make bench-peers, or requirements/bench-peers.txt"}
    try:
        figures = measure(peer, python, options.rounds)
        moments = random.Random(options.seed)
        kills = [survival(peer, python, moments.uniform(*KILL_AFTER)) for _ in range(options.kills)]
    except (subprocess.SubprocessError, OSError, WorkerFailed) as error:
        return {"peer": peer, "trouble": f"failed: {error}"}
    return {"peer": peer, **figures, "kills": kills}


def installed(python: str, module: str) -> bool:
    """Whether an interpreter is there and can import a module."""
    look = [python, "-c", f"import {module}"]
    try:
        return subprocess.run(look, env=_environment(), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# ---------------------------------------------------------------- one peer


class WorkerFailed(Exception):
    """A worker ended without an answer."""


def measure(peer: Peer, python: str, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, each in a process and a folder of its own."""
    measured = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
            measured.append(ask(command(peer, python, "measure", folder)))
    figures = {name: statistics.median(m[name] for m in measured) for name in measured[0] if name != "versions"}
    rates = [m["rows_per_second"] for m in measured]
    return {**figures, "spread": (min(rates), max(rates)), "versions": measured[0]["versions"]}


def survival(peer: Peer, python: str, seconds: float) -> dict[str, Any]:
    """Kill what holds the rows while a producer writes, open what is left anew, and count.

    The producer's confirmations come through a pipe, which keeps what was written to it before the kill.
    """
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        confirmed = kill_while_writing(command(peer, python, "write", folder), seconds)
        found = ask([*command(peer, python, "count", folder), "--confirmed", str(confirmed)])
    return {"confirmed": confirmed, **found}


def kill_while_writing(worker: list[str], seconds: float) -> int:
    """Start a writer, kill its victim after that time of writing. Returns the rows that it was told are safe."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            worker, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        try:
            victim = json.loads(process.stdout.readline() or "{}").get("victim")
            if victim is None:
                raise WorkerFailed(_last_line(errors))
            process.stdout.readline()  # the first confirmation
            # The pipe holds what is said meanwhile: 64 KiB are twenty seconds at the writer's pace.
            time.sleep(seconds)
            os.kill(victim, signal.SIGKILL)
            time.sleep(0.3)  # confirmations that were under way to a producer that lives on
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        lines = process.stdout.read().splitlines()
        process.wait()
        return max((json.loads(line)["confirmed"] for line in lines if line.endswith(b"}")), default=0)


def command(peer: Peer, python: str, mode: str, folder: str) -> list[str]:
    """The command of a peer's worker."""
    saves = ["--save"] if peer.saves else []
    return [python, "-m", f"benchmarks.{peer.module}", mode, folder, *saves]


def ask(worker: list[str]) -> dict[str, Any]:
    """The one line that a worker prints."""
    with tempfile.TemporaryFile() as errors:
        done = subprocess.Popen(
            worker, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            said, _ = done.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            raise
        if done.returncode:
            raise WorkerFailed(_last_line(errors))
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def _environment() -> dict[str, str]:
    return {**os.environ, **QUIET}


def _last_line(errors: Any) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the worker said nothing"


# ---------------------------------------------------------------- the table

COLUMNS: tuple[tuple[str, int, Callable[[dict[str, Any]], str]], ...] = (
    ("rows/s", 8, lambda row: f"{row['rows_per_second']:.0f}"),
    ("to tba", 7, lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "-"),
    ("min-max", 14, lambda row: "-".join(f"{rate:.0f}" for rate in row["spread"])),
    ("batch ms", 9, lambda row: f"{row['batch_ms']:.1f}"),
    # Below zero where a save has mapped files anew: their pages count from the next access on.
    ("RSS B/row", 10, lambda row: f"{max(0, row['resident_bytes']):.0f}"),
    ("anon B/row", 11, lambda row: f"{row['anonymous_bytes']:.0f}"),
    ("file B/row", 11, lambda row: f"{row['file_bytes']:.0f}"),
    ("outlives SIGKILL", 17, lambda row: f"{_survived(row):.2%}"),
)


def print_table(rows: list[dict[str, Any]]) -> None:
    """The figures, then what was killed and counted, then the versions."""
    own = next((row["rows_per_second"] for row in rows if row["peer"].module == "peer_tba" and "kills" in row), None)
    print("\n4 KB trajectories (512 ids, 512 log-probabilities); 64 in a put; batches of 512; one producer")
    print(f"{'peer':22} {'where':30}" + "".join(f" {title:>{width}}" for title, width, _ in COLUMNS))
    for row in rows:
        row["ratio"] = row["rows_per_second"] / own if own and "kills" in row else None
        cells = [f" {show(row):>{width}}" for _, width, show in COLUMNS] if "kills" in row else [f" {row['trouble']}"]
        print(f"{row['peer'].name:22} {row['peer'].where:30}" + "".join(cells))
    print("\nSIGKILL: rows that came back whole / rows that the API had confirmed")
    for row in filter(lambda row: "kills" in row, rows):
        counts = ", ".join(f"{kill['rows']}/{kill['confirmed']}" for kill in row["kills"])
        print(f"{row['peer'].name:22} {counts}; killed: {row['peer'].killed}{_saving(row)}{_by_hand(row)}")
    print("\nversions")
    for module, versions in {row["peer"].module: row["versions"] for row in rows if "kills" in row}.items():
        print(f"{module:22} {', '.join(f'{name} {version}' for name, version in versions.items())}")


def _survived(row: dict[str, Any]) -> float:
    return sum(kill["rows"] for kill in row["kills"]) / max(1, sum(kill["confirmed"] for kill in row["kills"]))


def _saving(row: dict[str, Any]) -> str:
    return f"; one save of {WARM_UP + ROWS:,} rows takes {row['save_seconds']:.2f} s" if row["peer"].saves else ""


def _by_hand(row: dict[str, Any]) -> str:
    found = [f"{kill['in_files']}/{kill['confirmed']}" for kill in row["kills"] if "in_files" in kill]
    return f"; by hand from the bare files, which do not say how many are whole: {', '.join(found)}" if found else ""


if __name__ == "__main__":
    main()
