"""Replays of a recorded run have the recorded losses, with every objective: refactoring changes no number.

    python -m tba.tests.process.test_replay_losses   # write tests/data/losses.json

tests/data/recorded_batches.jsonl has the batches of a run of examples/arithmetic, a trajectory per line. The losses are
those of the code at the time of their recording, with the versions of torch, transformers and numpy next to them.
Record them again only after a change that is meant to change numbers.
"""

import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
RECORD = json.loads((DATA / "losses.json").read_text())
STEPS, PROMPTS, SAMPLES = 10, 2, 3
ARRAYS = ("prompt_ids", "response_ids", "logprobs", "version_runs", "loss_mask")

# Make the bits equal on every x86 processor: one thread, no vector instructions, and matrix products by code that every
# processor can run.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}

CONFIG = f"""
run = {{ name = "recorded", dir = "run" }}
model = {{ path = "{ROOT}/examples/arithmetic/model", dtype = "float32" }}
task = {{ name = "arithmetic", limit = 24, held_out_limit = 8 }}

[search]
max_tokens = 6

[train]
gpu = "cpu"
steps = {STEPS}
prompts_per_step = {PROMPTS}
samples_per_prompt = {SAMPLES}
learning_rate = 1e-4
schedule = "constant"
warmup_steps = 0
publish_every = 1
threads = 1
"""

# Every objective; some cases also cover another part of the trainer.
CASES: dict[str, dict[str, Any]] = {
    "tb": {},
    "tb_stale": {"objective.imitation": 0.25},
    "tb_learned_z": {"train.micro_batch_tokens": 64},
    "tba_prime": {},
    "reinforce": {"train.schedule": "cosine", "train.warmup_steps": 2},
    "rloo": {"objective.kl": "reference", "reference.kind": "reset", "reference.every": 4},
    "grpo": {"objective.kl": "ema"},
    "dr_grpo": {"train.micro_batch_tokens": 20},
    "ppo_clip": {"train.gradient_checkpointing": "true"},
    "proximal_rloo": {"train.packing": "padded"},
    "cispo": {"lora.rank": 4},
    "online_dpo": {"reference.kind": "ema", "reference.every": 3},
    "oapl": {"train.weight_decay": 0, "objective.value_beta": "beta", "train.packing": "padded"},
}


# Most of the time of a replay is spent on imports. This program imports once and forks for each `tba ...` command.
# The last bit of MKL's square root, which Adam uses, depends on the processor in spite of the environment, so numpy's
# replaces it.
RUN_COMMANDS = """
import gc, importlib, json, os, pkgutil, sys
import numpy, tba.buffer, tba.trainer, torch, transformers.models.llama.modeling_llama
for package in (tba.buffer, tba.trainer):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

def square_root(tensor):
    values = tensor.numpy()
    return torch.from_numpy(numpy.sqrt(values, out=numpy.empty_like(values)))

torch.Tensor.sqrt = square_root
# Collections of garbage in a fork would search, and so copy, all that was imported.
gc.freeze()
for folder, arguments in json.load(sys.stdin):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["tba", *arguments]
    from tba.cli import main
    main()
    break
"""


def python(folder: Path, *command: str, stdin: str = "") -> None:
    """Run python in a folder that has run.toml. Raises RuntimeError with its output if it fails."""
    (folder / "run.toml").write_text(CONFIG)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TBA_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited | ENVIRONMENT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def read_rows(file: Path, folder: Path) -> Path:
    """Create a database with the current schema and the batches of a file. Returns its path."""
    database = folder / "recorded.sqlite"
    (folder / "empty.jsonl").touch()
    arguments = ["buffer", "import", "empty.jsonl", "--config", "run.toml", "--set", f"buffer.database={database}"]
    python(folder, "-m", "tba", *arguments)
    with closing(sqlite3.connect(database)) as connection, connection:
        for row in map(json.loads, file.read_text().splitlines()):
            _insert_row(connection, **row)
    return database


def _insert_row(
    connection: sqlite3.Connection, *, step: int, slot: int, staleness: int, trajectory: int, prompt: int, **row: Any
) -> None:
    def insert(table: str, **values: Any) -> None:
        marks = ", ".join("?" * len(values))
        statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        connection.execute(statement, list(values.values()))

    arrays = {name: bytes.fromhex(row.pop(name)) for name in ARRAYS} | {"segments": b""}
    insert("prompts", id=prompt, run=1, position=prompt, key=f"prompt {prompt}")
    row |= {"sender": 1, "sequence": trajectory, "dedup_hash": trajectory, "payload_bytes": 0}
    row |= {"metadata": "{}", "turns": "[]"}
    row |= dict.fromkeys(("created_at", "received_at", "generation_seconds"), 0.0)
    row |= {f"{part}_tokens": len(arrays[f"{part}_ids"]) // 4 for part in ("prompt", "response")}
    insert("trajectory_rows", id=trajectory, run=1, prompt=prompt, **row)
    insert("payloads", trajectory=trajectory, **arrays)
    version = row["policy_version"]
    insert("snapshots", run=1, version=version, step=version, path="", manifest_sha256="", bytes=0, announced_at=0.0)
    batch = {"id": step + 1, "run": 1, "step": step, "prompts": PROMPTS, "samples": SAMPLES}
    insert("batches", **batch, handed_out_at=0.0, trained_at=0.0, metrics="{}")
    insert("consumption_rows", batch=batch["id"], slot=slot, trajectory=trajectory, staleness=staleness)


def replay(database: Path, cases: Iterable[str], folder: Path) -> dict[str, dict[str, list[str]] | str]:
    """Return loss and gradient norm of each step of each case, as hexadecimal floats; its output if a case fails."""
    runs = {case: folder / case for case in cases}
    commands = []
    for case, directory in runs.items():
        directory.mkdir()
        sets = {"objective.name": case, **CASES[case], "run.dir": str(directory), "train.publish_every": 9}
        flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        command = ["train", "--cpu", "--config", "../run.toml", "--offline", "--buffer", str(database), "--replay"]
        commands.append((str(directory), command + flags))
    python(folder, "-c", RUN_COMMANDS, stdin=json.dumps(commands))
    return {case: _numbers(directory) for case, directory in runs.items()}


def _numbers(directory: Path) -> dict[str, list[str]] | str:
    metrics = directory / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if len(steps) < STEPS:
        return (directory / "output.txt").read_text()
    return {name: [float(step.get(name, "nan")).hex() for step in steps] for name in ("loss", "grad_norm")}


def made_with() -> dict[str, str]:
    """Return the versions that the last bits depend on."""
    return {"machine": platform.machine(), **{name: version(name) for name in ("torch", "transformers", "numpy")}}


def test_recorded_losses_differ_between_all_cases_at_each_step():
    steps = list(zip(*(RECORD["losses"][case]["loss"] for case in CASES), strict=True))
    assert [len(set(losses)) for losses in steps] == [len(CASES)] * STEPS


def test_replays_have_the_recorded_losses_bit_for_bit(tmp_path):
    if made_with() != RECORD["made_with"]:
        pytest.skip(f"the losses were recorded with {RECORD['made_with']}, not {made_with()}")
    database = read_rows(DATA / "recorded_batches.jsonl", tmp_path)
    assert replay(database, CASES, tmp_path) == RECORD["losses"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = read_rows(DATA / "recorded_batches.jsonl", folder)
        losses = replay(database, CASES, folder)
        # One line per objective.
        cases = ",\n".join(f"{json.dumps(case)}: {json.dumps(numbers)}" for case, numbers in losses.items())
        record = f'{{"made_with": {json.dumps(made_with())},\n"losses": {{\n{cases}\n}}}}\n'
        (DATA / "losses.json").write_text(record)


if __name__ == "__main__":
    main()
