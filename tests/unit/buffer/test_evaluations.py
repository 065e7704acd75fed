"""Evaluations in the database: what they measured, and the responses that they come from."""

from typing import Any

from tba.common.wire.messages import HeldOutResponse, PutEvaluation


def put(buffer, *responses: HeldOutResponse, version: int = 0, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "step": version,
        "prompts": 2,
        "prompt_set": "a",
        "settings": "b",
        "evaluated_at": 1.0 + version,
        "seconds": 1.0,
    }
    metrics: dict[str, Any] = {"metrics": {"accuracy": 0.5}, "intervals": {}}
    message = PutEvaluation(version=version, responses=list(responses), **fields | metrics | changes)
    buffer.ask(message, role="evaluator", sender="e.1")


def response(prompt: str, text: str, correct: float, **changes: Any) -> HeldOutResponse:
    fields: dict[str, Any] = {
        "prompt_text": f"{prompt}?",
        "answer": "42",
        "reward": correct,
        "reward_parts": {"correct": correct},
    }
    return HeldOutResponse(prompt=prompt, response=text, **fields | changes)


def test_the_responses_of_an_evaluation_are_replaced_with_it(harness):
    buffer = harness()
    put(buffer, response("p0", "41", 0.0), response("p1", "42", 1.0))
    put(buffer, response("p0", "42", 1.0))
    rows = buffer.store.database.all("SELECT prompt, answer, response, passed FROM held_out")
    assert rows == [("p0", "42", "42", 1)]


def test_an_evaluation_without_a_measurement_leaves_a_measured_one_as_it_is(harness):
    buffer = harness()
    put(buffer, response("p0", "42", 1.0))
    put(buffer, response("p0", "", 0.0, error="ConnectError"), not_measured="2 of 2", metrics={"failed": 1.0})
    columns = "accuracy, not_measured, (SELECT response FROM held_out)"
    assert buffer.store.database.all(f"SELECT {columns} FROM evaluations") == [(0.5, None, "42")]


def test_the_wrong_responses_are_those_of_the_newest_evaluation(harness, tba_here):
    buffer = harness()
    put(buffer, response("p0", "40", 0.0))
    put(buffer, response("p0", "41", 0.0), response("p1", "42", 1.0), response("p2", "", 0.0, error="no"), version=8)
    put(buffer, response("p9", "7", 0.3, reward_parts={}), version=9, step=3)
    buffer.store.close()
    where = ("--set", f"buffer.database={buffer.store.path}", "--set", "run.name=test")
    rows = tba_here("eval", "--wrong", "--json", *where).json
    assert [(row["version"], row["prompt"], row["response"], row["error"]) for row in rows] == [
        (8, "p0?", "41", None),
        (8, "p2?", "", "no"),
    ]


def test_without_stored_responses_the_question_what_is_wrong_has_no_answer(harness, tba_here):
    buffer = harness()
    buffer.store.close()
    where = ("--set", f"buffer.database={buffer.store.path}", "--set", "run.name=test")
    asked = tba_here("eval", "--wrong", *where)
    assert (asked.exit_code, "evaluate it with `tba eval`" in asked.message) == (2, True)
