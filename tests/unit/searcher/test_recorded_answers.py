"""The scores of 1,000 recorded responses are those of scorers that share no code with the tasks."""

import pytest

from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.tests.helpers.recorded_answers import gsm8k_responses, gsm8k_verdict, math_responses, math_verdict


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
