"""Tasks: prompts, keys and scores; tasks of the user, and mixtures of tasks."""

import asyncio
import json
import re
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tba.common.config import Config, TaskSection
from tba.common.config.layers import resolve
from tba.common.config.task import MIXTURE, TASKS
from tba.common.errors import ConfigError, TaskError
from tba.searcher import tasks
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks import load_task
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask, last_number
from tba.searcher.tasks.task import (
    LimitedTask,
    Prompt,
    Reward,
    check_prompts,
    fingerprint,
    least_reward,
    name_of,
    scores_concurrently,
)
from tba.tests.helpers.verdicts import read_rows


@pytest.fixture
def gsm8k(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(3)]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return Gsm8kTask(str(file), str(file))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 42.", 42),
        ("1,234 apples", 1234),
        ("-5", -5),
        ("3.50 dollars", 3.5),
        ("5 then 7", 7),
        ("none", None),
        ("5-7", 7),
        ("3,4", 4),
        ("it costs $.5", 0.5),
        ("-.25", -0.25),
        ("wait...5", 5),
        ("the end.5", 5),
        ("\N{MINUS SIGN}5", -5),
        ("1e3", 1000),
        ("3 eggs", 3),
        (r"\boxed{1{,}234}", 1234),
        (r"10,\!000", 10000),
        ("9" * 4_000, 10**4_000 - 1),
        ("12,34,567", 1234567),
        # As floats they would be equal to the next one.
        ("9007199254740993", 9007199254740993),
        ("0.1000000000000000000001", Decimal("0.1000000000000000000001")),
        # On lines of their own they are several.
        ("Boxes:\n1 500\n2 300\n3 100", 100),
        # Quadratic time would be more than the time limit of a test.
        ("1" + ",23" * 100_000, 23),
        (" 111" * 100_000, 111),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"), [("5 000", 5000), ("$1 000 000", 1000000), ("100 200 300", None), ("x = 5 000", None)]
)
def test_a_number_alone_may_have_thousands_with_spaces(text, number):
    assert last_number(text, alone=True) == number


@pytest.mark.parametrize("kind", RESPONSES := read_rows("gsm8k_answers.txt"))
def test_gsm8k_reads_the_number_that_a_response_states(kind):
    found = [(number, response, last_number(response)) for number, response in RESPONSES[kind]]
    assert [row for row in found if row[2] != (None if row[0] == "none" else Decimal(row[0]))] == []


def test_gsm8k_uses_the_format_of_the_paper_keys_of_the_question_and_the_last_number(gsm8k):
    first, prompt, third = gsm8k.prompts()
    assert first.text == "[MATH TASK] Problem:\nWhat is 0 + 1?\n\nSolution:\n"
    assert len({first.key, prompt.key, third.key}) == 3
    assert first.key == gsm8k.held_out()[0].key
    assert gsm8k.score(prompt, "It is 1, no, 2", finished=True).parts == {"correct": 1.0, "has_number": 1.0}
    assert gsm8k.score(prompt, "It is 1, no, 2", finished=False).total == 0.0
    assert gsm8k.score(prompt, "It is 2, no, 1", finished=True).total == 0.0
    assert gsm8k.score(prompt, "I do not know", finished=True).parts["has_number"] == 0.0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is not JSON"),
        ('{"question": "q", "answer": "#### x"}', "has no final number"),
        ('{"question": "q", "answer": "https://a.org/12"}', "has no final number"),
    ],
)
def test_the_error_names_a_malformed_row_and_for_a_missing_file_the_settings(tmp_path, line, sentence):
    file = tmp_path / "bad.jsonl"
    with pytest.raises(TaskError, match="set task.train"):
        Gsm8kTask(str(file))
    file.write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(TaskError, match=rf"bad\.jsonl:2: .*{sentence}"):
        Gsm8kTask(str(file))


def test_every_answer_of_the_real_gsm8k_is_scored_as_correct(test_data):
    task = Gsm8kTask(str(test_data / "gsm8k/train.jsonl"), str(test_data / "gsm8k/test.jsonl"))
    assert (len(task.prompts()), len(task.held_out())) == (7473, 1319)
    for prompt in (*task.prompts(), *task.held_out()):
        assert task.score(prompt, f"The answer is {prompt.answer}", finished=True).total == 1.0


def test_arithmetic_is_the_same_in_every_process_and_keeps_held_out_problems_out_of_training():
    task = ArithmeticTask()
    prompts, held_out = task.prompts(), task.held_out()
    keys = [prompt.key for prompt in (*prompts, *held_out)]
    assert len(keys) == len(set(keys)) == 2 * 90 * 90
    # The order follows from sha256 of the problems only.
    assert [prompt.key for prompt in held_out[:3]] == ["49+95", "56+74", "12+70"]
    limited = LimitedTask(task, limit=5, held_out_limit=0)
    assert limited.prompts() == prompts[:5]
    assert limited.prompts() is limited.prompts(), "they are made once"
    assert len(limited.held_out()) == len(held_out)
    assert fingerprint(prompts[:4]) != fingerprint(prompts[3::-1])


def test_arithmetic_rewards_exact_answers_that_were_not_cut_off():
    task = ArithmeticTask()
    prompt = Prompt("23-61", "23-61=", "-38")
    assert task.score(prompt, "-38", finished=True).total == 1.0
    assert task.score(prompt, "-38", finished=False).total == 0.0
    assert task.score(prompt, "38", finished=True).parts == {"correct": 0.0, "format": 1.0}
    assert task.score(prompt, "3-8", finished=True).parts == {"correct": 0.0, "format": 0.0}


def test_the_configuration_names_every_shipped_task():
    assert {*tasks._SHIPPED, MIXTURE} == set(TASKS)


def own_task(*keys: str) -> Any:
    return SimpleNamespace(name="own", prompts=lambda: [Prompt(key, "question") for key in keys])


@pytest.mark.parametrize(
    ("keys", "sentence"), [((), "task own has no prompts"), ("aba", "the prompts 1 and 3 have the same key 'a'")]
)
def test_a_task_without_prompts_or_with_two_equal_keys_is_refused(keys, sentence):
    check_prompts(own_task("a", "b"))
    with pytest.raises(TaskError, match=sentence):
        check_prompts(own_task(*keys))


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
    # A limit keeps what a task declares.
    task = load_task(TaskSection(name=name.format(file), options={"times": 5}, limit=2))
    assert [prompt.key for prompt in task.prompts()] == ["stone0", "stone1"]
    assert least_reward(task) == -1.0


@pytest.mark.parametrize("method", ["prompts", "held_out"])
def test_an_error_of_the_code_that_makes_prompts_names_the_line(file, method):
    lines = FILE.splitlines()
    number = lines.index(f"    def {method}(self):") + 1
    lines.insert(number, "        {}['split']")
    file.write_text("\n".join(lines))
    sentence = rf"task spell: {method}\(\) failed at {re.escape(str(file))}:{number + 1}: KeyError: 'split'"
    with pytest.raises(TaskError, match=sentence):
        getattr(load_task(TaskSection(name=str(file))), method)()


def test_an_option_that_does_not_exist_or_fails_is_named_and_a_file_with_two_tasks_needs_a_name(file):
    for options, sentence in (
        ({"size": 2}, r"has no option size: it has times, fails"),
        ({"fails": True}, "cannot be loaded: OSError: no dictionary"),
    ):
        with pytest.raises(TaskError, match=sentence):
            load_task(TaskSection(name=str(file), options=options))
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
        ("neighbour", "{}", r"cannot be loaded: ModuleNotFoundError: No module named 'neighbours'"),
    ],
)
def test_the_error_names_what_a_class_lacks_to_be_a_task_or_what_its_file_imports(file, removed, name, sentence):
    changed = {"    def score": "    def other", '    name = "spell"': "", "neighbour": "neighbours"}
    file.write_text(FILE.replace(removed, changed.get(removed, removed)))
    with pytest.raises(TaskError, match=sentence):
        load_task(TaskSection(name=name.format(file)))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"name": "reasoning_gym"}, r"^task reasoning_gym needs task.options.generators: set it in the"),
        ({"name": "nowhere.py"}, r"nowhere.py: the file does not exist"),
        ({"name": "nowhere:Spell"}, r"there is no Python module nowhere here: name the file of the task, such as"),
        ({"name": "mixture", "mixture": [{}, {}]}, "two tasks with the label arithmetic"),
    ],
)
def test_the_error_names_what_a_task_needs_or_what_does_not_exist(task, sentence):
    with pytest.raises(TaskError, match=sentence):
        load_task(TaskSection.model_validate(task))


# ---------------------------------------------------------------- mixtures


def mixture(file, *weights):
    spell: dict[str, Any] = {"name": str(file), "options": {"times": 2}, "label": "letters"}
    sums: dict[str, Any] = {"name": "arithmetic", "limit": 6, "held_out_limit": 3}
    parts = [part | ({"weight": weight} if weight else {}) for part, weight in zip((spell, sums), weights, strict=True)]
    return TaskSection.model_validate({"name": "mixture", "mixture": parts})


def test_a_mixture_has_all_prompts_of_its_tasks_with_their_labels_and_weights_are_shares_of_an_epoch(file):
    task = load_task(mixture(file, None, None))
    check_prompts(task)
    keys = [prompt.key for prompt in task.prompts()]
    assert sorted(key.partition(":")[0] for key in keys) == ["arithmetic"] * 6 + ["letters"] * 2
    # Evenly, so that the first ones are a mixture too.
    assert {key.partition(":")[0] for key in keys[:4]} == {"arithmetic", "letters"}
    assert len(task.held_out()) == 1 + 3
    # Weights leave no prompt out.
    task = load_task(mixture(file, 2, 1))
    check_prompts(task)
    keys = [prompt.key for prompt in task.prompts()]
    assert sum(key.startswith("arithmetic:") for key in keys) == 6
    assert sum(key.startswith("letters") for key in keys) == 12
    assert {key.partition(":")[2] for key in keys if key.startswith("letters")} == {"stone0", "stone1"}
    with pytest.raises(TaskError, match=r"an epoch has 20,000,000,002 prompts, .* raise the weight of letters"):
        load_task(mixture(file, 1e-10, 1)).prompts()


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_each_prompt_of_a_mixture_is_scored_by_its_task_and_with_a_coroutine_concurrently(file, kind):
    file.write_text(FILE.replace("def score", f"{kind} score"))
    task = load_task(mixture(file, 2, 1))
    assert scores_concurrently(task) == (kind == "async def")
    assert least_reward(task) == -1.0
    for prompt in task.prompts():
        reward, error = score(task, prompt, prompt.answer, True)
        assert error is None
        label = name_of(task, prompt)
        assert least_reward(task, prompt) == (-1.0 if label == "letters" else 0.0)
        if label == "letters":
            assert reward == Reward(0.0, {"letters.reward": 0.0, "letters.letters": 1.0})
        else:
            parts = {"correct": 1.0, "arithmetic.reward": 1.0, "arithmetic.correct": 1.0, "arithmetic.format": 1.0}
            assert reward == Reward(1.0, parts)


def test_coroutines_that_are_scored_in_this_process_share_an_event_loop_and_an_error_without_a_message_is_named():
    loops = []

    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    class Connected:
        name = "judge"

        async def score(self, prompt, response, finished):
            loops.append(asyncio.get_running_loop())
            raise Silent

    task: Any = Connected()
    for _ in range(2):
        assert score(task, Prompt("p", "q"), "r", True) == (Reward(0.0, {}), "reward of judge: Silent")
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
def test_a_mixture_that_cannot_be_is_refused_by_the_configuration_and_a_field_is_named(task, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate({"task": task})
    mixture = ["task.name=mixture", 'task.mixture=[{name="arithmetic"}, {name="gsm8k", wieght=2}]']
    with pytest.raises(ConfigError, match=r"^task\.mixture\[1\]\.wieght \(--set\): extra inputs"):
        resolve(None, environment={}, assignments=mixture)


def test_the_prompt_of_a_mixture_keeps_its_messages(file):
    from tba.searcher.tasks.mixture import MixtureTask

    def score(prompt: Prompt, *_: Any) -> Reward:
        return Reward(float(prompt.key == "a" and prompt.messages[0][1] == "hello"), {})

    prompts = [Prompt("a", messages=(("user", "hello"),))]
    chat: Any = SimpleNamespace(name="chat", prompts=lambda: prompts, score=score)
    task = MixtureTask([(None, chat, None)])
    (prompt,) = task.prompts()
    assert prompt.messages == (("user", "hello"),)
    assert task.score(prompt, "", True) == Reward(1.0, {"chat.reward": 1.0})
