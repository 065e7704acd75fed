"""`tba run` against TRL's GRPO trainer on this machine: time to a held-out accuracy.

    python -m benchmarks.trl_run [--steps 160] [--accuracy 0.8] [--seeds 0 1 2] [--only tba] [--set key=value ...]

Both train the model of examples/arithmetic on its task, with steps of 32 prompts x 8 samples, the same learning rate,
warm-up, temperature and length, and have all cores: TRL as one process that generates with Transformers and trains in
turn, tba as `tba run` with the demo's configuration (`--set` changes it). Everything else is each one's default. All
weights of every tenth step are saved and measured afterwards by the same code; step and time of the accuracy are
interpolated between them. The time counts from the start of the command, and from the start of the first generation,
without imports and setup. The CPU time is of all processes, from the first generation to the last step.
"""

import argparse
import contextlib
import json
import multiprocessing
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.harness import first_reached, in_turns, print_table, tba
from benchmarks.off_policy.sampling import measure
from benchmarks.off_policy.tasks import encoded, load_task
from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.weights.snapshot import directory_name
from tba.searcher.tasks.arithmetic import ArithmeticTask

_DEMO = Path("examples/arithmetic/demo.toml")
_SAVED_EVERY = 10
_SAMPLE_SECONDS = 0.5
# The role of a process, by a word of its command line.
_ROLES = {
    "tba.searcher.scoring.task_scorer": "rewards",
    "serve": "buffer",
    "search": "searchers",
    "train": "trainer",
    "--multiprocessing-fork": "trainer",
}


@dataclass(frozen=True, slots=True)
class Course:
    """What one training reached. `started` is the Unix time of the command, `times` are those of each step's end, with
    the start of the first generation as step 0; `accuracies` are greedy ones, by step. `cpu_seconds` are those of a
    step, by role."""

    started: float
    times: Mapping[int, float]
    accuracies: Mapping[int, float]
    cpu_seconds: Mapping[str, float]

    def numbers(self, accuracy: float) -> list[float]:
        """Return the numbers of a row of the table. Those of an accuracy that is not reached are NaN."""
        steps, values = zip(*sorted(self.accuracies.items()), strict=True)
        step = first_reached(accuracy, values, steps)
        when = float(np.interp(step, sorted(self.times), [self.times[one] for one in sorted(self.times)]))
        seconds = (self.times[max(self.times)] - self.times[0]) / max(self.times)
        cpu_seconds = sum(self.cpu_seconds.values())
        return [step, when - self.started, when - self.times[0], seconds, cpu_seconds, values[-1]]


class CpuTimes:
    """CPU seconds of a process and its descendants, by role, sampled in a thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        # Of processes that have ended, too: each keeps its last value.
        self._by_process: dict[tuple[int, float], tuple[str, float]] = {}
        self._samples: list[tuple[float, Mapping[str, float]]] = []

    @contextlib.contextmanager
    def sampled(self, pid: int) -> Iterator[None]:
        """Sample while the context lasts."""
        thread = threading.Thread(target=self._run, args=[psutil.Process(pid)])
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def between(self, first: float, last: float) -> dict[str, float]:
        """Return the CPU seconds of each role between two Unix times."""
        times, totals = zip(*self._samples, strict=True)
        of_role = {role: [total.get(role, 0.0) for total in totals] for role in totals[-1]}
        return {role: float(np.diff(np.interp([first, last], times, one))[0]) for role, one in of_role.items()}

    def _run(self, root: psutil.Process) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            # Processes end meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess), one.oneshot():
                        words = one.cmdline()
                        role = next((name for word, name in _ROLES.items() if word in words), "supervision")
                        self._by_process[one.pid, one.create_time()] = role, sum(one.cpu_times()[:2])
            total: defaultdict[str, float] = defaultdict(float)
            for role, seconds in self._by_process.values():
                total[role] += seconds
            self._samples.append((time.time(), total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", choices=["TRL", "tba"])
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--learning-rate", type=float, default=demo().train.learning_rate)
    options = parser.parse_args()
    ways = {"TRL": train_trl, "tba": train_tba}
    asked = {
        name: partial(_trained, way, options, iter(options.seeds))
        for name, way in ways.items()
        if options.only in (None, name)
    }
    show(in_turns(asked, len(options.seeds)), options.seeds, options.accuracy)


def _trained(way: Callable[..., Course], options: argparse.Namespace, seeds: Iterator[int]) -> Course:
    """Train with the next seed."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        return way(Path(folder), options, next(seeds))


def show(courses: Mapping[str, Sequence[Course]], seeds: Sequence[int], accuracy: float) -> None:
    """Print each run, and the medians."""
    headings = ["", "seed", "steps", "s, command", "s, first generation", "s a step", "CPU s a step", "last accuracy"]
    headings[2:5] = [f"{heading} to {accuracy:.0%}" for heading in headings[2:5]]
    rows, roles = [], []
    for name, done in courses.items():
        numbers = np.array([course.numbers(accuracy) for course in done])
        lines = zip([*seeds, "median"], [*numbers, np.median(numbers, axis=0)], strict=True)
        rows += [[name, seed, *("not reached" if np.isnan(one) else f"{one:.3g}" for one in of)] for seed, of in lines]
        for role in sorted({role for course in done for role in course.cpu_seconds}):
            roles.append([name, role, f"{np.median([course.cpu_seconds.get(role, 0.0) for course in done]):.3f}"])
    print_table("the arithmetic task", headings, rows)
    print_table("CPU seconds of a step", ["", "role", "CPU s"], roles)


def train_tba(folder: Path, options: argparse.Namespace, seed: int) -> Course:
    """Run the demo's configuration with `tba run`."""
    steps: int = options.steps
    settings = [
        f"run.dir={folder}/run",
        f"run.seed={seed}",
        f"train.steps={steps}",
        f"train.learning_rate={options.learning_rate}",
        f"train.keep_snapshot_every={_SAVED_EVERY}",
        "eval.at_end=false",
        *options.settings,
    ]
    started, cpu = time.time(), CpuTimes()
    command = tba("run", str(_DEMO), settings=settings)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child, cpu.sampled(child.pid):
        code = child.wait()
    if code:
        raise RuntimeError(f"tba run has ended with {code}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    times = {0: _first_generation(folder / "run" / "buffer.sqlite")}
    times |= {line["step"] + 1: line["time"] for line in lines}
    snapshots = {
        step: folder / "run" / "snapshots" / directory_name(step) for step in range(0, steps + 1, _SAVED_EVERY)
    }
    return _course(started, times, snapshots, cpu)


def _first_generation(database: Path) -> float:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found: float
        (found,) = connection.execute("SELECT min(created_at - generation_seconds) FROM trajectories").fetchone()
    return found


def train_trl(folder: Path, options: argparse.Namespace, seed: int) -> Course:
    """Run TRL's trainer in a process of its own, which starts without its libraries as `tba run` does."""
    started, cpu = time.time(), CpuTimes()
    arguments = (folder, options.steps, seed, options.learning_rate)
    child = multiprocessing.get_context("spawn").Process(target=_trl, args=arguments)
    child.start()
    assert child.pid is not None
    with cpu.sampled(child.pid):
        child.join()
    if child.exitcode:
        raise RuntimeError("TRL's training has failed")
    times = dict(map(json.loads, (folder / "steps.jsonl").read_text().splitlines()))
    weights = {step: folder / f"step{step}" for step in times if step % _SAVED_EVERY == 0 and step}
    return _course(started, times, weights, cpu)


def _course(started: float, times: Mapping[int, float], weights: Mapping[int, Path], cpu: CpuTimes) -> Course:
    """Return the course of a training, with the weights of some steps measured on the held-out problems."""
    task, policy = load_task("arithmetic"), example_model()
    problems = encoded(ArithmeticTask().held_out(), AutoTokenizer.from_pretrained(demo().model.path))
    accuracies = {}
    for step, directory in weights.items():
        policy.load_state_dict(load_file(directory / "model.safetensors"))
        accuracies[step] = measure(policy, task, problems).greedy
    steps = max(times)
    spent = {role: seconds / steps for role, seconds in cpu.between(times[0], times[steps]).items() if seconds}
    return Course(started, times, accuracies, spent)


def example_model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo().model.path, dtype="float32")
    return model


def demo() -> Config:
    return resolve(_DEMO, environment={}, assignments=[]).config


def _trl(folder: Path, steps: int, seed: int, learning_rate: float) -> None:
    """Train, and note the Unix time after each step; saving is not part of any step."""
    import datasets
    import trl
    from transformers import TrainerCallback

    config, notes, saving = demo(), folder / "steps.jsonl", [0.0]

    class Notes(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._note(0)

        def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: PreTrainedModel, **_: Any) -> None:
            self._note(state.global_step)
            begun = time.time()
            if state.global_step % _SAVED_EVERY == 0:
                model.save_pretrained(folder / f"step{state.global_step}")
            saving[0] += time.time() - begun

        def _note(self, step: int) -> None:
            with notes.open("a") as file:
                print(json.dumps([step, time.time() - saving[0]]), file=file)

    prompts = [{"prompt": prompt.text, "answer": prompt.answer} for prompt in ArithmeticTask().prompts()]
    train = config.train
    arguments = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, report_to=[], bf16=False, seed=seed, gradient_checkpointing=False,
        per_device_train_batch_size=train.prompts_per_step * train.samples_per_prompt, max_steps=steps,
        num_generations=train.samples_per_prompt, max_completion_length=config.search.max_tokens, temperature=1.0,
        learning_rate=learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=train.warmup_steps,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=example_model(),
        reward_funcs=_exact,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(config.model.path),
        callbacks=[Notes()],
    )
    trainer.train()


def _exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
