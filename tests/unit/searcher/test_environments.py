"""Environments of other libraries as tasks, and episodes in mixtures: played here, without workers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tba.common.config import Config, TaskSection
from tba.common.errors import ConfigError, TaskError
from tba.searcher.build import check_scored, check_task_and_prompts
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored
from tba.searcher.task_check import _results, _run
from tba.searcher.tasks import load_task
from tba.searcher.tasks.environments import action_in
from tba.searcher.tasks.task import Reward, has_environment, is_random

OWN = """
from tba.searcher.tasks.task import Prompt, Turn


class Echo:
    name = "echo"
    random = True

    def prompts(self):
        return [Prompt("p", "say")]

    def held_out(self):
        return []

    def environment(self, prompt):
        return Answering(prompt)


class Answering:
    def __init__(self, prompt):
        self.key = prompt.key

    def reset(self, prompt):
        return [("user", prompt.key)]

    def step(self, reply, finished):
        return Turn([("user", f"{self.key} {reply}")], 1.0, reply == "stop", {"correct": 1.0})

    def close(self):
        pass
"""

# The shapes of the classes, as the libraries document them.
SKYRL = """
class Adder:
    def __init__(self, env_config, extras={}):
        self.gold, self.bonus, self.turns = extras["reward_spec"]["ground_truth"], env_config.bonus, 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, action):
        self.turns += 1
        right = action == self.gold
        return {
            "observations": [] if right else [{"role": "user", "content": "no"}],
            "reward": right * self.bonus,
            "done": right,
            "metadata": {"turns": self.turns, "text": "x"},
        }

    def close(self):
        pass
"""
TRL = """
class Guess:
    def reset(self, secret, **row):
        self.secret, self.done, self.guesses = secret, False, 0
        return "guess"

    def step(self, reply):
        self.guesses += 1
        self.done = reply == self.secret
        return "right" if self.done else "wrong"

    def get_reward(self):
        return 1.0 / self.guesses if self.done else -0.1
"""
TOOLS = (
    "class Tools:\n    def reset(self, **row):\n        pass\n\n    def search(self, query):\n        return query\n"
)


@pytest.fixture
def load(tmp_path):
    """Load the task of a file with this text, with rows of data."""

    def load(text, rows=(), **keys) -> Any:
        file, data = tmp_path / "own.py", tmp_path / "rows.jsonl"
        file.write_text(text)
        data.write_text("\n".join(map(json.dumps, rows)))
        return load_task(TaskSection(name=str(file), train=str(data) if rows else "", **keys))

    return load


def play(task, prompt, *replies):
    """Return the messages and the reward of each answer, up to the end of the episode."""
    rewards, found = Rewards(task, TaskSection(reward_workers=0)), []
    for number in range(len(replies) + 1):
        rewards.play(1, prompt, [(reply, True) for reply in replies[:number]])
        (scored,) = rewards.wait(0.0)
        assert scored.turn is not None, scored.error
        found.append(scored.turn)
        if scored.turn.done:
            break
    return found


def said(turns):
    return [[content for _, content in turn.messages] for turn in turns]


def test_an_episode_task_needs_no_score_and_has_no_reward_model_and_a_task_needs_one_of_both(load):
    task = load(OWN)
    assert has_environment(task)
    assert said(play(task, task.prompts()[0], "a", "stop")) == [["p"], ["p a"], ["p stop"]]
    with pytest.raises(TaskError, match=r"Echo, which has no score; .* `tba task new` writes"):
        load(OWN.replace("def environment", "def other"))
    check_scored(Config(), task)
    with pytest.raises(ConfigError, match="task echo has episodes of several turns: remove the reward model"):
        check_scored(Config.model_validate({"reward_model": {"url": "http://localhost:1"}}), task)


def test_the_speed_of_a_check_is_shown_unless_a_response_did_not_return(load):
    task = load(OWN)
    scripts = [(task.prompts()[0], ["a", "stop"])]
    returned = Scored(0, None, Reward(1.0, {}), None)
    for last, shown in ((returned, True), (replace(returned, error_kind="turn_timeout"), False)):
        results = [[returned, returned, last]]
        findings = {one["check"]: one["detail"] for one in _results(TaskSection(), task, scripts, results, plays=True)}
        assert findings.get("speed", "").endswith("turns per second, resets included") is shown


def test_the_environment_of_the_docs_is_complete_and_runs(load):
    page = (Path(__file__).parents[3] / "docs/episodes.md").read_text()
    task = load(page.partition("```python\n")[2].partition("```")[0])
    prompt = task.prompts()[1]
    turns = play(task, prompt, "9", "0", prompt.answer)
    assert said(turns) == [[], [" lower :"], [" higher :"], []]
    assert (turns[-1].reward, turns[-1].done, turns[-1].parts) == (1.0, True, {"correct": 1.0})
    assert play(task, prompt, "seven")[-1].parts == {"parse_error": 1.0, "correct": 0.0}


def test_a_mixture_plays_the_environment_of_each_prompt_and_labels_its_parts(load, tmp_path):
    load(OWN)
    parts = [{"name": "arithmetic", "limit": 1}, {"name": str(tmp_path / "own.py"), "label": "mine"}]
    task: Any = load_task(TaskSection.model_validate({"name": "mixture", "mixture": parts}))
    scored, played = sorted(task.prompts(), key=lambda prompt: prompt.key)
    assert [has_environment(task, one) for one in (scored, played)] == [False, True]
    assert [is_random(task, one) for one in (scored, played)] == [False, True]
    assert task.random
    turns = play(task, played, "a")
    assert said(turns) == [["p"], ["p a"]]
    assert turns[1].parts == {"correct": 1.0, "mine.reward": 1.0, "mine.correct": 1.0}


def test_a_class_of_the_shape_of_skyrl_gym_plays_a_row(load):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "reward_spec": {"ground_truth": two}} for two in "22"]
    task = load(SKYRL, [*rows, rows[0] | {"reward_spec": {"ground_truth": "3"}}], options={"bonus": 2.0})
    # The third has the question of the first and another answer.
    first, third = task.prompts()
    assert said(play(task, first, "1", "2")) == [["begin"], ["no"], []]
    turns = play(task, third, "2", "3")
    assert [(turn.reward, turn.done, turn.parts) for turn in turns[1:]] == [
        (0.0, False, {"turns": 1.0}),
        (2.0, True, {"turns": 2.0}),
    ]


def test_a_class_of_trls_shape_plays_by_its_step_and_its_rewards_add_up(load):
    task = load(TRL, [{"prompt": "Guess.", "secret": "7"}])
    turns = play(task, task.prompts()[0], "1", "7")
    assert said(turns) == [["guess"], ["wrong"], ["right"]]
    assert [turn.done for turn in turns] == [False, False, True]
    assert sum(turn.reward for turn in turns) == 0.5
    scripts = [(task.prompts()[0], ["7"])]
    results = _run(Rewards(task, TaskSection(reward_workers=0)), task, scripts)
    checked = {one["check"]: one["detail"] for one in _results(TaskSection(), task, scripts, results, plays=True)}
    assert checked["rewards"].endswith("; without 'correct' in the metadata that step() returns there is no accuracy")


def test_a_class_that_only_has_tools_or_no_rows_is_refused(load):
    with pytest.raises(TaskError, match=r"Tools has no step\(reply\), only tools to call \(search\): give it a step"):
        load(TOOLS, [{"prompt": "q"}])
    with pytest.raises(TaskError, match=r"task\.train is not set, and Guess needs a row for each prompt"):
        load(TRL)


# ---------------------------------------------------------------- Gymnasium


@pytest.fixture
def lake():
    def lake(id="FrozenLake-v1", **options):
        return load_task(TaskSection(name="gymnasium", options={"id": id, "prompts": 3, "held_out": 1} | options))

    return lake


def test_a_frozen_lake_is_walked_by_the_names_of_its_actions(lake):
    task = lake(is_slippery=False)
    assert [prompt.key for prompt in (*task.prompts(), *task.held_out())] == ["0", "1", "2", "3"]
    assert "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up" in task.prompts()[0].text
    turns = play(task, task.prompts()[0], *["down", "down", "right", "down", "right", "2"])
    assert said(turns)[1] == ["  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\nActions: left, down, right, up"]
    assert (turns[-1].reward, turns[-1].done, turns[-1].parts["correct"]) == (1.0, True, 1.0)


def test_a_slippery_lake_is_a_function_of_the_key_and_the_actions_and_each_key_can_have_its_own(lake):
    task = lake()
    first, other, again = (said(play(task, task.prompts()[n], *["down", "left"] * 3)) for n in (0, 1, 0))
    assert first == again != other
    assert len({prompt.text for prompt in lake(map_size=5).prompts()}) == 3


def test_the_cliff_is_walked_along_and_a_fall_begins_again(lake):
    task = lake("CliffWalking-v1")
    path = ["up", *["right"] * 11, "down"]
    turns = play(task, task.prompts()[0], "right", *path)[1:]
    assert [turn.reward for turn in turns] == [-100.0, *[-1.0] * len(path)]
    assert [turn.done for turn in turns] == [*[False] * len(path), True]
    assert turns[-1].parts["correct"] == 1.0


def test_a_taxi_brings_its_passenger_by_the_shortest_way_of_the_transition_table(lake):
    task: Any = lake("Taxi-v4")
    lost = play(task, task.prompts()[0], "I cannot")[-1]
    assert (lost.done, lost.parts) == (True, {"parse_error": 1.0, "correct": 0.0})
    world = task._reset("0").unwrapped
    ways: list[tuple[Any, list[int]]] = [(world.s, [])]
    known, arrived = {world.s}, None
    while arrived is None:
        place, way = ways.pop(0)
        for action in range(6):
            ((_, after, _, ended),) = world.P[place][action]
            arrived = [*way, action] if ended else arrived
            if after not in known:
                known.add(after)
                ways.append((after, [*way, action]))
    names = ["south", "north", "east", "west", "pickup", "dropoff"]
    turns = play(task, task.prompts()[0], "dropoff", *(names[action] for action in arrived))[1:]
    # A drop-off without a passenger costs 10.
    assert [turn.reward for turn in turns] == [-10.0, *[-1.0] * (len(arrived) - 1), 20.0]
    assert (turns[-1].done, turns[-1].parts["correct"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Down", 1),
        ("<think>left</think> go right, then UP!", 3),
        ("1", 1),
        ("up and down 0", 0),
        ("nothing", None),
        ("downwards", None),
    ],
)
def test_a_reply_means_the_last_action_that_it_names(reply, action):
    assert action_in(reply, ["left", "down", "right", "up"]) == action


def test_a_game_of_textarena_is_won_and_repeats():
    pytest.importorskip("textarena")
    name = str(Path(__file__).parents[3] / "examples/text_games/text_games.py")
    task = load_task(TaskSection(name=name, options={"id": "GuessTheNumber-v0", "prompts": 2, "held_out": 1}))
    numbers = [f"[{number}]" for number in range(1, 21)]
    first, other, again = (play(task, task.prompts()[n], *numbers) for n in (0, 1, 0))
    assert first == again != other
    assert (first[-1].reward, first[-1].done, first[-1].parts["correct"]) == (1.0, True, 1.0)
    malformed = play(task, task.prompts()[0], "one", "two")
    assert (malformed[-1].done, malformed[-1].parts) == (True, {"correct": 0.0, "parse_error": 1.0})


def test_an_environment_that_is_none_is_refused(lake):
    with pytest.raises(TaskError, match="task gymnasium: FrozenLake-v9 is not made"):
        lake("FrozenLake-v9")
    with pytest.raises(TaskError, match="has 4 actions, and task.options.actions 2"):
        lake(actions="left right")


@pytest.mark.parametrize(
    ("objective", "staleness", "warned"),
    [
        ({"name": "tb"}, "unbounded", True),
        ({"name": "tb_learned_z"}, 8, True),
        ({"name": "oapl"}, 8, True),
        ({"name": "oapl"}, 0, False),
        ({"name": "tb", "log_z": "turn"}, 8, False),
        ({"name": "tb_stale"}, 8, False),
    ],
)
def test_an_objective_that_explains_luck_is_named_for_a_random_task_with_stale_data(
    tmp_path, objective, staleness, warned
):
    (tmp_path / "own.py").write_text(OWN)
    sections: dict[str, Any] = {
        "task": {"name": str(tmp_path / "own.py")},
        "train": {"prompts_per_step": 1, "publish_every": 1},
        "buffer": {"max_staleness": staleness},
        "objective": objective,
    }
    warning = check_task_and_prompts(Config.model_validate(sections))
    assert ("explains their luck" in warning) is warned
    # The same environments without chance.
    (tmp_path / "fixed.py").write_text(OWN.replace("random = True", "random = False"))
    fixed = Config.model_validate(sections | {"task": {"name": str(tmp_path / "fixed.py")}})
    assert check_task_and_prompts(fixed) == ""
