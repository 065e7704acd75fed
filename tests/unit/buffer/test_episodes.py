"""Episodes and evaluations in the database: turns as rows of a view, batches of episodes, and what was measured."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tba.common.errors import StorageError
from tba.common.wire.codec import encode_reply
from tba.common.wire.messages import HeldOutResponse, PutEvaluation
from tba.common.wire.trajectory import SEGMENTS
from tba.tests.helpers.examples import STATE
from tba.tests.helpers.puts import make_episode

# One sequence of sampled tokens.
WHOLE: dict[str, Any] = {"segments": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8)}


@pytest.fixture
def buffer(harness, trajectory):
    """A buffer with two groups, each of an episode and a response of one turn, and a failed episode."""
    made = harness(fill=(2, 0))
    for n in range(2):
        episode = make_episode(f"p{n}", 0, tokens=[n, *make_episode().response_ids[1:]])
        made.put([episode, trajectory(f"p{n}", 0, tokens=[n, 9])], first_sequence=10 * n)
    failed: dict[str, Any] = {
        "error": "environment: no answer",
        "error_kind": "turn_timeout",
        "stop_reason": "turn_timeout",
    }
    made.put([make_episode(lease=0, **failed, turns=make_episode().turns[:1])], first_sequence=50)
    return made


def test_the_view_of_turns_has_every_turn_that_was_sent(buffer):
    columns = "trajectory, run, prompt, turn, start, tokens, seconds, environment_seconds, reward, parts, messages"
    found = buffer.store.database.all(f"SELECT {columns} FROM turns ORDER BY trajectory, turn")
    sent = [
        (1, "p0", make_episode()),
        (3, "p1", make_episode()),
        (5, "p0", make_episode(turns=make_episode().turns[:1])),
    ]
    assert found == [
        (id_, "test", prompt, n, turn["start"], turn["tokens"], 0.5, None, turn["reward"], "{}", '[["user","on"]]')
        for id_, prompt, episode in sent
        for n, turn in enumerate(episode.turns)
    ]
    rows = buffer.store.database.all("SELECT stop_reason, turns, error_kind FROM trajectories ORDER BY id")
    assert rows == [*([("completed", 4, None), ("eos", 0, None)] * 2), ("turn_timeout", 1, "turn_timeout")]


def test_a_batch_of_episodes_has_their_turn_rewards_and_is_repeated_after_a_restart(buffer, harness):
    first = buffer.sample(0, prompts=2, samples=2)
    rewards = {1: [0.25, -0.5, 0.0, 1.0], 3: [0.25, -0.5, 0.0, 1.0]}
    assert first.message.turn_rewards == [rewards.get(id_, []) for id_ in first.message.trajectory_ids]
    counts = [2 if id_ in rewards else 0 for id_ in first.message.trajectory_ids]
    assert first.message.segments_count == counts
    assert np.frombuffer(first.frames[SEGMENTS], "<i4").tolist() == [4, 9] * 2
    buffer.store.close()
    again = harness(buffer.store.path).sample(0, prompts=2, samples=2)
    assert (again.message, again.frames) == (first.message, first.frames)


def test_the_size_of_a_batch_counts_the_rewards_of_turns(harness):
    buffer = harness(fill=(1, 0))
    turns = [make_episode().turns[0] | {"start": n, "tokens": 1, "reward": 0.1} for n in range(1000)]
    rows = [
        make_episode(lease=0, tokens=[*range(999), k], logprobs=np.zeros(1000, np.float32), turns=turns, **WHOLE)
        for k in range(9)
    ]
    buffer.put(rows, 0)
    reply = buffer.sample(0, prompts=1, samples=9)
    header = encode_reply(reply.message, id=1, run="", state=STATE, frames=reply.frames)[0]
    # What `_MAX_BATCH_HEADER` leaves for the rest of a header.
    assert len(header) - (64 << 10) > 0
    assert len(header) - 1000 <= sum(
        size for size, *_ in buffer.store.trajectories.sizes(reply.message.trajectory_ids).values()
    )


MALFORMED = [("turns", "["), ("turns", "[1]"), ("turns", '[{"start": 0}]'), ("reward_parts", '{"correct": []}')]


@pytest.mark.parametrize(("column", "value"), MALFORMED)
def test_a_batch_with_malformed_values_is_refused(buffer, column, value):
    buffer.store.database.execute(f"UPDATE trajectory_rows SET {column} = ?", (value,))
    with pytest.raises(StorageError, match=f"{column.replace('_', ' ')} that the database holds are malformed"):
        buffer.sample(0, prompts=2, samples=2)


def test_equal_responses_to_different_contexts_are_no_duplicates(harness, trajectory):
    buffer = harness(fill=(1, 0))
    contexts = ([1, 2], [1, 2, 3], [1, 2])
    rows = [replace(trajectory(tokens=[5, 6]), prompt_ids=np.array(ids, np.int32)) for ids in contexts]
    buffer.put(rows, 0)
    hashes = [one for (one,) in buffer.store.database.all("SELECT dedup_hash FROM trajectory_rows ORDER BY id")]
    assert hashes[0] == hashes[2] != hashes[1]


def put(buffer, *responses: HeldOutResponse, version: int = 0, **changes: Any) -> None:
    fields: dict[str, Any] = {"step": version, "evaluated_at": 1.0 + version, "metrics": {"accuracy": 0.5}} | changes
    settings: dict[str, Any] = {"prompts": 2, "prompt_set": "a", "settings": "b", "seconds": 1.0, "intervals": {}}
    message = PutEvaluation(version=version, responses=list(responses), **settings | fields)
    buffer.ask(message, role="evaluator", sender="e.1")


def response(prompt: str, text: str, correct: float, **changes: Any) -> HeldOutResponse:
    fields: dict[str, Any] = {"reward": correct, "reward_parts": {"correct": correct}} | changes
    return HeldOutResponse(prompt=prompt, prompt_text=f"{prompt}?", answer="42", response=text, **fields)


def test_the_responses_of_an_evaluation_are_replaced_with_it_but_not_by_one_without_a_measurement(harness):
    buffer = harness()
    put(buffer, response("p0", "41", 0.0), response("p1", "42", 1.0))
    put(buffer, response("p0", "42", 1.0))
    put(buffer, response("p0", "", 0.0, error="ConnectError"), not_measured="2 of 2", metrics={"failed": 1.0})
    rows = buffer.store.database.all("SELECT prompt, answer, response, passed FROM held_out")
    assert rows == [("p0", "42", "42", 1)]
    assert buffer.store.database.all("SELECT accuracy, not_measured FROM evaluations") == [(0.5, None)]


def test_the_wrong_responses_are_those_of_the_newest_evaluation(harness, tba_here):
    buffer = harness()
    asked = ("eval", "--wrong", "--json", "--set", f"buffer.database={buffer.store.path}", "--set", "run.name=test")
    nothing = tba_here(*asked)
    assert (nothing.exit_code, "evaluate it with `tba eval`" in nothing.message) == (2, True)
    put(buffer, response("p0", "40", 0.0))
    put(buffer, response("p0", "41", 0.0), response("p1", "42", 1.0), response("p2", "", 0.0, error="no"), version=8)
    put(buffer, response("p9", "7", 0.3, reward_parts={}), version=9, step=3)
    buffer.store.close()
    rows = tba_here(*asked).json
    assert [(row["version"], row["prompt"], row["response"], row["error"]) for row in rows] == [
        (8, "p0?", "41", None),
        (8, "p2?", "", "no"),
    ]
