"""The pieces of the benchmark of stale data: ages of the data, rates, the file of results, the measurements."""

import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmark(monkeypatch):
    """Import the modules of the benchmark, which is not a part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    names = ("setting", "sources", "results", "panels", "tasks", "sampling")
    return SimpleNamespace(**{name: importlib.import_module(f"benchmarks.off_policy.{name}") for name in names})


class RecordingSearcher:
    """Makes groups that know only the step of their weights, and rewards 0 and 1 in turn."""

    def groups(self, count, samples, step):
        return [[SimpleNamespace(step=step, reward=float(j % 2)) for j in range(samples)] for _ in range(count)]


def ages(source, setting):
    return [sorted({step - one.step for group in source.batch(step) for one in group}) for step in range(setting.steps)]


def test_exact_staleness_grows_to_its_value_and_stays(benchmark):
    setting = benchmark.setting.Setting(objective="tb", rate=1e-4, seed=1, beta=0.1, steps=8, staleness=3)
    source = benchmark.sources.ExactStaleness(RecordingSearcher(), setting)
    assert ages(source, setting) == [[0], [1], [2], [3], [3], [3], [3], [3]]


def test_recent_data_of_the_papers_buffer_is_at_most_2k_minus_1_steps_old(benchmark):
    setting = benchmark.setting.Setting(
        objective="tb", rate=1e-4, seed=1, beta=0.1, steps=40, sync_every=5, recency=1.0, generated=8, fill=2
    )
    found = ages(benchmark.sources.PaperBuffer(RecordingSearcher(), setting), setting)
    assert found[5:] == [[5 + step % 5] for step in range(5, 40)]


def test_the_file_of_results_returns_the_settings_that_were_written(benchmark, tmp_path):
    setting = benchmark.setting.Setting(objective="tba_prime:mean_kl=policy", rate=3e-5, seed=10, beta=0.1)
    columns = {name: [0.5, 0.75] for name in ("reward", "greedy", "pass_at_8", "drift", "age")}
    row = {"objective": setting.objective, "rate": 3e-5, "seed": 10, "beta": 0.1, **columns, "cpu_seconds": 1.0}
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(row) + "\n")
    results = benchmark.results.load(file)
    assert results[setting].gain == 0.25
    # What is in the file is not run, and nothing is started after the deadline.
    later = [setting, setting.replace(seed=11)]
    assert benchmark.results.complete(file, later, workers=1, deadline=time.monotonic() - 1) == results


def test_the_best_rate_is_chosen_by_all_seeds_of_the_sweep_and_by_no_other(benchmark):
    panels, setting = benchmark.panels, benchmark.setting
    template = setting.Setting(objective="tb", rate=1e-4, seed=10, beta=0.1)
    finals = dict(zip(panels.RATES, (0.5, 0.75, 0.625, 0.25), strict=True))
    results = {
        template.replace(rate=rate, seed=seed): SimpleNamespace(reward=[0.0, final])
        for rate, final in finals.items()
        for seed in setting.SWEEP_SEEDS
    }
    assert panels.best_rate(results, template) == 3e-5
    results.pop(template.replace(rate=3e-4, seed=setting.SWEEP_SEEDS[-1]))
    assert panels.best_rate(results, template) is None


def ended(benchmark, panel, ends, seeds):
    """Return results by setting, with the final reward by objective and column."""
    flat = {name: [0.5, 0.5] for name in ("greedy", "pass_at_8")} | {name: [0.0, 1.0] for name in ("drift", "age")}
    return {
        panel.template("arithmetic", objective, column).replace(seed=seed): benchmark.results.Result(
            reward=[0.5, end], cpu_seconds=30.0, **flat
        )
        for (objective, column), end in ends.items()
        for seed in seeds
    }


def test_gains_are_relative_to_fresh_data_of_the_objective_and_of_tb(benchmark):
    panels, report = benchmark.panels, importlib.import_module("benchmarks.off_policy.report")
    panel, seeds = panels.PANELS["staleness"], benchmark.setting.REPORT_SEEDS
    ends = {("tb", "fresh"): 0.75, ("dr_grpo", "fresh"): 0.625, ("dr_grpo", "D = 64"): 0.5625}
    results = ended(benchmark, panel, ends, seeds[:2])
    # A seed that has fresh data only has no part in the shares.
    results |= ended(benchmark, panel, {("dr_grpo", "fresh"): 1.0, ("tb", "fresh"): 1.0}, seeds[2:3])
    cells = list(panels.cells(panel, results, "arithmetic", ["tb", "dr_grpo"], list(panel.columns)))
    lines = report.table(results, cells, seeds)
    assert "| dr_grpo | D = 64 | 1e-04 (not swept) | 2 | 0.562 ± 0.000 | 50% | 25% | 0.500 |" in lines[4]
    assert "took 4 CPU minutes" in lines[-1]
