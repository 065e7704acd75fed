"""`tba train` with several processes and a real buffer: it trains and fails like one process."""

import json
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

from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.system.process import PARENT_VARIABLE
from tba.common.weights import snapshot
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.trainer import BufferThread, FakeSearcher, save_tiny_model
from tba.tests.process.conftest import clean_environment

STEPS = 120


class Run:
    """A run directory with a model, a buffer and trajectories for all steps."""

    def __init__(self, root: Path, make_config_in: Callable[..., Any], start_tba: Callable[..., Any], **lora) -> None:
        root.mkdir()
        model = save_tiny_model(root / "model", layers=2)
        train = {
            "steps": STEPS,
            "prompts_per_step": 3,
            "samples_per_prompt": 3,
            "learning_rate": 1e-4,
            "warmup_steps": 0,
            "decay_steps": 2,
            "publish_every": 40,
            "checkpoint_every": 10,
            "micro_batch_tokens": 30,
        }
        sections = {"model": {"path": str(model), "dtype": "float32"}, "train": train, "lora": lora}
        made = make_config_in(root, **sections)
        self.config: Config = resolve(Path(made.file), overrides=None, assignments=[]).config
        self.file = made.file
        self.log = root / "train.log"
        self._start = start_tba
        self.buffer = BufferThread(self.config, address=made.address)

    def start(self, *arguments: str) -> Any:
        """Start `tba train`."""
        return self._start("train", "--config", self.file, "--cpu", *arguments)

    def train(self, *arguments: str) -> None:
        """Run `tba train` to its end."""
        assert self.start(*arguments).wait(300) == 0

    def train_here(self, tba_here: Callable[..., Any]) -> None:
        """Run `tba train` to its end in this process, which has torch already."""
        feeder = threading.Thread(target=self.feed, name="feeder")
        feeder.start()
        assert tba_here("train", "--config", self.file, "--cpu").exit_code == 0
        feeder.join()

    def feed(self) -> None:
        """Put trajectories once weights are announced."""
        searcher = FakeSearcher(self.buffer.address, prompts=4)
        searcher.wait_for_weights(seconds=60)
        searcher.put_groups(8)
        searcher.close()

    def metrics(self) -> list[dict[str, float]]:
        """Return the complete lines of metrics.jsonl: the last line may still be being written."""
        path = self.config.run.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_steps(self, count: int) -> None:
        wait_until(lambda: len(self.metrics()) >= count)


@pytest.fixture
def make_run(tmp_path, make_config_in, start_tba) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(name: str, **lora: Any) -> Run:
        made.append(Run(tmp_path / name, make_config_in, start_tba, **lora))
        return made[-1]

    yield make
    for run in made:
        run.buffer.stop()


def assert_same_training(run: Run, straight: Run) -> None:
    """Compare steps up to the rounding of float32 sums in another order."""
    found, expected = run.metrics(), straight.metrics()
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
    straight.train_here(tba_here)
    two = run.start("--processes", "2")
    run.feed()
    run.wait_for_steps(30)
    two.send_signal(signal.SIGTERM)
    assert two.wait(60) == 0
    assert len(run.metrics()) < STEPS
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
    straight.train_here(tba_here)
    offload = ("--set", "train.offload=optimizer")
    two = run.start("--processes", "2", *offload)
    run.feed()
    run.wait_for_steps(30)
    os.kill(children_of(two.pid)["1"], signal.SIGKILL)
    assert two.wait(60) == 1
    lines = (tmp_path / "tba0.log").read_text().splitlines()
    assert lines[-1] == "error: rank1 of 2 was ended by SIGKILL; the others were ended: continue with --resume"
    assert not any("Traceback" in line for line in lines)
    run.train("--resume", *offload)
    assert_same_training(run, straight)
    published = [snapshot.list_snapshots(one.config.snapshots)[-1] / "model.safetensors" for one in (run, straight)]
    mine, expected = (load_file(path) for path in published)
    assert all(torch.allclose(mine[name], tensor, atol=1e-5) for name, tensor in expected.items())
