"""Pages of `tba ui`: what training does not use, the strip of tokens, and several runs over each other."""

import html
import re
from pathlib import Path

import numpy as np
import pytest

from tba.common.evaluations import record_evaluations
from tba.tests.helpers.browser import client, copies, select
from tba.tests.helpers.buffer import change
from tba.tests.helpers.puts import log_ratios, numbers_of
from tba.ui.pages.trajectories import strip


def test_lengths_count_what_was_generated_and_what_was_trained_on(filled):
    # One response is in a second slot, and one in none.
    change(
        filled,
        "UPDATE consumption_rows SET trajectory = 1 WHERE trajectory = 2",
        "UPDATE trajectory_rows SET response_tokens = 700, created_at = 5 WHERE id = 1",
        "UPDATE batches SET trained_at = 12",
    )
    failed, short, long = select(filled, "SELECT * FROM lengths ORDER BY least_tokens")
    assert (failed["least_tokens"], failed["errors"], failed["never_trained"], failed["mean_reward"]) == (0, 1, 1, None)
    assert (short["least_tokens"], short["trajectories"], short["never_trained"]) == (2, 5, 1)
    assert (short["response_tokens"], short["used_tokens"], short["trained_tokens"]) == (15, 12, 12)
    assert (long["least_tokens"], long["used_tokens"], long["trained_tokens"]) == (512, 700, 1400)
    assert long["mean_seconds_to_training"] == 7


def test_lengths_of_a_long_run_are_those_of_an_even_sample(filled):
    change(
        filled,
        """INSERT INTO trajectory_rows (run, prompt, sender, sequence, policy_version, reward, reward_parts,
           stop_reason, prompt_tokens, response_tokens, dedup_hash, sampling, created_at, received_at,
           generation_seconds, payload_bytes, turns, metadata)
           WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 39999)
           SELECT 1, 1, 1, 1000 + i, 0, 0.5, '{}',
           'eos', 1, 4 + 60 * (i / 20000), 0, '{}', i, 1e10 + i, 0, 0, '[]', '{}' FROM n""",
    )
    counts = [row["trajectories"] for row in select(filled, "SELECT trajectories FROM lengths WHERE least_tokens > 3")]
    assert len(counts) == 2
    assert 8000 <= sum(counts) <= 10_001
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


@pytest.fixture
def trained_twice(harness):
    """A database whose trajectory 1, of two tokens, was trained on by steps 0 and 2, and trajectory 2 by step 1."""
    buffer = harness(fill=(1, 3))
    for step in range(3):
        buffer.sample(step, prompts=1, samples=1)
    database = buffer.store.database
    with buffer.store.transaction():
        database.execute("UPDATE consumption_rows SET trajectory = 1 + (batch = 2), staleness = batch - 1")
    for step, (row, mismatch) in enumerate([([0.005, -0.5], 0.2525), (None, None), ([1.5, -2.0], None)]):
        each = log_ratios(row)
        buffer.report(step, rows=numbers_of(1, mismatch=[mismatch], token_log_ratios=each))
    buffer.store.close()
    return buffer.store.path


def strip_of(page):
    """Return the colour and the tooltip of each token, and the text around the strip without tags."""
    text = page.text[page.text.index("Tokens</h2>") : page.text.index("Training</h2>")]
    about = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", text)))
    return re.findall(r'<span class="([^"]*)" title="([^"]*)">', text), about


def test_tokens_are_coloured_by_the_mismatch_of_the_newest_step_or_of_another(trained_twice):
    browser = client(trained_twice)
    tokens, about = strip_of(browser.get("/r/test/trajectories/1?colour=mismatch"))
    assert [style for style, _ in tokens] == ["r6", "r0"]
    assert [title.rpartition(", ")[2] for _, title in tokens] == ["log-ratio +1.5 nats", "log-ratio -2 nats"]
    assert "log π of the trainer at step 2 − log μ of the searcher: the mismatch of trainer and engine, and" in about
    assert "training changed in the 2 steps since it was sampled. Steps: 0 2" in about
    tokens, about = strip_of(browser.get("/r/test/trajectories/1?colour=mismatch&step=0"))
    assert [style for style, _ in tokens] == ["r3", "r1"]
    assert "the mismatch of trainer and engine, which had the same weights." in about


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("2?colour=mismatch", "No trainer has reported log-ratios of these tokens."),
        ("3?colour=mismatch", "No trainer has reported log-ratios of these tokens: no step has trained on them."),
        ("1?colour=mismatch&step=1", "Step 1 has reported no log-ratios of these tokens. Steps: 0 2"),
        # They are not as many as tokens.
        ("1?colour=mismatch", "Step 2 has reported no log-ratios of these tokens. Steps: 0 2"),
    ],
)
def test_a_strip_without_reported_log_ratios_has_no_colours_and_says_so(trained_twice, address, sentence):
    change(trained_twice, "UPDATE consumption_rows SET token_log_ratios = x'000000' WHERE batch = 3")
    tokens, about = strip_of(client(trained_twice).get(f"/r/test/trajectories/{address}"))
    assert [style for style, _ in tokens] == ["", ""]
    assert sentence in about


def test_the_end_token_has_its_name():
    def decode(ids, skip=True):
        return "".join({5: "7", 1: "" if skip else "<eos>"}.get(id_, "") for id_ in ids)

    known = {"response_ids": [5, 1, 2], "version_runs": [[0, 3]], "loss_mask": None, "logprobs": [-1.0, 0.0, 0.0]}
    assert [token.text for token in strip(known, decode, colour="logprob")] == ["7", "<eos>", "‹2›"]


def test_a_masked_token_has_no_log_ratio(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(lease=0, loss_mask=np.array([1, 0, 1], np.uint8))], 0)
    buffer.sample(0, prompts=1, samples=1)
    buffer.report(0, rows=numbers_of(1, token_log_ratios=log_ratios([0.5, 0.0, 0.5])))
    buffer.store.close()
    tokens, _ = strip_of(client(buffer.store.path).get("/r/test/trajectories/1?colour=mismatch"))
    assert [style for style, _ in tokens] == ["r5", "masked", "r5"]
    assert ["log-ratio" in title for _, title in tokens] == [True, False, True]


def test_a_strip_of_no_such_colour_step_or_token_is_refused(filled):
    browser = client(filled)
    for query in ("colour=reward", "colour=mismatch&step=x", "colour=mismatch&step=", "token=-1"):
        page = browser.get(f"/r/test/trajectories/1?{query}")
        assert page.status_code == 400
        assert "colour is logprob, version or mismatch, step and token are numbers" in page.text


def test_marked_runs_have_their_results_side_by_side_their_charts_and_the_settings_that_differ(filled, tmp_path):
    runs = copies(filled, tmp_path / "runs", "a", "b", "c")
    for path, reward in zip(runs, [0.25, 0.75, 0.25], strict=True):
        change(path, ("UPDATE batches SET metrics = json_set(metrics, '$.reward_mean', ?)", [reward]))
    change(runs[1], "UPDATE starts SET config = json_set(config, '$.train.learning_rate', 0.125)")
    browser = client(tmp_path / "runs")
    page = browser.get("/?b=test&b=test~b&b=test~c")
    assert (page.status_code, page.url.path) == (200, "/r/test/compare")
    sources = re.findall(r'data-source="([^"]*)"', page.text)
    charts = [browser.get(source).json()["charts"] for source in sources]
    assert [found[0]["series"][0]["values"] for found in charts] == [[0.25], [0.75], [0.25]]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in page.text.split("<tr>")[1:]]
    cells = {row[0]: row[1:] for row in rows if row}
    assert cells["trajectories"] == ["7", "7", "7"]
    assert cells["train.learning_rate"][1] == "0.125"
    assert {name for name in cells if "." in name} == {"train.learning_rate"}
    rewards = next(values for name, values in cells.items() if name.startswith("Reward, training batch"))
    assert rewards == ["0.25", "0.75", "0.25"]


def test_charts_have_other_axes_restarts_and_the_metrics_that_the_address_asks_for(harness):
    buffer = harness(fill=(1, 2))
    for step in range(3):
        buffer.sample(step, prompts=1, samples=1)
        buffer.report(step)
    buffer.store.close()
    again = "INSERT INTO starts (run, started_at, config, software) VALUES (1, 3601, '{}', '{}')"
    metrics = """json_object('reward_mean', step / 4.0, 'tokens', 10, 'seconds_wait', 1.5, 'learning_rate', 1e-5,
        'reuse_mean', step * 0.5)"""
    change(buffer.store.path, f"UPDATE batches SET trained_at = 1800 * (step + 1), metrics = {metrics}", again)
    browser = client(buffer.store.path)
    found = browser.get("/r/test/charts.json?metric=seconds_wait&metric=none").json()
    assert [found[name] for name in ("steps", "tokens", "restarts")] == [[0, 1, 2], [10, 20, 30], [2]]
    assert found["hours"] == [0, 0.5, 1]
    assert {chart["title"]: chart["series"][0]["values"] for chart in found["charts"]} == {
        "Reward": [0, 0.25, 0.5], "Learning rate": [1e-5] * 3, "Reuse of data": [0, 0.5, 1], "seconds_wait": [1.5] * 3
    }  # fmt: skip
    steps = browser.get("/r/test/steps").text
    assert re.findall(r">reuse<", steps)
    assert re.findall(r'<td class="n">(\d\.\d00)</td>\n<td class="n wide">', steps) == ["1.000", "0.500", "0.000"]
    page = browser.get("/r/test?metric=seconds_wait").text
    assert 'value="seconds_wait" checked' in page
    assert "A dashed line is a restart: at step 2." in re.sub(r"\s+", " ", page)
    # After the last step there is no page of a step: a click there opens the evaluations.
    last = {"run": "test", "version": 3, "step": 3, "prompts": 2, "accuracy": 0.5}
    record_evaluations(buffer.store.path.parent, [last])
    found = browser.get("/r/test/charts.json").json()
    assert (found["steps"], found["last"], browser.get("/r/test/steps/3").status_code) == ([0, 1, 2, 3], 2, 404)
    assert 'data-evaluations="/r/test/held-out"' in page


def test_an_archived_trajectory_has_the_page_that_it_had_and_says_if_its_file_is_gone(trained_twice, tba_buffer):
    addresses = ["/r/test/trajectories/1", *(f"/r/test/trajectories/1?colour=mismatch&step={step}" for step in (0, 2))]
    before = [strip_of(client(trained_twice).get(address)) for address in addresses]
    named = ("-b", trained_twice, "--set", "run.name=test", "--set", "buffer.prompt_cap=1", "--keep-steps", 0)
    done = tba_buffer("archive", "old", *named, "--json").json
    assert done["moved"] == 2
    assert [strip_of(client(trained_twice).get(address)) for address in addresses] == before
    Path(done["files"][0].removeprefix("file://")).unlink()
    page = client(trained_twice).get(addresses[0])
    assert (page.status_code, f"Its tokens cannot be read: the archive {done['files'][0]}" in page.text) == (200, True)
