"""The turns of an episode become one row, from which each context and each completion can be read again."""

import warnings
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from tba.common.wire.trajectory import EpisodeTokens, SampledTurn, join_turns, sequences
from tba.tests.helpers.puts import make_trajectory

TRL = pytest.mark.skipif(not find_spec("trl"), reason="TRL is not installed")


def turn(context: list[int], completion: list[int], version: int = 3, **details) -> SampledTurn:
    return SampledTurn(context, completion, [-id_ / 8 for id_ in completion], [[version, len(completion)]], details)


def sequences_of(row: EpisodeTokens) -> list[tuple[list[int], list[int], list[float]]]:
    """Return ids, mask and log-probabilities of the sequences that a trainer runs."""
    found = []
    for context, response, mask, logprobs in sequences(make_trajectory(**row._asdict())):
        zeros = [0] * len(context)
        found.append(([*context.tolist(), *response.tolist()], zeros + mask.tolist(), zeros + logprobs.tolist()))
    return found


def random_chain(rng: np.random.Generator) -> list[SampledTurn]:
    """Return turns whose contexts mostly extend the last one; others lose or change a few of its tokens, or all."""
    chain: list[SampledTurn] = []
    held: list[int] = rng.integers(1, 5, rng.integers(1, 6)).tolist()
    for _ in range(rng.integers(1, 7)):
        kind, tail = rng.integers(5), rng.integers(1, 5, rng.integers(0, 4)).tolist()
        if kind == 0 and len(held) > 1:
            del held[-rng.integers(1, len(held)) :]
        elif kind == 1:
            held[rng.integers(len(held))] = 9
        chain.append(turn(held + tail, rng.integers(1, 5, rng.integers(1, 5)).tolist(), int(rng.integers(3))))
        held = [*chain[-1].prompt_token_ids, *chain[-1].completion_token_ids]
    return chain


def test_what_was_put_between_two_turns_is_masked_and_has_the_version_of_the_turn_after_it():
    row = join_turns([turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 6, 7], [8], 6, reward=0.5)])
    assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == ([1, 2], [3, 4, 6, 7, 8])
    assert (row.loss_mask.tolist(), row.logprobs.tolist()) == ([1, 1, 0, 0, 1], [-0.375, -0.5, 0, 0, -1])
    assert (row.version_runs.tolist(), row.segments.tolist()) == ([[5, 2], [6, 3]], [])
    empty = {"seconds": 0.0, "reward": 0.0, "parts": {}, "messages": []}
    assert row.turns == [{**empty, "start": 0, "tokens": 2}, {**empty, "start": 4, "tokens": 1, "reward": 0.5}]


def test_a_context_that_does_not_extend_the_last_turn_or_is_shorter_begins_a_segment():
    row = join_turns([turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6]), turn([1, 2, 4, 5, 6, 7], [8])])
    assert row.response_ids.tolist() == [3, 4, 1, 2, 4, 5, 6, 7, 8]
    assert (row.segments.tolist(), row.version_runs.tolist()) == ([2], [[3, 9]])
    assert [ids for ids, _, _ in sequences_of(row)] == [[1, 2, 3, 4], [1, 2, 4, 5, 6, 7, 8]]
    assert join_turns([turn([1, 2], [3, 4]), turn([1, 2, 3], [4])]).segments.tolist() == [2]


def test_kept_tokens_of_turns_are_joined_if_all_turns_have_some():
    first, second = replace(turn([1], [3, 4]), kept=[9, 0, 0]), replace(turn([1, 3, 4, 6], [8]), kept=[2, 0])
    assert join_turns([first, second]).kept.tolist() == [9, 0, 0, 0, 2, 0]
    assert join_turns([first, replace(second, kept=())]).kept.tolist() == []


def test_every_turn_of_random_chains_keeps_its_context_completion_and_version():
    rng = np.random.default_rng(0)
    for chain in (random_chain(rng) for _ in range(500)):
        row = join_turns(chain)
        versions = np.repeat(row.version_runs[:, 0], row.version_runs[:, 1])
        ends = [*row.segments.tolist(), len(row.response_ids)]
        for one, entry in zip(chain, row.turns, strict=True):
            start, stop = entry["start"], entry["start"] + entry["tokens"]
            number = next(number for number, end in enumerate(ends) if stop <= end)
            ids, _, _ = sequences_of(row)[number]
            given = len(ids) - (ends[number] - start)
            assert (ids[:given], ids[given:][: stop - start]) == (one.prompt_token_ids, one.completion_token_ids)
            assert row.loss_mask[start:stop].all()
            assert set(versions[start:stop].tolist()) == {one.version_runs[0][0]}
        assert row.loss_mask.sum() == sum(len(one.completion_token_ids) for one in chain)


@TRL
@pytest.mark.slow
def test_the_sequences_of_random_chains_are_those_of_trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences
    rng, forks = np.random.default_rng(1), 0
    for chain in (random_chain(rng) for _ in range(2000)):
        records = [
            TurnRecord(list(one.prompt_token_ids), list(one.completion_token_ids), list(one.logprobs)) for one in chain
        ]
        # From a threshold of two on, TRL writes over sampled tokens that the next context has changed. We never do.
        theirs, tally = _chain_to_sequences(records, "episode", fork_threshold=1)
        assert sequences_of(join_turns(chain)) == [
            (one.input_ids, one.completion_mask, one.old_log_probs) for one in theirs
        ]
        forks += int(tally["fork"])
    assert forks > 500
