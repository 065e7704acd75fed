"""Which answers are right: tables by kind and by category, the solutions of MATH-500, and answers to other problems."""

import json
import random
import re

import pytest

from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.verdicts import read_verdicts

pytest.importorskip("math_verify", reason="the extra math is not installed")

from tba.searcher.tasks import verdict
from tba.searcher.tasks.answers import why_no_gold
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.verdict import is_readable

KINDS = read_verdicts("math_kinds.txt")
TABLES = KINDS | read_verdicts("math_answers.txt")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Verdicts must not depend on the load of the machine."""
    monkeypatch.setattr(verdict, "LIMIT_SECONDS", 60)


@pytest.fixture
def score(tmp_path):
    """Scores a response by a gold answer. It raises for a verdict that is unknown."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "1 + 1?", "answer": "2"}')
    task = MathTask(str(file))

    def score_response(gold: str, response: str) -> bool:
        return task.score(Prompt("p", "", gold), response, True).total == 1

    return score_response


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_each_answer_has_the_verdict_of_its_table(score, table):
    assert [row for row in TABLES[table] if score(row[0], row[1]) != row[2]] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_twenty_right_answers_and_ten_wrong_ones(kind):
    right = sum(row[2] for row in KINDS[kind])
    assert right >= 20
    assert len(KINDS[kind]) - right >= 10


@pytest.mark.slow
def test_a_right_answer_can_be_read_as_a_gold_answer():
    golds = {gold for rows in KINDS.values() for gold, *_ in rows}
    assert [gold for gold in golds if why_no_gold(gold) or not is_readable(gold)] == []


@pytest.fixture
def math_500(test_data):
    """The problem, solution and answer of each row."""
    return [json.loads(line) for line in (test_data / "math500/test.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_solution_of_math_500_is_right(score, math_500):
    assert [row["answer"] for row in math_500 if not score(row["answer"], row["solution"])] == []


def without_unit(answer: str) -> str:
    """An answer without what the grader lets miss: a text behind it, degrees, percent and dollars."""
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    return re.sub(r"\\text\{[^}]*\}(\^\d)?|\^\{?\\circ\}?|\\[%$!,]|\s", "", answer)


@pytest.mark.slow
def test_the_answer_to_another_problem_is_wrong_unless_it_is_the_same_up_to_a_unit(score, math_500):
    rng = random.Random(34)
    pairs = [rng.sample([row["answer"] for row in math_500], 2) for _ in range(6_000)]
    different = [pair for pair in pairs if without_unit(pair[0]) != without_unit(pair[1])]
    assert len(different) > 5_900
    assert [pair for pair in different if score(pair[0], rf"\boxed{{{pair[1]}}}")] == []
