"""The reasoning-gym task: problems that every process makes alike, and the faults of some scorers."""

import json
from dataclasses import replace

import pytest

from tba.common.errors import TaskError
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks.reasoning import Items, decode_entry, encode_entry
from tba.searcher.tasks.task import Reward

VALUES = {"a": (1, (2.5, None)), "b": [{1: "x", (2, 3): ["y"]}, {}], "c": True}


def test_an_entry_survives_json():
    assert decode_entry(json.loads(json.dumps(encode_entry(VALUES)))) == VALUES


def test_generators_get_problems_by_their_weights():
    items = Items({"a": (2.0, {}), "b": (1.0, {}), "c": (0.001, {})}, size=30, held_out_size=0, seed=0)
    assert items.counts == {"a": (20, 0), "b": (10, 0), "c": (1, 0)}


@pytest.fixture
def make_task():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning is not installed")
    from tba.searcher.tasks.reasoning import ReasoningGymTask

    return ReasoningGymTask


@pytest.mark.slow
def test_problems_are_the_same_in_every_process_and_held_out_ones_are_others(make_task, monkeypatch):
    # word_ladder depends on the hash seed; basic_arithmetic with one digit repeats questions.
    generators = {
        "word_ladder": {},
        "basic_arithmetic": {"max_terms": 2, "min_digits": 1, "max_digits": 1, "weight": 3},
    }
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        task = make_task(generators, size=40, held_out_size=20)
        made.append((task.prompts(), task.held_out()))
    assert made[0] == made[1]
    training, held_out = ([prompt.text for prompt in prompts] for prompts in made[0])
    assert len(held_out) == 20
    assert len(set(training) | set(held_out)) == len(training) + len(held_out)


@pytest.mark.slow
def test_a_right_answer_is_correct_and_one_of_the_right_form_is_not(make_task):
    task = make_task("chain_sum", size=2, held_out_size=0)
    prompt = task.prompts()[0]
    right = json.loads(prompt.answer)["entry"]["answer"]
    assert task.score(prompt, f"so <answer>1</answer><answer> {right} </answer>", True).parts["correct"] == 1.0
    assert task.score(prompt, right, True).total == 1.0
    assert task.score(prompt, right, False).total == 0.0
    wrong = task.score(prompt, f"{right}1", True)
    assert wrong.parts == {"correct": 0.0, "score": wrong.total}


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "answer"), [("prime_factorization", "none"), ("coin_flip", "1e999")])
def test_an_odd_answer_for_which_a_scorer_raises_is_wrong_and_a_worker_says_so(make_task, generator, answer, caplog):
    task = make_task([generator], size=1, held_out_size=0)
    assert task.score(task.prompts()[0], answer, True).parts == {"correct": 0.0, "score": 0.0}
    assert [(record.levelname, record.fields["by"]) for record in caplog.records] == [("WARNING", generator)]


@pytest.mark.slow
def test_a_response_is_not_scored_if_its_scorer_fails_for_the_right_answer_too(make_task):
    task = make_task("prime_factorization", size=1, held_out_size=0)
    prompt = task.prompts()[0]
    problem = json.loads(prompt.answer)
    problem["entry"]["answer"] = "none"
    prompt = replace(prompt, answer=json.dumps(problem))
    reward, error = score(task, prompt, "none", True)
    assert (reward, str(error)[:36]) == (Reward(0.0, {}), "reward of reasoning_gym: ValueError:")


@pytest.mark.slow
def test_settings_that_a_generator_refuses_are_named(make_task):
    with pytest.raises(TaskError, match="cannot be made: .*min_terms"):
        make_task({"chain_sum": {"min_terms": 0}}, size=2).prompts()
