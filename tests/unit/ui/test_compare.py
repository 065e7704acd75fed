"""Several runs on one page: curves over each other, results, and the settings that differ."""

import re

import pytest

from tba.tests.helpers.browser import client
from tba.tests.helpers.buffer import change
from tba.ui.charts import Chart, Series, overlay


@pytest.fixture
def browser(filled, tmp_path):
    """A browser of three runs, `test`, `test~2` with another reward and learning rate, and `test~3`, as the first."""
    for name in ("a", "b", "c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "buffer.sqlite").write_bytes(filled.read_bytes())
        sql = "UPDATE batches SET metrics = json_set(metrics, '$.reward_mean', ?)"
        change(tmp_path / "runs" / name / "buffer.sqlite", (sql, [0.75 if name == "b" else 0.25]))
    rate = "UPDATE starts SET config = json_set(config, '$.train.learning_rate', 0.125)"
    change(tmp_path / "runs/b/buffer.sqlite", rate)
    return client(tmp_path / "runs")


def test_runs_have_their_results_side_by_side_and_the_settings_that_differ(browser):
    page = browser.get("/r/test/compare?kind=runs&b=test~2&b=test~3")
    assert page.status_code == 200
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.text.split("<tr>")[1:]]
    cells = {row[0]: row[1:] for row in rows if row}
    assert cells["trajectories"] == ["7", "7", "7"]
    assert cells["train.learning_rate"][1] == "0.125"
    assert {name for name in cells if "." in name} == {"train.learning_rate"}
    assert next(values for name, values in cells.items() if name.startswith("Reward, training batch")) == [
        "0.25",
        "0.75",
        "0.25",
    ]


def test_the_curves_of_all_runs_share_a_chart(browser):
    charts = browser.get("/r/test/compare.json?b=test~2&b=test~3").json()
    reward = next(chart for chart in charts if chart["title"] == "Reward")
    assert [one["label"] for one in reward["series"]] == [
        f"{run}: training batch" for run in ("test", "test~2", "test~3")
    ]
    assert [one["values"] for one in reward["series"]] == [[0.25], [0.75], [0.25]]


def test_curves_over_different_steps_keep_their_own():
    runs = [("a", [Chart("Loss", "", [0, 2], [Series("loss", [1.0, 3.0])])]),
            ("b", [Chart("Loss", "", [1, 2], [Series("loss", [5.0, None])]), Chart("KL", "", [1], [])])]  # fmt: skip
    loss, kl = overlay(runs)
    assert (loss.steps, [one.values for one in loss.series]) == ([0, 1, 2], [[1.0, None, 3.0], [None, 5.0, None]])
    assert kl.steps == [1]


@pytest.mark.parametrize("address", ["/r/test/compare?kind=runs&b=no", "/r/test/compare.json?b=no"])
def test_an_unknown_run_is_not_compared(browser, address):
    page = browser.get(address)
    assert (page.status_code, "there is no run no here" in page.text) == (404, True)


def test_a_single_run_says_how_to_show_several(filled):
    page = client(filled).get("/r/test/compare?kind=runs")
    assert "tba ui runs/a runs/b" in page.text
