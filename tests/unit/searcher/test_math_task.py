"""The math task: which answers are right, by tables and MATH-500, and what happens when the comparison fails."""

import json
import random
import re
import threading

import pytest

from tba.common.errors import TaskError
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks.answers import last_boxed, normalised
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.verdicts import read_verdicts
from tba.tests.runner import size

pytest.importorskip("math_verify", reason="the extra math is not installed")

from tba.searcher.tasks import mathematics, verdict
from tba.searcher.tasks.answers import why_no_gold
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.verdict import is_readable


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Verdicts must not depend on the load of the machine."""
    monkeypatch.setattr(verdict, "LIMIT_SECONDS", 60)


@pytest.fixture
def make_task(tmp_path):
    """Make a task of rows; keyword arguments are those of the task."""

    def make(*rows, **options) -> MathTask:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        return MathTask(str(file), **options)

    return make


@pytest.fixture
def task(make_task):
    return make_task({"problem": "1 + 1?", "answer": "2"})


def test_an_answer_that_was_cut_off_is_wrong(task):
    reward = task.score(task.prompts()[0], r"\boxed{2}", finished=False)
    assert (reward.total, reward.parts) == (0.0, {"correct": 0.0, "has_boxed": 1.0})


# math-verify's alarm may go off in a callback of the interpreter, where it is reported and lost.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_response_whose_comparison_takes_too_long_is_not_scored(task, monkeypatch):
    # First, since the parser is loaded with the first answer.
    assert task.score(Prompt("p", "", "5"), r"\boxed{\frac{10}{2}}", True).total
    monkeypatch.setattr(verdict, "LIMIT_SECONDS", 1)
    reward, error = score(task, Prompt("p", "", "5"), r"\boxed{9^{9^{9^9}}}", True)
    assert (reward.parts, error) == ({}, "reward of math: TimeoutException: Operation timed out!")


def test_math_is_scored_in_the_main_thread_only(task):
    raised = []

    def score_here() -> None:
        try:
            task.score(task.prompts()[0], r"\boxed{3}", True)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=score_here)
    thread.start()
    thread.join(60)
    assert "main thread" in raised[0]


@pytest.mark.parametrize(
    ("row", "options", "gold"),
    [
        ({"question": "q", "answer": "2 + 2 = 4\n#### 4"}, {}, "4"),
        ({"problem": "q", "solution": r"so it is $\boxed{\frac{1}{2}}$."}, {}, r"\frac{1}{2}"),
        ({"q": "q", "a": "7"}, {"problem": "q", "answer": "a", "prompt": "{problem} ="}, "7"),
    ],
)
def test_columns_are_found_or_named(make_task, row, options, gold):
    (prompt,) = make_task(row, **options).prompts()
    assert prompt.answer == gold
    assert prompt.text.startswith("q ") or prompt.text.startswith("q\n")


def test_a_gold_answer_that_a_busy_machine_does_not_read_in_time_is_not_refused(make_task, monkeypatch):
    def slow(_):
        raise verdict.math_verify().errors.TimeoutException

    task = make_task({"problem": "What?", "answer": "7"})
    monkeypatch.setattr(mathematics, "is_readable", slow)
    task.check()


@pytest.mark.parametrize(
    "gold",
    [
        *("", " ", "proof", "Proof.", r"\text{proof}", "TBD", "notfound", "None", "nan", r"\text{N/A}"),
        *("https://a.org/12", "omitted", "unknown", "[asy] draw((0,0)--(1,1)); [/asy]"),
        *("9 (see figure)", "See the solution", "Answers may vary."),
        *(r"\text{Answers will differ}", "?", "...", "![](a.png)", r"\includegraphics{a}", "<image>", r"\blacksquare"),
    ],
)
def test_a_gold_answer_that_is_none_is_refused_with_its_file_and_row(make_task, gold):
    with pytest.raises(TaskError, match=r"rows.jsonl:2: the gold answer .*: it .*: correct or remove"):
        make_task({"problem": "p", "answer": "none"}, {"problem": "q", "answer": gold})


def test_a_gold_answer_that_says_that_there_is_no_value_is_one():
    golds = (
        "none",
        "no solution",
        "undefined",
        "never",
        r"\text{cannot be determined}",
        r"\infty",
        "not enough information",
    )
    assert [gold for gold in golds if why_no_gold(gold) or not is_readable(gold)] == []


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{1 + \boxed{2} + \boxed{3}}", "1 + {2} + {3}"),
        (r"\boxed{1 + \fbox {\boxed{2}}}", "1 + {{2}}"),
        (r"\boxed{" * 20_000 + "3}", "3"),
        # Quadratic time would be more than the time limit of a test.
        (rf"\boxed{{1}},{' ' * 1_000_000}x\boxed{{2}}", "2"),
        ("none", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_last_box_has_balanced_braces(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$1{,}000$", "1000"),
        (" 1 234~567 ", "1234567"),
        (r"\text{a b}", "ab"),
        (r"\left(1, 2\right)", "(1,2)"),
        ("x  =  5 y", "x=5y"),
    ],
)
def test_notations_of_one_answer_are_equal(one, other):
    assert normalised(one) == normalised(other)


def test_a_space_between_two_numbers_is_kept():
    assert [normalised(one) for one in ("2 1/4", "12 3", "1  2345")] == [r"2\frac{1}{4}", "12 3", "1 2345"]
    # Quadratic time would be more than the time limit of a test.
    assert normalised(f"2{' ' * 1_000_000}1") == "2 1"


PAIRS = size(600, 6_000)
KINDS = read_verdicts("math_kinds.txt")
TABLES = KINDS | read_verdicts("math_answers.txt")


@pytest.fixture
def graded(task):
    """Scores a response by a gold answer. It raises for a verdict that is unknown."""

    def score_response(gold: str, response: str) -> bool:
        return task.score(Prompt("p", "", gold), response, True).total == 1

    return score_response


@pytest.mark.slow
def test_a_number_of_any_length_has_a_verdict(graded):
    assert [graded("42", one) for one in ("9" * 10_000, rf"\boxed{{{'9' * 10_000}}}")] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_each_answer_has_the_verdict_of_its_table(graded, table):
    assert [row for row in TABLES[table] if graded(row[0], row[1]) != row[2]] == []


@pytest.mark.slow
def test_a_right_answer_can_be_read_as_a_gold_answer():
    golds = {gold for rows in KINDS.values() for gold, *_ in rows}
    assert [gold for gold in golds if why_no_gold(gold) or not is_readable(gold)] == []


@pytest.fixture
def math_500(test_data):
    """The problem, solution and answer of each row."""
    return [json.loads(line) for line in (test_data / "math500/test.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_solution_of_math_500_is_right(graded, math_500):
    assert [row["answer"] for row in math_500 if not graded(row["answer"], row["solution"])] == []


def without_unit(answer: str) -> str:
    """An answer without what the grader lets miss: a text behind it, degrees, percent and dollars."""
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    return re.sub(r"\\text\{[^}]*\}(\^\d)?|\^\{?\\circ\}?|\\[%$!,]|\s", "", answer)


@pytest.mark.slow
def test_the_answer_to_another_problem_is_wrong_unless_it_is_the_same_up_to_a_unit(graded, math_500):
    rng = random.Random(34)
    pairs = [rng.sample([row["answer"] for row in math_500], 2) for _ in range(PAIRS)]
    different = [pair for pair in pairs if without_unit(pair[0]) != without_unit(pair[1])]
    assert len(different) > 0.98 * PAIRS
    assert [pair for pair in different if graded(pair[0], rf"\boxed{{{pair[1]}}}")] == []
