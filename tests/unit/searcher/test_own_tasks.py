"""Tasks of the user: where they come from, their options, and mixtures of tasks."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tba.common.config import Config, TaskSection
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError, TaskError
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import (
    Prompt,
    Reward,
    check_prompts,
    least_reward,
    least_reward_for,
    name_of,
    scores_concurrently,
)

FILE = '''
from dataclasses import dataclass
from neighbour import WORD
from tba.searcher.tasks.task import Prompt, Reward

class Spell:
    """Spell a word."""

    name = "spell"
    least_reward = -1.0

    def __init__(self, times: int = 1, fails: bool = False):
        self.times = times
        if fails:
            raise OSError("no dictionary")

    def prompts(self):
        return [Prompt(f"{WORD}{n}", WORD, WORD) for n in range(self.times)]

    def held_out(self):
        return [Prompt("h", "held", "held")]

    def score(self, prompt, response, finished):
        return Reward(float(response == prompt.answer) - 1, {"letters": 1.0})

@dataclass
class Other:
    """No task."""
    name: str
'''


@pytest.fixture
def file(tmp_path) -> Path:
    """The file of a task, with a module next to it that it imports."""
    (tmp_path / "neighbour.py").write_text('WORD = "stone"\n')
    path = tmp_path / "spell.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", ["{}", "{}:Spell"])
def test_a_task_is_the_only_one_of_a_file_or_named(file, name):
    task = load_task(TaskSection(name=name.format(file), options={"times": 2}))
    assert [prompt.key for prompt in task.prompts()] == ["stone0", "stone1"]


def test_a_limit_keeps_what_a_task_declares(file):
    config = TaskSection(name=str(file), options={"times": 5}, limit=2)
    task = load_task(config)
    assert len(task.prompts()) == 2
    assert least_reward(task) == -1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": 2}, r"has no option size: it has times, fails"),
        ({"fails": True}, "cannot be loaded: OSError: no dictionary"),
    ],
)
def test_the_error_names_an_option_that_does_not_exist_or_fails(file, options, sentence):
    with pytest.raises(TaskError, match=sentence):
        load_task(TaskSection(name=str(file), options=options))


@pytest.mark.parametrize("method", ["prompts", "held_out"])
def test_an_error_of_the_code_that_makes_prompts_names_the_line(file, method):
    lines = FILE.splitlines()
    number = lines.index(f"    def {method}(self):") + 1
    lines.insert(number, "        {}['split']")
    file.write_text("\n".join(lines))
    sentence = rf"task spell: {method}\(\) failed at {re.escape(str(file))}:{number + 1}: KeyError: 'split'"
    with pytest.raises(TaskError, match=sentence):
        getattr(load_task(TaskSection(name=str(file))), method)()


def test_a_file_with_two_tasks_needs_a_name(file):
    file.write_text(f"{FILE}\nclass Second(Spell):\n    pass\n")
    with pytest.raises(TaskError, match=r"has several tasks, Spell, Second: name one, as .*spell.py:Second$"):
        load_task(TaskSection(name=str(file)))
    assert load_task(TaskSection(name=f"{file}:Second")).name == "spell"


@pytest.mark.parametrize(
    ("removed", "name", "sentence"),
    [
        (
            "    def score",
            "{}",
            r"has no task, which is a class with name, prompts, held_out, score; it defines Spell, ",
        ),
        ("    def score", "{}", r"Spell, which has no score; Other, which has no prompts, held_out, score: `tba task "),
        ('    name = "spell"', "{}", r"spell.py has no name: a task has name, prompts, held_out, score, as the file "),
        ("nothing", "{}:Spel", r"spell.py has no Spel; it defines Spell; Other, which has no prompts"),
    ],
)
def test_the_error_names_what_a_class_lacks_to_be_a_task(file, removed, name, sentence):
    file.write_text(FILE.replace(removed, removed.replace("score", "other").replace("name", "title")))
    with pytest.raises(TaskError, match=sentence):
        load_task(TaskSection(name=name.format(file)))


def test_the_error_names_a_module_that_does_not_exist(file):
    with pytest.raises(TaskError, match=r"there is no Python module nowhere here: name the file of the task, such as"):
        load_task(TaskSection(name="nowhere:Spell"))
    file.write_text(FILE.replace("neighbour", "neighbours"))
    with pytest.raises(TaskError, match=r"cannot be loaded: ModuleNotFoundError: No module named 'neighbours'"):
        load_task(TaskSection(name=str(file)))


def test_the_error_names_an_option_that_is_needed():
    with pytest.raises(TaskError, match=r"^task reasoning_gym needs task.options.generators: set it in the"):
        load_task(TaskSection(name="reasoning_gym"))


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(TaskError, match=r"nowhere.py: the file does not exist"):
        load_task(TaskSection(name=str(tmp_path / "nowhere.py")))


# ---------------------------------------------------------------- mixtures


def mixture(file, *weights):
    spell: dict[str, Any] = {"name": str(file), "options": {"times": 2}, "label": "letters"}
    sums: dict[str, Any] = {"name": "arithmetic", "limit": 6, "held_out_limit": 3}
    parts = [part | ({"weight": weight} if weight else {}) for part, weight in zip((spell, sums), weights, strict=True)]
    return TaskSection.model_validate({"name": "mixture", "mixture": parts})


def test_a_mixture_has_all_prompts_of_its_tasks_with_their_labels(file):
    task = load_task(mixture(file, None, None))
    check_prompts(task)
    keys = [prompt.key for prompt in task.prompts()]
    assert sorted(key.partition(":")[0] for key in keys) == ["arithmetic"] * 6 + ["letters"] * 2
    # Evenly, so that the first ones are a mixture too.
    assert {key.partition(":")[0] for key in keys[:4]} == {"arithmetic", "letters"}
    assert len(task.held_out()) == 1 + 3


def test_weights_are_shares_of_an_epoch_and_leave_no_prompt_out(file):
    task = load_task(mixture(file, 2, 1))
    check_prompts(task)
    keys = [prompt.key for prompt in task.prompts()]
    assert sum(key.startswith("arithmetic:") for key in keys) == 6
    assert sum(key.startswith("letters") for key in keys) == 12
    assert {key.partition(":")[2] for key in keys if key.startswith("letters")} == {"stone0", "stone1"}


def test_weights_that_need_too_many_copies_are_refused(file):
    with pytest.raises(TaskError, match=r"an epoch has 20,000,000,002 prompts, .* raise the weight of letters"):
        load_task(mixture(file, 1e-10, 1)).prompts()


def test_each_prompt_of_a_mixture_is_scored_by_its_task(file):
    task = load_task(mixture(file, 2, 1))
    assert least_reward(task) == -1.0
    for prompt in task.prompts():
        reward = task.score(prompt, prompt.answer, True)
        label = name_of(task, prompt)
        assert least_reward_for(task, prompt) == (-1.0 if label == "letters" else 0.0)
        if label == "letters":
            assert reward == Reward(0.0, {"letters.reward": 0.0, "letters.letters": 1.0})
        else:
            parts = {"correct": 1.0, "arithmetic.reward": 1.0, "arithmetic.correct": 1.0, "arithmetic.format": 1.0}
            assert reward == Reward(1.0, parts)


def test_a_mixture_with_a_coroutine_scores_concurrently(file):
    file.write_text(FILE.replace("def score", "async def score"))
    task = load_task(mixture(file, None, None))
    assert scores_concurrently(task)
    (prompt, *_) = (one for one in task.prompts() if name_of(task, one) == "letters")
    assert score(task, prompt, prompt.answer, True) == (
        Reward(0.0, {"letters.reward": 0.0, "letters.letters": 1.0}),
        None,
    )


def test_coroutines_that_are_scored_in_this_process_share_an_event_loop():
    loops = []

    class Connected:
        async def score(self, prompt, response, finished):
            loops.append(asyncio.get_running_loop())
            return Reward(1.0, {})

    task: Any = Connected()
    assert [score(task, Prompt("a", "1+1="), "2", finished=True)[1] for _ in range(2)] == [None, None]
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"name": "mixture"}, "need each other"),
        ({"mixture": [{"name": "arithmetic"}]}, "need each other"),
        ({"name": "mixture", "mixture": [{"weight": 1}, {"label": "b"}]}, "give every task a weight, or none"),
        ({"name": "mixture", "mixture": [{"name": "gsm8k"}]}, "task.train is not set, and gsm8k needs it"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_the_configuration(task, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate({"task": task})


def test_the_error_names_the_field_of_a_task_of_a_mixture():
    mixture = ["task.name=mixture", 'task.mixture=[{name="arithmetic"}, {name="gsm8k", wieght=2}]']
    with pytest.raises(ConfigError, match=r"^task\.mixture\[1\]\.wieght \(--set\): extra inputs"):
        resolve(None, environment={}, assignments=mixture)


def test_two_tasks_of_a_mixture_have_different_labels():
    config = TaskSection.model_validate({"name": "mixture", "mixture": [{}, {}]})
    with pytest.raises(TaskError, match="two tasks with the label arithmetic"):
        load_task(config)


def test_the_prompt_of_a_mixture_keeps_its_messages(file):
    from tba.searcher.tasks.mixture import MixtureTask

    class Chat:
        name = "chat"

        def prompts(self):
            return [Prompt("a", messages=(("user", "hello"),))]

        def held_out(self):
            return []

        def score(self, prompt, response, finished):
            return Reward(float(prompt.key == "a" and prompt.messages[0][1] == "hello"), {})

    task = MixtureTask([(None, Chat(), None)])
    (prompt,) = task.prompts()
    assert prompt.messages == (("user", "hello"),)
    assert task.score(prompt, "", True) == Reward(1.0, {"chat.reward": 1.0})
