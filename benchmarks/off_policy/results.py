"""Runs, and the file of their results: one JSON object per run, with the setting and the measurements.

Runs that are in the file are not repeated. `Learner` makes the updates, as in `tba train`.
"""

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.off_policy.sampling import as_batch, measure
from benchmarks.off_policy.setting import Setting, objective_section
from benchmarks.off_policy.sources import ExactStaleness, PaperBuffer, Searcher
from benchmarks.off_policy.tasks import explorer_model, load_task
from tba.common.config import ReferenceSection
from tba.tests.helpers.trainer import learner_of
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective

# Measurements in a run, after the one before the first step.
MEASUREMENTS = 8
SETTING_FIELDS = tuple(field.name for field in dataclasses.fields(Setting))


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements before the first step and after each eighth of a run (`run`)."""

    reward: list[float]
    greedy: list[float]
    pass_at_8: list[float]
    drift: list[float]
    age: list[float]
    cpu_seconds: float

    @property
    def gain(self) -> float:
        """Expected reward at the end minus that at the start."""
        return self.reward[-1] - self.reward[0]


Results = dict[Setting, Result]


def load(path: Path) -> Results:
    """Return the results of a file, none if it does not exist. A field that a setting lacks has its default."""
    if not path.exists():
        return {}
    return dict(map(_parse, path.read_text(encoding="utf-8").splitlines()))


def _parse(line: str) -> tuple[Setting, Result]:
    row = json.loads(line)
    setting = Setting(**{name: row.pop(name) for name in SETTING_FIELDS if name in row})
    return setting, Result(**row)


def complete(path: Path, settings: Iterable[Setting], *, workers: int, deadline: float) -> None:
    """Run the settings that are not in the file, in their order.

    Prints their number first, and the CPU time that they need by the runs of the same task in the file. No run starts
    after `deadline`, on the clock of time.monotonic(); those under way are finished.
    """
    done = load(path)
    missing = [setting for setting in dict.fromkeys(settings) if setting not in done]
    tasks = {setting.task for setting in missing}
    costs = {
        task: np.mean([run.cpu_seconds / setting.responses for setting, run in done.items() if setting.task == task])
        for task in {setting.task for setting in done}
    }
    cost = f"the first of {', '.join(sorted(tasks - costs.keys()))}"
    if tasks <= costs.keys():
        seconds = sum(costs[setting.task] * setting.responses for setting in missing)
        cost = f"about {seconds / 60:.0f} CPU minutes"
    print(f"{len(missing)} runs, {cost}, {workers} at a time", flush=True)
    if not missing or time.monotonic() > deadline:
        return
    for task in tasks:
        # Makes a model that is missing, before several workers would at once.
        load_task(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool, path.open("a") as file:
        left = len(missing)
        for found in pool.map(partial(_run_before, deadline), missing):
            if found is not None:
                left -= 1
                print(json.dumps(found), file=file, flush=True)
                print(json.dumps(found), flush=True)
    if left:
        print(f"out of time: {left} of {len(missing)} runs are left", flush=True)


def _run_before(deadline: float, setting: Setting) -> dict[str, object] | None:
    """Run a setting, unless the deadline has passed: all processes have the same monotonic clock."""
    return run(setting) if time.monotonic() < deadline else None


def run(setting: Setting) -> dict[str, object]:
    """Train once. Returns the columns of `results.Result` after those of the setting.

    A column has one entry before the first step and one after each eighth of the run. `drift` is KL(sampler || policy)
    of whole responses, the mean of log mu - log pi over the steps since the last entry; `age` is the mean staleness.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    task = load_task(setting.task)
    files = task.model, Path(setting.teacher or task.model)
    policy, reference = (load_model(directory, torch.device("cpu")) for directory in files)
    objective = make_objective(objective_section(setting.objective), longest_response=task.longest)
    resets = ReferenceSection(kind="reset", every=setting.reset_every) if setting.reset_every else ReferenceSection()
    learner = learner_of(policy, reference, setting.train_section(), objective, reference_config=resets)
    searcher = Searcher(policy, task, setting)
    source: PaperBuffer | ExactStaleness
    if setting.sync_every:
        source = PaperBuffer(searcher, setting)
    else:
        frozen = load_model(explorer_model(setting.explorer), torch.device("cpu")) if setting.explorer else None
        explorer = Searcher(frozen, task, setting.replace(seed=setting.seed + 1000)) if frozen else None
        source = ExactStaleness(searcher, setting, explorer)
    problems = task.held_out[setting.part]
    found = [measure(policy, task, problems)]
    every = setting.steps // MEASUREMENTS
    drifts, ages = [0.0], [0.0]
    passed: list[tuple[float, float]] = []
    for step in range(setting.steps):
        groups = source.batch(step)
        metrics = learner.step(as_batch(groups, step)).metrics
        age = float(np.mean([step - response.step for group in groups for response in group]))
        passed.append((-metrics["log_ratio_mean"], age))
        if (step + 1) % every == 0:
            found.append(measure(policy, task, problems))
            drift, age = np.mean(passed, axis=0)
            drifts.append(float(drift))
            ages.append(float(age))
            passed.clear()
    columns = {name: [getattr(one, name) for one in found] for name in ("reward", "greedy", "pass_at_8")}
    columns |= {"drift": drifts, "age": ages}
    rounded = {name: [round(value, 4) for value in values] for name, values in columns.items()}
    return {**dataclasses.asdict(setting), **rounded, "cpu_seconds": round(time.process_time() - started, 1)}
