"""Learning rate and beta as pure functions of the step, so that a resume needs no scheduler state."""

from collections.abc import Callable

import torch
from transformers import get_scheduler

from tba.common.config import TrainSection
from tba.common.log import get_logger

log = get_logger(__name__)

_NAMES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "warmup_stable_decay",
}


def learning_rate_schedule(config: TrainSection) -> Callable[[int], float]:
    """Return the learning rate as a function of the number of updates made before.

    The schedules of transformers are stateful objects around a pure function; only that function is used.
    """
    warmup, decay = _phases(config)
    scheduler = get_scheduler(
        _NAMES[config.schedule],
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=config.steps,
        scheduler_specific_kwargs={"num_decay_steps": decay} if config.schedule == "wsd" else None,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return lambda step: config.learning_rate * factor(step)


def _phases(config: TrainSection) -> tuple[int, int]:
    """Return the steps of warm-up and of decay. Warns if a setting does not fit into the run; `auto` always fits."""
    steps = config.steps
    warmup = min(50, steps // 10) if config.warmup_steps == "auto" else config.warmup_steps
    if warmup >= steps:
        log.warning(
            "the learning rate never reaches its peak: train.warmup_steps is not less than the steps of this run",
            warmup_steps=warmup,
            steps=steps,
        )
    left = max(steps - warmup, 0)
    if config.decay_steps == "auto":
        return warmup, min(500, steps // 2, left)
    # With a decay longer than the run, the schedule of transformers would start in the middle of its cosine.
    if config.schedule == "wsd" and config.decay_steps > left:
        log.warning("train.decay_steps is shortened to fit into this run", decay_steps=left, set=config.decay_steps)
    return warmup, min(config.decay_steps, left)


def beta_at(config: TrainSection, step: int) -> float:
    """Return the KL coefficient of the update after `step` updates: linear, then constant.

    With `beta_anneal_stop` the annealing stops early, and beta jumps to its final value.
    """
    stop = config.beta_anneal_stop
    if step >= config.beta_anneal_steps or (stop != "off" and step >= stop):
        return config.beta_final
    return config.beta + (config.beta_final - config.beta) * step / config.beta_anneal_steps
