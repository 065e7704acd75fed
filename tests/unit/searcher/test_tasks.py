"""Tasks: prompts, keys, scores."""

import json
from decimal import Decimal

import pytest

from tba.common.config.task import MIXTURE, TASKS
from tba.common.errors import TaskError
from tba.searcher import tasks
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.gsm8k import Gsm8kTask, last_number
from tba.searcher.tasks.task import LimitedTask, Prompt, Reward, check_prompts, fingerprint
from tba.tests.helpers.recorded_answers import gsm8k_responses, gsm8k_verdict, math_responses, math_verdict
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
        # Quadratic time would be more than the time limit of a test.
        ("1" + ",23" * 100_000, 23),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize("kind", RESPONSES := read_rows("gsm8k_answers.txt"))
def test_gsm8k_reads_the_number_that_a_response_states(kind):
    found = [(number, response, last_number(response)) for number, response in RESPONSES[kind]]
    assert [row for row in found if row[2] != (None if row[0] == "none" else Decimal(row[0]))] == []


def test_gsm8k_scores_the_last_number(gsm8k):
    prompt = gsm8k.prompts()[1]
    assert gsm8k.score(prompt, "It is 1, no, 2", finished=True).parts == {"correct": 1.0, "has_number": 1.0}
    assert gsm8k.score(prompt, "It is 1, no, 2", finished=False).total == 0.0
    assert gsm8k.score(prompt, "It is 2, no, 1", finished=True).total == 0.0
    assert gsm8k.score(prompt, "I do not know", finished=True).parts["has_number"] == 0.0


def test_gsm8k_keys_depend_on_the_question_alone(gsm8k):
    assert len({prompt.key for prompt in gsm8k.prompts()}) == 3
    assert gsm8k.prompts()[0].key == gsm8k.held_out()[0].key


def test_gsm8k_uses_the_format_of_the_paper(gsm8k):
    assert gsm8k.prompts()[0].text == "[MATH TASK] Problem:\nWhat is 0 + 1?\n\nSolution:\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "the column question is missing; the row has no column"),
        ('{"question": "q", "answer": "#### x"}', "has no final number"),
        ('{"question": "q", "answer": "https://a.org/12"}', "has no final number"),
    ],
)
def test_the_error_names_a_malformed_row(tmp_path, line, sentence):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(TaskError, match=rf"bad\.jsonl.*{sentence}|row 2.*{sentence}|{sentence}"):
        Gsm8kTask(str(file))


def test_the_error_for_a_missing_file_names_the_settings(tmp_path):
    with pytest.raises(TaskError, match="set task.train"):
        Gsm8kTask(str(tmp_path / "nowhere.jsonl"))


def test_every_answer_of_the_real_gsm8k_is_scored_as_correct(test_data):
    task = Gsm8kTask(str(test_data / "gsm8k/train.jsonl"), str(test_data / "gsm8k/test.jsonl"))
    assert (len(task.prompts()), len(task.held_out())) == (7473, 1319)
    for prompt in (*task.prompts(), *task.held_out()):
        assert task.score(prompt, f"The answer is {prompt.answer}", finished=True).total == 1.0


def test_arithmetic_keeps_held_out_problems_out_of_training():
    task = ArithmeticTask()
    train, held_out = ({prompt.key for prompt in prompts} for prompts in (task.prompts(), task.held_out()))
    assert not train & held_out
    assert len(train) + len(held_out) == 2 * 90 * 90


def test_arithmetic_rewards_exact_answers_that_were_not_cut_off():
    task = ArithmeticTask()
    prompt = Prompt("23-61", "23-61=", "-38")
    assert task.score(prompt, "-38", finished=True).total == 1.0
    assert task.score(prompt, "-38", finished=False).total == 0.0
    assert task.score(prompt, "38", finished=True).parts == {"correct": 0.0, "format": 1.0}
    assert task.score(prompt, "3-8", finished=True).parts == {"correct": 0.0, "format": 0.0}


def test_arithmetic_is_the_same_in_every_process():
    # The order follows from sha256 of the problems only.
    assert [prompt.key for prompt in ArithmeticTask().held_out()[:3]] == ["49+95", "56+74", "12+70"]


def test_a_limited_task_keeps_the_first_prompts():
    task = LimitedTask(ArithmeticTask(), limit=5, held_out_limit=0)
    assert task.prompts() == ArithmeticTask().prompts()[:5]
    assert len(task.held_out()) == len(ArithmeticTask().held_out())


def test_the_fingerprint_depends_on_the_order():
    prompts = ArithmeticTask().prompts()[:4]
    assert fingerprint(prompts) != fingerprint(prompts[::-1])


def test_the_configuration_names_every_shipped_task():
    assert {*tasks._SHIPPED, MIXTURE} == set(TASKS)


class OwnTask:
    """A task as users write it."""

    name = "own"

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def prompts(self):
        return [Prompt(key, "question", "answer") for key in self._keys]

    def held_out(self):
        return []

    def score(self, prompt, response, finished):
        return Reward(float(response == prompt.answer), {})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [((), "task own has no prompts"), ("aba", "the prompts 1 and 3 have the same key 'a'")],
)
def test_a_task_without_prompts_or_with_two_equal_keys_is_refused(keys, sentence):
    check_prompts(OwnTask("a", "b"))
    with pytest.raises(TaskError, match=sentence):
        check_prompts(OwnTask(*keys))


# The scores of 1,000 recorded responses are those of scorers that share no code with the tasks.


def differences(task, responses, verdict):
    """The responses whose score differs from the verdict, and how many are right."""
    scored = [(one, task.score(one.prompt, one.text, one.finished), verdict(one)) for one in responses]
    assert len(scored) == 500
    assert len({one.kind for one, *_ in scored}) == 20
    wrong = [
        (one.kind, one.prompt.answer, one.text[:80], reward.total)
        for one, reward, expected in scored
        if reward.total != expected
    ]
    return wrong, sum(expected for *_, expected in scored)


def test_gsm8k_agrees_with_exact_arithmetic(test_data):
    task = Gsm8kTask(str(test_data / "gsm8k/test.jsonl"))
    wrong, right = differences(task, gsm8k_responses(task.prompts()[:500], seed=19), gsm8k_verdict)
    assert not wrong
    assert 150 <= right <= 350


@pytest.mark.slow
def test_math_agrees_with_exact_arithmetic_and_math_verify(test_data):
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    from tba.searcher.tasks.mathematics import MathTask

    task = MathTask(str(test_data / "math500/test.jsonl"))
    task.check()
    wrong, right = differences(task, math_responses(task.prompts(), seed=19), math_verdict)
    assert not wrong
    assert 150 <= right <= 400
