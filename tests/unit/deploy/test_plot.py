"""The evaluations of a run, and the axis of its plot."""

import json

import pytest

from tba.common.evaluations import EVALUATIONS_FILE, read_evaluations, read_json_lines, record_evaluations
from tba.deploy.plot import METRICS_FILE, draw


def row(version, accuracy, *, run="r", prompts=1000, prompt_set="all"):
    return {
        "run": run,
        "version": version,
        "step": 10 * version,
        "accuracy": accuracy,
        "prompts": prompts,
        "prompt_set": prompt_set,
    }


def test_an_evaluation_replaces_only_one_of_the_same_snapshot_on_the_same_prompts(tmp_path):
    first = [row(0, 0.1), row(1, 0.5)]
    record_evaluations(tmp_path, first)
    record_evaluations(tmp_path, [row(1, 1.0, prompts=2, prompt_set="few"), row(1, 0.9, run="other"), row(1, 0.6)])
    assert len(read_json_lines(tmp_path / EVALUATIONS_FILE)) == 4
    assert [one["accuracy"] for one in read_evaluations(tmp_path, "r")] == [0.1, 0.6]


def test_the_evaluations_of_a_run_are_on_the_prompts_of_its_newest_snapshot(tmp_path):
    record_evaluations(tmp_path, [row(0, 0.1), row(0, 0.2, prompt_set="new", prompts=10)])
    record_evaluations(tmp_path, [row(2, 0.7, prompt_set="new", prompts=10)])
    assert [one["accuracy"] for one in read_evaluations(tmp_path, "r")] == [0.2, 0.7]
    assert read_evaluations(tmp_path, "another") == []


@pytest.mark.slow
@pytest.mark.parametrize(("rewards", "fractions"), [([0.2, 0.9], True), ([-3.0, 7.5], False)])
def test_the_plot_shows_rewards_of_any_size(tmp_path, monkeypatch, rewards, fractions):
    plt = pytest.importorskip("matplotlib.pyplot")
    lines = [
        {"step": step, "reward_mean": reward, "staleness_mean": 0.0, "staleness_max": 0.0}
        for step, reward in enumerate(rewards)
    ]
    (tmp_path / METRICS_FILE).write_text("\n".join(map(json.dumps, lines)))
    axes = []
    monkeypatch.setattr(plt, "close", lambda figure: axes.extend(figure.axes))
    draw(tmp_path, run="r")
    low, high = axes[0].get_ylim()
    assert low <= min(rewards) < max(rewards) <= high
    assert ((low, high) == (0, 1)) == fractions
