"""One run: a setting in, a result out. `Learner` makes the updates, as in `tba train`."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from benchmarks.off_policy.exam import measure
from benchmarks.off_policy.setting import Setting, objective_section
from benchmarks.off_policy.sources import Group, make_source, mean_age
from benchmarks.off_policy.tasks import load_task
from tba.common.config import ReferenceSection
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives.from_config import make_objective
from tba.trainer.step.learner import Learner

# Measurements in a run, after the one before the first step.
MEASUREMENTS = 8


def run(setting: Setting) -> dict[str, object]:
    """Train once. Returns the columns of `results.Result` after those of the setting.

    A column has one entry before the first step and one after each eighth of the run. `drift` is KL(sampler || policy)
    of whole responses, the mean of log mu - log pi over the steps since the last entry; `age` is the mean staleness.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    task = load_task(setting.task)
    policy, reference = (load_model(task.model, torch.device("cpu")) for _ in range(2))
    objective = make_objective(objective_section(setting.objective), longest_response=task.longest)
    resets = ReferenceSection(kind="reset", every=setting.reset_every) if setting.reset_every else ReferenceSection()
    learner = Learner(
        policy, reference, setting.train_section(), objective, autocast=False, reference_config=resets
    )  # fmt: skip
    source, problems = make_source(policy, task, setting), task.held_out[setting.part]
    found = [measure(policy, task, problems)]
    every = setting.steps // MEASUREMENTS
    drifts, ages = [0.0], [0.0]
    passed: list[tuple[float, float]] = []
    for step in range(setting.steps):
        groups = source.batch(step)
        metrics = learner.step(as_batch(groups, step)).metrics
        passed.append((-metrics["log_ratio_mean"], mean_age(groups, step)))
        if (step + 1) % every == 0:
            found.append(measure(policy, task, problems))
            drift, age = np.mean(passed, axis=0)
            drifts.append(float(drift))
            ages.append(float(age))
            passed.clear()
    columns = {name: [getattr(one, name) for one in found] for name in ("reward", "greedy", "pass_at_8")}
    columns |= {"drift": drifts, "age": ages}
    rounded = {name: [round(value, 4) for value in values] for name, values in columns.items()}
    return {**asdict(setting), **rounded, "cpu_seconds": round(time.process_time() - started, 1)}


def as_batch(groups: Sequence[Group], step: int) -> TrainBatch:
    """Return the groups as the trainer's batch. Reference log-probabilities are left to the learner."""
    shape = (len(groups), len(groups[0]))
    responses = [response for group in groups for response in group]
    rows = [
        Row(
            id=step * len(responses) + number,
            prompt_ids=np.array(response.problem.prompt, np.int32),
            response_ids=np.array(response.tokens, np.int32),
            sampling_logprobs=response.logprobs.astype(np.float32),
            loss_mask=np.ones(len(response.tokens), np.uint8),
            on_policy=response.step == step,
        )
        for number, response in enumerate(responses)
    ]
    return TrainBatch(
        step=step,
        rows=rows,
        reward_BK=torch.tensor([response.reward for response in responses], dtype=torch.float64).view(shape),
        reference_BK=torch.full(shape, torch.nan, dtype=torch.float64),
        staleness_BK=torch.tensor([step - response.step for response in responses], dtype=torch.float64).view(shape),
    )
