"""Warnings before a run is lost, by the metrics of its steps."""

import re
from pathlib import Path
from typing import Any

import pytest

import tba
from tba.common.config import ObjectiveSection
from tba.trainer.metrics.health import Health, limits


def watch(name: str = "tb", dtype: str = "float32", **keys) -> Health:
    return Health(ObjectiveSection.model_validate({"name": name, **keys}), dtype)


def after(health: Health, steps: range, *, largest_reward: float = 1.0, **metrics: float) -> str:
    """Return the warning after steps with these metrics."""
    fields = {"log_ratio_positive": 0.0, "log_z": 5.0, "beta": 0.1, "response_tokens_mean": 5.0} | metrics
    for step in steps:
        health.update(step, fields, largest_reward)
    return health.warning


LOST = "stale responses with a reward above the mean of their prompt have lost 1.2 nats: lower train.learning_rate"
MOVED = "20% of the probability of stale responses has moved to responses that were never sampled: lower "
SIGNS = "engine and trainer differ by 1.5 nats per token for the same weights"
# The settings, the number of steps, their metrics, and a part of the warning; none if it is empty.
WARNINGS: list[tuple[dict[str, Any], int, dict[str, float], str]] = [
    ({"name": "dr_grpo"}, 5, {"log_ratio_positive": -1.2}, f"{LOST}, or set objective.imitation = 1"),
    # Where imitation is on or impossible.
    ({"name": "tb_stale"}, 5, {"log_ratio_positive": -1.2}, f"{LOST} or buffer.max_staleness"),
    ({"name": "dr_grpo", "imitation": 0.5}, 5, {"log_ratio_positive": -1.2}, f"{LOST} or buffer.max_staleness"),
    ({"name": "grpo"}, 5, {"log_ratio_positive": -1.2}, f"{LOST} or buffer.max_staleness"),
    # The first steps say too little.
    ({}, 4, {"log_ratio_positive": -9.0}, ""),
    # Long responses may lose more by rounding.
    ({}, 9, {"log_ratio_positive": -3.0, "response_tokens_mean": 200}, "have lost 3.0 nats"),
    ({}, 9, {"log_ratio_positive": -3.0, "response_tokens_mean": 1000}, ""),
    ({}, 5, {"sampled_mass": 0.95, "policy_mass": 0.85}, ""),
    ({}, 5, {"sampled_mass": 0.95, "policy_mass": 0.76}, f'{MOVED}train.learning_rate, or set objective.name = "tb_st'),
    # Where sampled answers are a small part of all.
    ({}, 9, {"sampled_mass": 0.4, "policy_mass": 0.01}, ""),
    ({}, 9, {"log_z": 10.4}, ""),
    ({}, 9, {"log_z": 13.2}, "the mean log Z of 13.2 is above its bound of 10.0, the largest reward / beta: lower"),
    ({}, 5, {"log_z": 9.0, "largest_reward": 0.0}, "bound of 0.0"),
    ({"dtype": "bfloat16"}, 1, {"mismatch_mean": 0.04}, ""),
    ({"dtype": "bfloat16"}, 8, {"mismatch_mean": 0.2}, "engine and trainer differ by 0.2"),
    # One of 4,000 tokens with another position: the mean is healthy.
    ({}, 1, {"mismatch_mean": 1.6 / 4000, "mismatch_max": 1.6}, "engine and trainer differ by 1.6 nats at one token"),
    ({"dtype": "bfloat16"}, 9, {"mismatch_mean": 0.02, "mismatch_max": 3.0}, ""),
    # Two at once.
    ({"name": "dr_grpo"}, 5, {"log_ratio_positive": -1.2, "mismatch_mean": 1.5}, f"imitation = 1; {SIGNS}"),
]


@pytest.mark.parametrize(("settings", "steps", "metrics", "words"), WARNINGS)
def test_what_exceeds_its_limit_is_reported_with_the_remedy(caplog, settings, steps, metrics, words):
    warning = after(watch(**settings), range(steps), **metrics)
    assert words in warning
    assert bool(warning) is bool(words) is bool(caplog.messages)
    assert all(message in warning for message in caplog.messages)


def test_the_bound_is_that_of_the_largest_reward_so_far():
    health = watch()
    after(health, range(5), log_z=-5.0, largest_reward=1.0)
    assert after(health, range(5, 40), log_z=9.0, largest_reward=0.0) == ""


def test_the_bound_of_log_z_does_not_hold_for_data_of_another_temperature():
    """Of fresh data the estimate is KL(pi_T || pi) - KL(pi_T || ref) + mean r / beta."""
    health = watch()
    for step in range(9):
        fields = {"log_z": 13.2, "beta": 0.1, "response_tokens_mean": 5.0}
        health.update(step, fields, 1.0, at_temperature_1=False)
    assert health.warning == ""


def test_one_batch_gives_no_warning():
    health = watch()
    after(health, range(20), log_ratio_positive=0.2)
    assert after(health, range(20, 21), log_ratio_positive=-9.0) == ""


def test_a_warning_ends_with_its_cause_and_is_logged_again_after_a_hundred_steps(caplog):
    health = watch()
    after(health, range(150), log_ratio_positive=-2.0)
    assert caplog.text.count("have lost 2.0 nats") == 2
    assert after(health, range(150, 180)) == ""
    assert after(health, range(180, 190), log_ratio_positive=-9.0) != ""
    assert caplog.text.count("have lost") == 2


def test_a_skipped_step_and_a_run_without_reference_give_no_warning():
    health = watch()
    health.update(0, {"skipped": 1.0}, float("inf"))
    assert after(health, range(1, 9)) == ""
    health.update(9, {"log_ratio_positive": 0.0, "response_tokens_mean": 5.0}, 1.0)
    assert health.warning == ""


DOCUMENT = (Path(tba.__file__).parent / "docs/metrics.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?:above|below|at least|more than) (?:about )?[−-]?(\d[\d.e-]*\d|\d)")


def documented_limits():
    """By metric, the numbers that the column "when to worry" names."""
    rows = [
        line.strip("| ").split(" | ") for line in DOCUMENT.split("## Warnings")[0].splitlines() if line[:3] == "| `"
    ]
    found: dict[str, list[float]] = {}
    for row in rows:
        first, *others = re.findall(r"`(\w+)`", row[0])
        # `_max` after `x_mean` is `x_max`.
        names = [first, *(first.rpartition("_")[0] + one if one[0] == "_" else one for one in others)]
        found |= {name: [float(one) for one in NUMBER.findall(row[-1])] for name in names}
    return found


def test_every_limit_that_the_page_of_metrics_names_has_its_rule():
    exact, rounded = limits("float32"), limits("bfloat16")
    rules = {name: sorted({one[name][0] for one in (exact, rounded) if name in one}) for name in exact}
    assert not re.search(r"\| as `\w+` \|", DOCUMENT.replace("as `log_ratio_std` |", "")), "a limit by reference"
    assert {name: numbers for name, numbers in documented_limits().items() if numbers} == rules
    signs = re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("## Warnings")[1].split("## ")[0], re.M)
    assert set(signs) == {"policy_mass", "log_ratio_positive", "log_z"}


@pytest.mark.parametrize("name", limits("float32"))
def test_a_metric_above_its_limit_is_reported_with_its_own_remedy(name, caplog):
    limit, steps, _ = limits("float32")[name]
    assert after(watch(), range(9), **{name: 0.9 * limit}) == ""
    warning = after(watch(), range(steps), **{name: 3 * limit})
    assert f"above {limit:g}" in warning or f"above {limit:.0%}" in warning
    assert caplog.text.count(warning) == 1
