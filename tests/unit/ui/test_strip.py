"""The strip of tokens of a trajectory, coloured by the log-ratios that a trainer reported."""

import html
import re
from pathlib import Path

import numpy as np
import pytest

from tba.tests.helpers.browser import client
from tba.tests.helpers.buffer import change
from tba.tests.helpers.puts import log_ratios, numbers_of


@pytest.fixture
def trained_twice(harness):
    """A database whose trajectory 1, of two tokens, was trained on by steps 0 and 2, and trajectory 2 by step 1."""
    buffer = harness(fill=(1, 2))
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
    assert (
        "log π of the trainer at step 2 − log μ of the searcher: the mismatch of trainer and engine, and what" in about
    )
    assert "training changed in the 2 steps since it was sampled. Steps: 0 2" in about
    tokens, about = strip_of(browser.get("/r/test/trajectories/1?colour=mismatch&step=0"))
    assert [style for style, _ in tokens] == ["r3", "r1"]
    assert "the mismatch of trainer and engine, which had the same weights." in about


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("2?colour=mismatch", "No trainer has reported log-ratios of these tokens."),
        ("1?colour=mismatch&step=1", "Step 1 has reported no log-ratios of these tokens. Steps: 0 2"),
    ],
)
def test_a_strip_without_reported_log_ratios_has_no_colours_and_says_so(trained_twice, address, sentence):
    tokens, about = strip_of(client(trained_twice).get(f"/r/test/trajectories/{address}"))
    assert [style for style, _ in tokens] == ["", ""]
    assert sentence in about


def test_the_strip_of_a_trajectory_without_training_says_that_there_was_none(harness):
    buffer = harness(fill=(1, 2))
    buffer.store.close()
    _, about = strip_of(client(buffer.store.path).get("/r/test/trajectories/1?colour=mismatch"))
    assert "No trainer has reported log-ratios of these tokens: no step has trained on them." in about


def test_log_ratios_that_are_not_as_many_as_tokens_are_not_shown(trained_twice):
    change(trained_twice, "UPDATE consumption_rows SET token_log_ratios = x'000000' WHERE batch = 3")
    _, about = strip_of(client(trained_twice).get("/r/test/trajectories/1?colour=mismatch"))
    assert "Step 2 has reported no log-ratios of these tokens. Steps: 0 2" in about


def test_a_masked_token_has_no_log_ratio(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.put([trajectory(lease=0, loss_mask=np.array([1, 0, 1], np.uint8))], 0)
    buffer.sample(0, prompts=1, samples=1)
    buffer.report(0, rows=numbers_of(1, token_log_ratios=log_ratios([0.5, 0.0, 0.5])))
    buffer.store.close()
    tokens, _ = strip_of(client(buffer.store.path).get("/r/test/trajectories/1?colour=mismatch"))
    assert [style for style, _ in tokens] == ["r5", "masked", "r5"]
    assert ["log-ratio" in title for _, title in tokens] == [True, False, True]


@pytest.mark.parametrize("query", ["colour=reward", "colour=mismatch&step=x", "colour=mismatch&step=", "token=-1"])
def test_a_strip_of_no_such_colour_step_or_token_is_refused(filled, query):
    page = client(filled).get(f"/r/test/trajectories/1?{query}")
    assert page.status_code == 400
    assert "colour is logprob, version or mismatch, step and token are numbers" in page.text


def test_an_archived_trajectory_has_the_page_that_it_had_and_says_if_its_file_is_gone(trained_twice, tba_buffer):
    addresses = ["/r/test/trajectories/1", *(f"/r/test/trajectories/1?colour=mismatch&step={step}" for step in (0, 2))]
    before = [strip_of(client(trained_twice).get(address)) for address in addresses]
    named = ("-b", trained_twice, "--set", "run.name=test", "--set", "buffer.prompt_cap=1", "--keep-steps", 0)
    done = tba_buffer("archive", "old", *named, "--json").json
    assert done["moved"] == 1
    assert [strip_of(client(trained_twice).get(address)) for address in addresses] == before
    Path(done["files"][0].removeprefix("file://")).unlink()
    page = client(trained_twice).get(addresses[0])
    assert (page.status_code, f"Its tokens cannot be read: the archive {done['files'][0]}" in page.text) == (200, True)
