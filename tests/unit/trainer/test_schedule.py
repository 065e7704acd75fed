"""Learning rate and beta as functions of the step."""

import math

import pytest

from tba.common.config import TrainSection
from tba.trainer.step.learner import beta_at, learning_rate_schedule


def rates(at: list[int], **keys) -> list[float]:
    schedule = learning_rate_schedule(TrainSection.model_validate({"learning_rate": 1.0, **keys}))
    return [schedule(step) for step in at]


def test_wsd_warms_up_stays_constant_and_decays_along_a_cosine():
    found = rates([0, 25, 50, 300, 500, 750, 1000], steps=1000, warmup_steps=50, decay_steps=500, schedule="wsd")
    assert found == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0], abs=1e-12)


def test_a_wsd_decay_longer_than_the_run_is_shortened():
    found = rates([10, 20, 29], steps=30, warmup_steps=10, decay_steps=500, schedule="wsd")
    assert found == pytest.approx([1, 0.5, 0.5 * (1 + math.cos(math.pi * 19 / 20))], abs=1e-12)


@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1000, 50, 500), (200, 20, 100), (5, 0, 2), (2, 0, 1)])
def test_defaults_fit_into_the_run_without_a_warning(caplog, steps, warmup, decay):
    rate = learning_rate_schedule(TrainSection(learning_rate=1.0, steps=steps))
    assert rate(warmup) == 1.0
    assert all(rate(step) < 1 for step in range(warmup))
    assert rate(steps - decay) == 1.0
    assert all(rate(step) < 1 for step in range(steps - decay + 1, steps))
    assert caplog.records == []


def test_a_warm_up_longer_than_the_run_is_kept_with_a_warning(caplog):
    assert rates([9], steps=10, warmup_steps=20, schedule="constant") == [0.45]
    assert "the learning rate never reaches its peak: train.warmup_steps" in caplog.text
    assert "decay_steps" not in caplog.text


def test_constant_linear_and_cosine_schedules_follow_a_linear_warm_up():
    keys = {"steps": 110, "warmup_steps": 10}
    assert rates([5, 10, 109], schedule="constant", **keys) == pytest.approx([0.5, 1, 1])
    assert rates([5, 10, 60, 110], schedule="linear", **keys) == pytest.approx([0.5, 1, 0.5, 0])
    assert rates([5, 10, 60, 110], schedule="cosine", **keys) == pytest.approx([0.5, 1, 0.5, 0])


def test_beta_changes_linearly_to_its_final_value_and_jumps_there_without_annealing_or_where_it_stops_early():
    config = TrainSection(beta=0.012, beta_final=0.004, beta_anneal_steps=500)
    assert [beta_at(config, step) for step in (0, 250, 500, 900)] == pytest.approx([0.012, 0.008, 0.004, 0.004])
    assert beta_at(TrainSection(beta=0.5, beta_final=0.1, beta_anneal_steps=0), 0) == 0.1
    config = TrainSection(beta=1.0, beta_final=0.05, beta_anneal_steps=128, beta_anneal_stop=32)
    assert [beta_at(config, step) for step in (0, 31, 32)] == pytest.approx([1.0, 1 - 0.95 * 31 / 128, 0.05])
