"""The evaluations of a run, and the axis of its plot."""

import json
from typing import Any

import pytest

from tba.common import run_files
from tba.common.evaluations import read_evaluations, read_json_lines, record_evaluations
from tba.deploy.launcher import before_and_after
from tba.deploy.plot import draw_curves, read_curve


def row(version, accuracy, *, run="r", prompts=1000, prompt_set="all"):
    measured = {"accuracy": accuracy, "prompts": prompts, "prompt_set": prompt_set}
    return {"run": run, "version": version, "step": 10 * version} | measured


def accuracies(directory, run="r"):
    return [one["accuracy"] for one in read_evaluations(directory, run)]


def test_an_evaluation_replaces_only_one_of_the_same_snapshot_on_the_same_prompts(tmp_path):
    record_evaluations(tmp_path, [row(0, 0.1), row(1, 0.5)])
    record_evaluations(tmp_path, [row(1, 1.0, prompts=2, prompt_set="few"), row(1, 0.9, run="other"), row(1, 0.6)])
    assert len(read_json_lines(tmp_path / run_files.EVALUATIONS)) == 4
    assert (accuracies(tmp_path), accuracies(tmp_path, "another")) == ([0.1, 0.6], [])
    # Those on the prompts of the newest snapshot.
    record_evaluations(tmp_path, [row(0, 0.2, prompt_set="new", prompts=10), row(2, 0.7, prompt_set="new", prompts=10)])
    assert accuracies(tmp_path) == [0.2, 0.7]


def test_an_evaluation_without_a_measurement_is_marked_and_replaces_no_measured_one(tmp_path):
    down = {"not_measured": "300 of 300 responses could not be scored: ConnectError"}
    without = {name: value for name, value in row(1, 0.0).items() if name != "accuracy"} | down
    record_evaluations(tmp_path, [row(0, 0.1), without])
    expected = f"held-out greedy accuracy: 10.0% before, not measured ({down['not_measured']}) after"
    assert before_and_after(read_evaluations(tmp_path, "r")) == expected
    record_evaluations(tmp_path, [row(1, 0.6)])
    record_evaluations(tmp_path, [without])
    assert accuracies(tmp_path) == [0.1, 0.6]


@pytest.fixture
def axes(monkeypatch):
    """The axes of all pictures that were drawn."""
    found: list[Any] = []
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: found.extend(figure.axes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rewards", "fractions"), [([0.2, 0.9], True), ([-3.0, 7.5], False)])
def test_the_plot_shows_rewards_of_any_size(tmp_path, axes, rewards, fractions):
    lines = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards)]
    (tmp_path / run_files.METRICS).write_text("\n".join(map(json.dumps, lines)))
    draw_curves([read_curve(tmp_path, "r")], tmp_path / "r.png")
    low, high = axes[0].get_ylim()
    assert low <= min(rewards) < max(rewards) <= high
    assert ((low, high) == (-0.02, 1.02)) == fractions


def write_run(directory, steps=4, seconds=2.0, tokens=10, evaluations=()):
    directory.mkdir()
    fixed = {"reward_mean": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0, "tokens": tokens}
    lines = [fixed | {"step": step, "time": 100 + seconds * step} for step in range(steps)]
    (directory / run_files.METRICS).write_text("\n".join(map(json.dumps, lines)))
    record_evaluations(directory, evaluations)
    return directory


def test_the_axes_count_from_the_first_step_and_evaluations_lie_after_the_last_step_before_them(tmp_path):
    curve = read_curve(write_run(tmp_path / "r", evaluations=[row(0, 0.1) | {"step": 0}, row(1, 0.2) | {"step": 3}]))
    assert curve.x("steps") == [0, 1, 2, 3]
    assert (curve.x("seconds"), curve.evaluated_x("seconds")) == ([0, 2, 4, 6], [0, 4])
    assert (curve.x("tokens"), curve.evaluated_x("tokens")) == ([10, 20, 30, 40], [0, 30])


@pytest.mark.slow
def test_several_runs_are_one_picture_with_the_fronts_that_they_have(tmp_path, axes):
    measured = {"sampled_reward": 0.4, "kl": 1.0, "distinct_2": 0.3, "intervals": {"accuracy": [0.0, 0.2]}}
    runs = [
        write_run(tmp_path / "a", evaluations=[row(0, 0.1) | measured, row(1, 0.2) | measured | {"kl": 2.0}]),
        write_run(tmp_path / "b"),
    ]
    picture = draw_curves([read_curve(run) for run in runs], tmp_path / "both.png", x="tokens")
    assert picture.stat().st_size > 1000
    labels = ["", "trained tokens", "KL to the reference (nats per response)", "distinct 2"]
    assert [axis.get_xlabel() for axis in axes] == labels
    assert [label for line in axes[0].lines if not (label := str(line.get_label())).startswith("_")] == ["a (r)", "b"]
    assert list(axes[2].lines[0].get_xdata()) == [1.0, 2.0]


@pytest.mark.slow
def test_a_report_is_of_the_run_that_the_command_names(tba_here, filled, tmp_path):
    """`filled` holds the run `test`; next to it are the metrics and an evaluation of the run `r`."""
    database = filled.rename(write_run(tmp_path / "r", evaluations=[row(0, 0.1)]) / "other.sqlite")
    for run in ("test", "r"):
        done = tba_here("report", database, "--run", run, "--out", f"{run}.PNG")
        assert (done.exit_code, (tmp_path / f"{run}.PNG").read_bytes()[1:4]) == (0, b"PNG"), done.message
    sets = {"run.dir": "elsewhere", "run.name": "test", "buffer.database": database}
    done = tba_here("report", *(f"--set={key}={value}" for key, value in sets.items()))
    assert done.output == f"{database.parent / 'report.html'}\n", done.message


REFUSED = {
    ("r", "--out", "x.jpg"): "--out x.jpg: name a file that ends in .html, or .png, .svg, .pdf for a picture",
    ("r", "--x", "hours"): "--x hours: choose steps, seconds, tokens",
    ("r", "r", "--out", "x.png", "--run", "r"): "--run names a run of one file",
    ("filled.sqlite", "--out", "x.png", "--run", "r"): "holds the runs test: name one with --run",
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.items())
def test_a_report_that_cannot_be_as_asked_is_refused(tba_here, filled, tmp_path, arguments, sentence):
    refused = tba_here("report", *arguments)
    assert (refused.exit_code, sentence in refused.message) == (2, True), refused.message
    assert not list(tmp_path.glob("x.*"))
