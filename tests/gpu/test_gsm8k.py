"""`tba run` on GSM8K with a model of the hub: training, and how long weights take to reach the searchers, by stage.

GPU_MODEL names another model; TBA_TEST_DATA a folder with gsm8k/train.jsonl and gsm8k/test.jsonl instead of the hub.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tba.common.config import TaskSection
from tba.common.errors import TbaError
from tba.common.weights.model_files import model_directory
from tba.searcher.tasks import load_task

pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm]'")

MODEL = os.environ.get("GPU_MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
STEPS = 150
# The whole run; one GPU is shared by a searcher and the trainer.
pytestmark = pytest.mark.timeout(3000)


@dataclass
class Finished:
    """A run that has ended: its metrics by step, its evaluations, and the events of all its logs in order of time."""

    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def times(self, event: str, key: str) -> dict[Any, list[tuple[float, dict[str, Any]]]]:
        """Return (seconds, fields) of an event's lines, by the value of a field."""
        found: dict[Any, list[tuple[float, dict[str, Any]]]] = {}
        for line in self.events:
            if line.get("event") == event and key in line:
                at = datetime.fromisoformat(line["ts"]).timestamp()
                found.setdefault(line[key], []).append((at, line))
        return found


def settings(directory: Path, count: int) -> dict[str, Any]:
    """Return settings for this number of GPUs: the last one trains, the others search; a single one does both."""
    folder = os.environ.get("TBA_TEST_DATA")
    data = {"task.train": f"{folder}/gsm8k/train.jsonl", "task.test": f"{folder}/gsm8k/test.jsonl"} if folder else {}
    return data | {
        "run.dir": directory / "run",
        "buffer.address": f"ipc://{directory}/buffer",
        "model.path": MODEL,
        "search.gpus": "0" if count == 1 else f"0-{count - 2}",
        "search.gpu_memory_utilization": 0.35 if count == 1 else 0.9,
        "train.gpu": str(count - 1),
        "train.steps": STEPS,
        "train.warmup_steps": 5,
        "train.learning_rate": 3e-6,
        "train.micro_batch_tokens": 8192,
        "task.held_out_limit": 256,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory, gpus, pytestconfig) -> Finished:
    """The run. Skips what depends on it without the model or the data."""
    try:
        model_directory(MODEL)
        if not os.environ.get("TBA_TEST_DATA"):
            load_task(TaskSection(name="gsm8k", train="openai/gsm8k")).prompts()
    except TbaError as error:
        pytest.skip(f"model or data cannot be loaded: {error}")
    directory = tmp_path_factory.mktemp("gsm8k")
    chosen = settings(directory, len(gpus))
    options = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "tba", "run", "examples/gsm8k/node.toml", *options]
    environment = os.environ | {"TBA_LOG": "json"}
    done = subprocess.run(
        command, cwd=pytestconfig.rootpath, env=environment, capture_output=True, text=True, timeout=2700, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    run = directory / "run"
    logs = [line for path in sorted(run.glob("logs/*")) for line in path.read_text(errors="replace").splitlines()]
    events = [json.loads(line) for line in logs if line.startswith("{")]
    return Finished(lines_of(run / "metrics.jsonl"), lines_of(run / "eval.jsonl"), events)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """Return the mean of a metric over the steps that have it, NaN if none has."""
    found = [line[name] for line in lines if name in line]
    return sum(found) / len(found) if found else float("nan")


def test_gsm8k_trains_to_the_end(finished, record_property):
    assert [line["step"] for line in finished.metrics] == list(range(STEPS))
    assert not any(line["skipped"] for line in finished.metrics)
    steady = finished.metrics[20:]
    for name in (
        "seconds_step", "seconds_wait", "seconds_publish", "tokens_per_second", "mfu", "staleness_mean",
        "recency_window", "recency_missed", "mismatch_mean", "mismatch_kl", "effective_sample_ratio",
    ):  # fmt: skip
        record_property(name, mean(steady, name))
    for name, lines in (("first", finished.metrics[:20]), ("last", finished.metrics[-20:])):
        record_property(f"reward_mean_of_the_{name}_20_steps", mean(lines, "reward_mean"))
    for line in finished.evaluations:
        record_property(f"accuracy_at_step_{line['step']}", line["accuracy"])
    # By recency, 19 of 20 groups are of the newest data; the rest is from all of the run.
    assert mean(steady, "staleness_mean") <= mean(steady, "recency_window") + 0.05 * STEPS + 2
    assert finished.evaluations[-1]["accuracy"] > 0


def test_the_way_of_weights_to_the_searchers_by_stage(finished, record_property):
    """From the end of a step to the first and the last searcher that serves its weights."""
    steps = finished.times("step", "step")
    published = finished.times("snapshot published", "version")
    loaded = finished.times("weights loaded", "version")
    stages: dict[str, list[float]] = {}
    for version, ((at, line), *_) in published.items():
        made = steps.get(line["step"] - 1)
        if made is None or version not in loaded:
            continue
        arrivals = sorted(when for when, _ in loaded[version])
        found = {
            "step_to_announced": at - made[0][0],
            "announced_to_first": arrivals[0] - at,
            "announced_to_last": arrivals[-1] - at,
            "step_to_last": arrivals[-1] - made[0][0],
            "writing": line["seconds"],
            "preparing": max(fields["seconds_prepare"] for _, fields in loaded[version]),
            "swapping": max(fields["seconds"] for _, fields in loaded[version]),
        }
        for name, seconds in found.items():
            stages.setdefault(name, []).append(seconds)
    assert stages, "no publication was served"
    for name, values in stages.items():
        record_property(f"seconds_{name}_median", median(values))
        record_property(f"seconds_{name}_max", max(values))
    versions = sorted(published)
    record_property("published", len(versions))
    record_property("mbytes", published[versions[0]][0][1]["mbytes"])
    starts = [published[version][0][0] for version in versions]
    record_property("seconds_between_publications_median", median(b - a for a, b in pairwise(starts)))
