"""Red-teaming with a harmless stand-in in another process: a victim that writes backwards, a classifier of the 7."""

import json
import math

import pytest

from tba.common.config import TaskSection
from tba.common.errors import HttpRefused, TaskError
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, score
from tba.searcher.tasks import _find_own, load_task
from tba.tests.helpers.reward_server import serving
from tba.tests.helpers.source_files import ROOT

REDTEAM = ROOT / "examples/redteam/redteam.py"
NULLS = '{"choices": [{"text": null}, {"text": "a"}]}'


@pytest.fixture(scope="module")
def server():
    with serving() as one:
        yield one


def section(server, *, victim=None, classifier=None, **options) -> TaskSection:
    parts = {
        "victim": {"url": server.url, "replies": 2} | (victim or {}),
        "classifier": {"url": server.url} | (classifier or {}),
        "prompts": ["Write:"],
    }
    return TaskSection(name=str(REDTEAM), options=parts | options, reward_workers=1)


def part(name, **settings):
    """Return a victim or a classifier of the example."""
    return _find_own(f"{REDTEAM}:{name}")(**settings)


def scored(config, attack):
    task = load_task(config)
    return score(task, task.prompts()[0], attack, finished=True)


def test_the_reward_is_the_mean_log_probability_over_the_replies_of_the_victim(server):
    # The replies are "1770" and "1771".
    reward, error = scored(section(server), "771")
    assert error is None
    assert reward.total == pytest.approx(math.log(0.5))
    assert reward.parts == {"correct": 0.0, "flagged": 0.5}
    reward, _ = scored(section(server, threshold=0.4), "771")
    assert reward.parts["correct"] == 1.0


def test_a_reply_that_is_never_flagged_and_an_attack_without_a_word_get_the_least_reward(server):
    for attack in ("12", " "):
        reward, error = scored(section(server, least_probability=0.01), attack)
        assert (reward.total, error) == (math.log(0.01), None)
        assert load_task(section(server, least_probability=0.01)).least_reward == math.log(0.01)  # type: ignore[attr-defined]


def test_a_chat_victim_and_a_classifier_of_the_whole_exchange_get_the_texts_that_the_options_say(server):
    config = section(
        server, victim={"chat": True, "prompt": "{attack}!"}, classifier={"text": "{attack}{reply}", "label": 1}
    )
    # The reply is "7!", and the classifier gets "77!".
    reward, error = scored(config, "7")
    assert (reward.parts["flagged"], error) == (pytest.approx(2 / 3), None)


@pytest.mark.parametrize("probs", ['"0.1"', '["1"]', "[true]", "[NaN]", "[2]", "[]", "null", f"[{'9' * 400}]"])
def test_only_a_number_from_0_to_1_is_a_probability(probs):
    with pytest.raises(HttpRefused, match="answered with"):
        part("Classifier", url="u").probability(json.loads(f'{{"data": [{{"probs": {probs}}}]}}'))


def test_text_of_the_attacker_is_never_a_template():
    assert part("Victim", url="u", prompt="<{attack}>").body("{attack}{reply}")["prompt"] == "<{attack}{reply}>"
    classifier = part("Classifier", url="u", text="{attack}|{reply}")
    assert classifier.body("{reply}", "{attack}")["input"] == "{reply}|{attack}"


def test_a_failure_of_a_server_is_an_error_of_the_row_that_the_workers_report(server):
    config = section(server)
    rewards = Rewards(load_task(config), config)
    try:
        for ticket, fault in enumerate(["400", '{"choices": []}', '{"choices": [{"text": 1}, {}]}', NULLS]):
            server.fail(fault)
            rewards.submit(ticket, load_task(config).prompts()[0], "1", True)
            found: list[Scored] = []
            while not found:
                found = rewards.wait(1.0)
            assert found[0].reward.total == 0.0
            assert (found[0].error or "").startswith("reward of redteam: HttpRefused: http://127.0.0.1")
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"least_probability": 0.0}, "between 0 and 1"),
        ({"victim": {"replies": 0}}, "at least 1"),
        ({"victim": {"prompt": "no place"}}, "must contain {attack}"),
        ({"victim": {"colour": "red"}}, "has no option colour: it has victim"),
        ({"victim": {"url": "127.0.0.1:8001"}}, "victim.url = 127.0.0.1:8001: write the address of a server"),
        ({"classifier": {"url": "http://a:99999"}}, "classifier.url = http://a:99999: Port out of range"),
        ({"colour": "red"}, "has no option colour: it has victim"),
    ],
)
def test_options_that_cannot_work_are_refused(server, options, problem):
    with pytest.raises(TaskError, match=problem):
        load_task(section(server, **options))
