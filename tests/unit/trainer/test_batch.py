"""Decoding the buffer's batches, and padding rows."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tba.common.errors import ConfigError, WireError
from tba.common.wire import messages
from tba.common.wire.trajectory import ARRAY_KINDS
from tba.trainer.batch.batch import counted, decode, pad


def make_message(prompts=("a", "a", "b", "b"), **fields) -> tuple[messages.Batch, list[memoryview]]:
    """Return a batch of four trajectories with prompt [1, 2] and responses of 1 to 4 tokens."""
    arrays: dict[str, Any] = {
        "prompt_ids": [[1, 2]] * 4,
        "response_ids": [[3], [4, 5], [6, 7, 8], [9, 10, 11, 12]],
        "logprobs": [[-0.5] * n for n in (1, 2, 3, 4)],
        "version_runs": [[[0, n]] for n in (1, 2, 3, 4)],
        "loss_mask": [[], [1, 0], [], []],
        "segments": [[]] * 4,
    } | fields
    counts: dict[str, Any] = {f"{name}_count": [len(part) for part in parts] for name, parts in arrays.items()}
    frames = [
        memoryview(b"".join(np.asarray(part, kind.dtype).tobytes() for part in arrays[kind.name]))
        for kind in ARRAY_KINDS
    ]
    message = messages.Batch(
        step=3,
        trajectory_ids=[10, 11, 12, 13],
        prompt_key=list(prompts),
        reward=[1.0, 0.0, 0.5, 0.25],
        reward_parts=[{}] * 4,
        policy_version=[0] * 4,
        staleness=[0, 0, 2, 0],
        temperature=[0.7, 0.0, 1.0, 0.0],
        reference_logprobs=[-1.5, None, None, -4.0],
        recency_window=4,
        recency_groups=2,
        recency_missed=1,
        **counts,
    )
    return message, frames


def test_a_batch_is_decoded_with_a_default_mask():
    batch = decode(*make_message(), prompts=2, samples=2)
    assert (batch.step, batch.prompts, batch.samples) == (3, 2, 2)
    assert batch.reward_BK.tolist() == [[1.0, 0.0], [0.5, 0.25]]
    assert batch.staleness_BK.tolist() == [[0, 0], [2, 0]]
    assert batch.reference_BK.isnan().tolist() == [[False, True], [True, False]]
    assert batch.rows[3].response_ids.tolist() == [9, 10, 11, 12]
    assert [row.loss_mask.tolist() for row in batch.rows] == [[1], [1, 0], [1, 1, 1], [1, 1, 1, 1]]
    assert [row.on_policy for row in batch.rows] == [True, False, False, False]
    assert [row.temperature for row in batch.rows] == [0.7, 0.0, 1.0, 0.0]


def test_a_batch_of_episodes_is_decoded_with_segments_and_turn_rewards():
    masks, segments = [[], [], [1, 0, 1], [1, 0, 0, 1]], [[], [], [], [1]]
    message, frames = make_message(loss_mask=masks, segments=segments)
    batch = decode(replace(message, turn_rewards=[[], [], [], [0.5, -1.0]]), frames, prompts=2, samples=2)
    assert batch.turn_rewards == [[], [], [], [0.5, -1.0]]
    assert [row.segments.tolist() for row in batch.rows] == segments
    first, second = batch.rows[3].sequences
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([1, 2], [9])
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([10, 11], [12])
    assert decode(*make_message(), prompts=2, samples=2).turn_rewards == []


def test_a_group_of_several_prompts_is_an_error():
    with pytest.raises(WireError, match="slots 0 to 1 of step 3 are of several prompts"):
        decode(*make_message(prompts=("a", "b", "a", "b")), prompts=2, samples=2)


def test_a_recorded_batch_of_another_shape_is_a_configuration_error():
    with pytest.raises(ConfigError, match="recorded with 4 trajectories, the configuration asks for 2 x 4"):
        decode(*make_message(), prompts=2, samples=4)


def test_an_empty_prompt_is_reported_with_its_trajectory():
    with pytest.raises(WireError, match="trajectory 12 has an empty prompt"):
        decode(*make_message(prompt_ids=[[1], [1], [], [1]]), prompts=2, samples=2)


def test_rows_are_padded_on_the_right():
    rows = decode(*make_message(), prompts=2, samples=2).rows[:2]
    padded = pad(rows, torch.device("cpu"))
    assert padded.tokens_NT.tolist() == [[1, 2, 3, 0], [1, 2, 4, 5]]
    assert padded.source_R.tolist() == [1, 5, 6]
    assert (padded.prompt_lengths, padded.lengths) == ([2, 2], [1, 2])
    assert counted(rows).tolist() == [True, True, False]
