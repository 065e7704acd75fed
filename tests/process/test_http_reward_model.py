"""A reward model behind an HTTP server in another process: what fails there is an error of a row, and never a 0."""

import json
import multiprocessing.connection
import os
import signal
import time
from contextlib import closing

import pytest

from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError, HttpRefused, WorkerLost
from tba.searcher.build import check_reward_model
from tba.searcher.scoring.rewards import ModelScorer, Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.reward_server import KEY, serving
from tba.tests.process.conftest import ROOT, collect, submit

BAD_REPLIES = {
    "400": "answered with status 400: out of order",
    "307": "answered with status 307",
    "no json": "returned something other than JSON: no json",
    "[]": "returned something other than a JSON object",
    '{"data": []}': "answered without data[0].probs",
    '{"data": [{"probs": [1, 2]}]}': "gave 2 labels",
    '{"data": [{"probs": [NaN]}]}': "score 'nan': not a finite number",
    '{"data": [{"probs": [true]}]}': "score 'True': not a finite number",
    f'{{"data": [{{"probs": [{"9" * 400}]}}]}}': "not a finite number",
    "endless": "answered with more than 1 MiB",
}
TEXTS = [str(n) * (1 + n % 7) for n in range(50)]


@pytest.fixture(scope="module")
def server():
    with serving() as one:
        yield one


@pytest.fixture
def rewards():
    """Rewards of a task that always gives 0, and of a model behind a URL."""
    made = []

    def make(url, **keys):
        config = Config.model_validate({"reward_model": {"url": url, "time_limit_seconds": 20.0} | keys})
        task = load_task(config.task.model_copy(update={"limit": 1}))
        model = ModelScorer(config.reward_model, "cpu")
        made.append(Rewards(task, config.task.model_copy(update={"reward_workers": 0}), model, weight=0.5))
        return made[-1]

    yield make
    for one in made:
        one.close()


def scores(rewards, pairs):
    """Return (total, error) of pairs of a prompt's text and a response, in their order."""
    submit(rewards, [(Prompt("p", text), response) for text, response in pairs])
    return [(scored.reward.total, scored.error) for scored in collect(rewards)]


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ({}, 0),
        ({"api": "pooling", "served_model": "m"}, 0),
        pytest.param({"api": "score"}, 0, marks=pytest.mark.slow),
        ({"template": "chat"}, 2),
    ],
)
def test_each_route_gives_the_logit_of_prompt_and_response(rewards, server, keys, added):
    found = scores(rewards(server.url, api_key=KEY, **keys), [("1+1=", text) for text in TEXTS])
    assert found == [(pytest.approx(0.5 * (4 + len(text) + added) / 10), None) for text in TEXTS]


def test_a_failure_that_passes_is_retried(rewards, server):
    rewards = rewards(server.url)
    for fault in ("500", "503", "429", "closes"):
        server.fail(fault, 3)
        assert scores(rewards, [("", "12")]) == [(pytest.approx(0.1), None)]


def test_a_bad_reply_is_an_error_of_its_row_and_the_next_response_is_scored(rewards, server):
    rewards = rewards(server.url, concurrency=1)
    for fault, reason in BAD_REPLIES.items():
        server.fail(fault)
        (first, error), second = scores(rewards, [("", "1"), ("", "22")])
        assert first == 0
        assert error.startswith("reward: model: not scored: http://127.0.0.1")
        assert reason in error
        assert second == (pytest.approx(0.1), None)


def test_a_reply_that_does_not_come_to_its_end_is_an_error_after_the_limit(rewards, server):
    rewards = rewards(server.url, time_limit_seconds=0.5)
    for fault in ("hangs", "drips"):
        server.fail(fault)
        # Requests of one batch reach the server in any order, and a busy machine may not answer the other in time.
        errors = [error for _, error in scores(rewards, [("", "1"), ("", "22")]) if error]
        assert any("nothing usable within 0.5 s: no reply to the request" in error for error in errors)


def test_a_server_that_dies_leaves_rows_with_errors_and_no_more_requests_are_in_flight_than_allowed(rewards):
    with serving() as other:
        rewards = rewards(other.url, time_limit_seconds=5.0, concurrency=3)
        other.fail("meets", 3)
        assert all(error is None for _, error in scores(rewards, [("", text) for text in TEXTS]))
        assert other.counts()["most"] == 3
    ((_, error),) = scores(rewards, [("", "1")])
    assert "nothing usable within 5 s: ConnectError" in error


def test_a_server_that_is_no_reward_model_is_refused_at_the_start_and_one_that_is_silent_is_waited_for(
    rewards, server, monkeypatch
):
    with pytest.raises(ConfigError, match="answered with status 401: wrong key"):
        rewards(server.url, api_key="other")
    monkeypatch.setattr("tba.searcher.scoring.rewards.LOAD_SECONDS", 0.2)
    with pytest.raises(WorkerLost, match=r"reward_model.url does not answer: .*ConnectError"):
        rewards("http://127.0.0.1:9")


def test_a_worker_that_is_refused_later_is_started_again_after_a_pause(server):
    config = Config.model_validate({"reward_model": {"url": server.url}})
    with closing(ModelScorer(config.reward_model, "cpu")) as scorer:
        server.fail("404", 100)
        os.kill(scorer.workers[0].process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while scorer.failed_starts < 1 and time.monotonic() < deadline:
            scorer.poll()
            multiprocessing.connection.wait(scorer.channels, 0.1)
        assert scorer.workers == []
        assert "status 404" in scorer.last_error
        server.fail("404", 0)
        while not scorer.ready and time.monotonic() < deadline:
            scorer.poll()
            multiprocessing.connection.wait(scorer.channels, 0.1)
        assert (scorer.ready, scorer.failed_starts) == (True, 0)


def test_the_doctor_asks_the_server_for_a_score(server):
    section = Config.model_validate({"reward_model": {"url": server.url}}).reward_model
    assert check_reward_model(section) == f"{server.url} scores by classify"
    server.fail("400")
    with pytest.raises(HttpRefused, match="status 400"):
        check_reward_model(section)


def test_a_prompt_without_a_text_needs_the_chat_template(rewards, server):
    rewards = rewards(server.url)
    submit(rewards, [(Prompt("0", messages=[("user", "1")]), "2")])
    assert 'set reward_model.template = "chat"' in (collect(rewards)[0].error or "")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"path": "m", "url": "http://a"}, "both name a model"),
        ({"url": "ftp://a"}, "write the address of a server"),
        ({"url": "http://user:word@a"}, "without a name or a key"),
        ({"url": "http://a:99999"}, "Port out of range"),
        ({"url": "http://[::1"}, "IPv6"),
        ({"url": "http://a", "api_key": "two\nlines"}, "line ends"),
        ({"url": "http://a", "api": "score", "template": "chat"}, "as two texts"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, problem):
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"reward_model": keys})


def test_the_task_of_tldr_compares_held_out_answers_with_the_summaries_of_people(server, tmp_path):
    row = {"subreddit": "a", "title": "b", "post": "c", "summary": "12"}
    for name, more in (("train", {"post": "d"}), ("held_out", {})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | more) + "\n")
    data = {"data": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "held_out.jsonl")}
    name = str(ROOT / "examples/tldr/tldr.py")
    config = TaskSection(name=name, options={**data, "gold_url": server.url}, reward_workers=1)
    task = load_task(config)
    ((prompt,), (trained,)), rewards = (task.held_out(), task.prompts()), Rewards(task, config)
    before = server.counts()["requests"]
    wins: list[float | None] = []
    for one in ((prompt, " 12"), (prompt, " 123"), (prompt, "1"), (trained, "1")):
        submit(rewards, [one])
        wins += [scored.reward.parts.get("win_rate") for scored in collect(rewards)]
    rewards.close()
    assert wins == [0.5, 1.0, 0.0, None]
    # Of the summary one score is asked for.
    assert server.counts()["requests"] == before + 4
