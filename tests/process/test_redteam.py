"""Red-teaming with a harmless stand-in in another process, and rewards that misbehave under a real `tba search`."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from tba.common.config import TaskSection
from tba.common.errors import HttpRefused, TaskError
from tba.common.system.orphan_guard import session_of
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks import _find_own, load_task
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.reward_server import serving
from tba.tests.process.conftest import ROOT, RunConfig, arithmetic, collect, submit

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
        for fault in ("400", '{"choices": []}', '{"choices": [{"text": 1}, {}]}', NULLS):
            server.fail(fault)
            submit(rewards, [(load_task(config).prompts()[0], "1")])
            (scored,) = collect(rewards)
            assert scored.reward.total == 0.0
            assert (scored.error or "").startswith("reward of redteam: HttpRefused: http://127.0.0.1")
    finally:
        rewards.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"least_probability": 0.0}, "between 0 and 1"),
        ({"victim": {"replies": 0}}, "at least 1"),
        ({"victim": {"prompt": "no place"}}, "must contain {attack}"),
        ({"victim": {"colour": "red"}}, "unexpected keyword argument 'colour'"),
        ({"victim": {"url": "127.0.0.1:8001"}}, "victim.url = 127.0.0.1:8001: write the address of a server"),
        ({"classifier": {"url": "http://a:99999"}}, "classifier.url = http://a:99999: Port out of range"),
        ({"colour": "red"}, "has no option colour: it has victim"),
    ],
)
def test_options_that_cannot_work_are_refused(server, options, problem):
    with pytest.raises(TaskError, match=problem):
        load_task(section(server, **options))


SAMPLES = 4
ERRORS = {
    "raises": "reward of hostile: ValueError: lone ? surrogate",
    "hangs": "reward of hostile: timed out after 3 s",
    "exits": "reward of hostile: the worker died with exit code 3",
    "eats": "reward of hostile: out of memory (limit 256 MiB)",
    "nothing": "reward of hostile: TypeError: score returned NoneType, not a Reward",
    "text": "reward of hostile: TypeError: total of a reward is a str, not a number",
    "nan": "reward of hostile: ValueError: a reward must be finite, not nan with parts {}",
}
FOLDER = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def search(make_config, serve_weights, start_tba, tmp_path, monkeypatch):
    """A function that starts a searcher of a hostile task. Returns the run and the process."""
    (tmp_path / "misdeeds").mkdir()
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "misdeeds"))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)

    def start(task: str) -> tuple[RunConfig, subprocess.Popen[bytes]]:
        limits = {"reward_workers": 2, "reward_seconds": 3.0, "reward_memory_mib": 256}
        named = {"name": f"hostile_task:{task}"} | limits
        run = make_config(**arithmetic(train={"prompts_per_step": 1}, task=named, search={"max_in_flight": 16}))
        serve_weights(run)
        return run, start_tba("search", "--config", run.file)

    return start


def rows_of(run) -> list[tuple[str, float, str | None, dict[str, float], int]]:
    """(prompt, reward, error, parts, visit) of every trajectory, in order."""
    sql = "SELECT p.key, reward, error, reward_parts, visit FROM trajectory_rows t JOIN prompts p ON p.id = t.prompt"
    found = run.query(f"{sql} ORDER BY t.id")
    return [(key, reward, error, json.loads(parts), visit) for key, reward, error, parts, visit in found]


def test_each_faulty_reward_is_a_row_with_an_error_and_the_search_continues(search, tmp_path):
    run, searcher = search("HostilePrompts")
    # The group of a reward that hangs is the last one; many more come after it.
    wait_until(lambda: "hangs" in {key for key, *_ in rows_of(run)})
    before = len(rows_of(run))
    wait_until(lambda: len(rows_of(run)) > before + 10 * SAMPLES)
    searcher.terminate()
    assert searcher.wait(240) == 0
    rows = rows_of(run)
    assert {key: error for key, _, error, _, _ in rows if error} == ERRORS
    assert sum(error is not None for _, _, error, _, _ in rows) == len(ERRORS)
    groups: dict[int, list[tuple[float, str | None]]] = {}
    for _, reward, error, _, visit in rows:
        groups.setdefault(visit, []).append((reward, error))
    for group in groups.values():
        assert len(group) == SAMPLES
        assert {reward for reward, error in group if error is None} == {1.0}
        assert {reward for reward, error in group if error} <= {0.0}
    loaded = [parts for *_, parts, _ in rows if parts]
    assert loaded
    assert {name for parts in loaded for name, there in parts.items() if there} == set(), "workers import no torch"
    log = (tmp_path / "tba1.log").read_text()
    assert "more noise" in log
    assert "reward worker replaced" in log


# test_fleet.py kills searchers under a supervisor, and the supervisor.
def test_workers_and_programs_that_a_reward_started_end_with_the_killed_searcher(search, tmp_path):
    run, searcher = search("Starter")
    pids = tmp_path / "misdeeds/pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    wait_until(lambda: rows_of(run))
    worker, program = map(int, pids.read_text().split())
    assert session_of(program) == worker
    searcher.kill()
    searcher.wait()
    wait_until(lambda: session_of(worker) is None and session_of(program) is None)
