"""`tba train` with several processes and a real buffer: it trains and fails like one process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tba.common.system.process import PARENT_VARIABLE
from tba.common.weights import snapshot
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import TrainRun
from tba.tests.process.conftest import clean_environment

# Of these, a test waits for eight before it stops or kills something, which must not come after the last.
STEPS = 36
TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "prompts_per_step": 3,
    "learning_rate": 1e-4,
    "publish_every": 12,
    "checkpoint_every": 3,
    "micro_batch_tokens": 30,
}


@pytest.fixture
def make_run(tmp_path, make_config_in, start_tba) -> Iterator[Callable[..., TrainRun]]:
    """Makes runs with trajectories for all steps; keyword arguments are keys of [lora]."""
    made: list[TrainRun] = []

    def make(name: str, **lora: Any) -> TrainRun:
        made.append(TrainRun(tmp_path / name, make_config_in, start_tba, lora=lora, **TRAIN))
        return made[-1]

    yield make
    for run in made:
        run.buffer.stop()


def train_here(run: TrainRun, tba_here: Callable[..., Any]) -> None:
    """Run `tba train` to its end in this process, which has torch already."""
    feeder = threading.Thread(target=run.feed, name="feeder")
    feeder.start()
    assert tba_here("train", "--config", run.file, "--cpu").exit_code == 0
    feeder.join()


def assert_same_training(run: TrainRun, straight: TrainRun) -> None:
    """Compare steps up to the rounding of float32 sums in another order."""
    found, expected = run.lines(), straight.lines()
    assert [line["step"] for line in found] == list(range(STEPS))
    for name in ("loss", "grad_norm", "kl", "reward_mean"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-3, abs=1e-5)


def children_of(pid: int) -> dict[str, int]:
    """Return the ranks that a process has started: pid by rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in entry
        )
        if "RANK" in environment:
            found[environment["RANK"]] = int(child)
    return found


@pytest.mark.needs("peft")
def test_two_stopped_processes_resume_under_torchrun_with_adapters(make_run, tba_here):
    straight, run = make_run("straight", rank=2), make_run("stopped", rank=2, publish="adapter")
    train_here(straight, tba_here)
    two = run.start("--processes", "2")
    run.feed()
    wait_until(lambda: len(run.lines()) >= 8)
    two.send_signal(signal.SIGTERM)
    assert two.wait(60) == 0
    assert len(run.lines()) < STEPS
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tba"]
    command = [*launcher, "train", "--config", run.file, "--cpu", "--resume"]
    environment = {name: value for name, value in clean_environment().items() if name != PARENT_VARIABLE}
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert_same_training(run, straight)
    manifests = [snapshot.read(path).manifest for path in snapshot.list_snapshots(run.config.snapshots)]
    assert (manifests[0].step, manifests[-1].step) == (0, STEPS)
    bases = {manifest.version for manifest in manifests if manifest.base is None and manifest.step == 0}
    assert len(bases) == 2, "each start publishes its base"
    # The first start may be stopped before it publishes an adapter.
    assert {manifest.base for manifest in manifests[:-1]} <= {None, *bases}
    assert manifests[-2].base == max(bases), "adapters, also after the restart"


def test_a_killed_rank_ends_the_run_with_one_sentence_and_one_process_resumes_the_same_training(
    make_run, tba_here, tmp_path
):
    """With the optimiser on the host, compared with an uninterrupted run without."""
    straight, run = make_run("straight"), make_run("offloaded")
    train_here(straight, tba_here)
    offload = ("--set", "train.offload=optimizer")
    two = run.start("--processes", "2", *offload)
    run.feed()
    wait_until(lambda: len(run.lines()) >= 8)
    os.kill(children_of(two.pid)["1"], signal.SIGKILL)
    assert two.wait(60) == 1
    lines = (tmp_path / "tba0.log").read_text().splitlines()
    assert lines[-1] == "error: rank1 of 2 was ended by SIGKILL; the others were ended: continue with --resume"
    assert not any("Traceback" in line for line in lines)
    assert run.start("--resume", *offload).wait(300) == 0
    assert_same_training(run, straight)
    published = [snapshot.list_snapshots(one.config.snapshots)[-1] / "model.safetensors" for one in (run, straight)]
    mine, expected = (load_file(path) for path in published)
    assert all(torch.allclose(mine[name], tensor, atol=1e-5) for name, tensor in expected.items())
