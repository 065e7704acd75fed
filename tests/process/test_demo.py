"""`make demo`: the held-out greedy accuracy rises, with every seed and both engines."""

import json
import re
import sys
from importlib.util import find_spec

import pytest

from tba.tests.helpers.buffer import ask
from tba.tests.helpers.checks import not_none
from tba.tests.process.conftest import changed, free_port, run_example
from tba.tests.runner import size

ROOT_CONFIG = "examples/arithmetic/demo.toml"
# A searcher less starts a process less, and the first and the last snapshot are enough to evaluate.
FEWER = ("train.keep_snapshot_every=80", "search.cpu_searchers=1")


def run_demo(tba, directory, root, *assignments: str):
    """Run the demo's configuration in another directory and on a free port."""
    sets = [f"run.dir={directory}", f"buffer.address=tcp://127.0.0.1:{free_port()}", *assignments]
    return tba("run", ROOT_CONFIG, *changed(*sets), timeout=580, cwd=root)


def check_gain(result, directory, points: float) -> None:
    assert result.returncode == 0, result.stderr
    evaluations = [json.loads(line) for line in (directory / "eval.jsonl").read_text().splitlines()]
    before, after = evaluations[0], evaluations[-1]
    assert (before["step"], after["step"]) == (0, len((directory / "metrics.jsonl").read_text().splitlines()))
    assert before["prompts"] >= 256
    assert 100 * (after["accuracy"] - before["accuracy"]) >= points
    printed = not_none(re.search(r"held-out greedy accuracy: ([\d.]+)% before, ([\d.]+)% after", result.stdout))
    assert [float(n) for n in printed.groups()] == pytest.approx(
        [100 * before["accuracy"], 100 * after["accuracy"]], abs=0.06
    )


@pytest.mark.parametrize("seed", size([0], [0, 1, 2]))
def test_the_demo_gains_25_points_on_held_out_problems(tba, tmp_path, pytestconfig, seed):
    directory = tmp_path / "demo"
    settings = size(("train.steps=48", *FEWER), ())
    result = run_demo(tba, directory, pytestconfig.rootpath, f"run.seed={seed}", *settings)
    check_gain(result, directory, points=25)
    assert (directory / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(" " in sys.prefix, reason="torch does not quote the path of this environment when it compiles")
def test_the_demo_gains_points_on_vllm(tba, tmp_path, pytestconfig):
    directory = tmp_path / "demo"
    # test_engine_life.py has a compiled engine.
    settings = size(("train.steps=25", "search.enforce_eager=true", *FEWER), ())
    result = run_demo(tba, directory, pytestconfig.rootpath, "search.engine=vllm", *settings)
    check_gain(result, directory, points=size(5, 25))
    versions = "SELECT COUNT(DISTINCT policy_version) FROM trajectory_rows"
    assert ask(directory / "buffer.sqlite", versions)[0][0] > 3


def test_the_algorithm_on_one_page_learns(capsys):
    run_example("one_page.py", "--steps", 15)
    shown = capsys.readouterr()
    before, after = [float(found) for found in re.findall(r"accuracy: ([\d.]+)%", shown.out)]
    assert shown.err == ""
    assert before == pytest.approx(40.2, abs=1)
    assert after >= before + 10
