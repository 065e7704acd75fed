"""Decoding the buffer's batches, the plan of a step over ranks and passes, and copies into pinned memory."""

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tba.common.errors import ConfigError, WireError
from tba.common.wire import messages
from tba.common.wire.trajectory import ARRAY_KINDS
from tba.tests.helpers.trainer import make_batch, make_row, random_batch
from tba.trainer.batch.batch import counted, decode, pack_batch, pad, unpack_batch
from tba.trainer.batch.micro_batches import MicroBatch, forward_passes, micro_batches, partition
from tba.trainer.model import host_buffers
from tba.trainer.model.host_buffers import HostBuffers, host_tensor


def make_message(prompts=("a", "a", "b", "b"), **fields) -> tuple[messages.Batch, list[memoryview]]:
    """Return a batch of four trajectories with prompt [1, 2] and responses of 1 to 4 tokens."""
    arrays: dict[str, Any] = {
        "prompt_ids": [[1, 2]] * 4,
        "response_ids": [[3], [4, 5], [6, 7, 8], [9, 10, 11, 12]],
        "logprobs": [[-0.5] * n for n in (1, 2, 3, 4)],
        "version_runs": [[[0, n]] for n in (1, 2, 3, 4)],
        "loss_mask": [[], [1, 0], [], []],
        "segments": [[]] * 4,
        "kept": [[]] * 4,
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
        reuse_mean=0.5,
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


@pytest.mark.parametrize(
    ("fields", "samples", "error", "words"),
    [
        ({"prompts": ("a", "b", "a", "b")}, 2, WireError, "slots 0 to 1 of step 3 are of several prompts"),
        ({}, 4, ConfigError, "recorded with 4 trajectories, the configuration asks for 2 x 4"),
        ({"prompt_ids": [[1], [1], [], [1]]}, 2, WireError, "trajectory 12 has an empty prompt"),
    ],
)
def test_a_batch_that_is_not_what_was_asked_for_is_an_error(fields, samples, error, words):
    with pytest.raises(error, match=words):
        decode(*make_message(**fields), prompts=2, samples=samples)


def test_rows_are_padded_on_the_right():
    rows = decode(*make_message(), prompts=2, samples=2).rows[:2]
    padded = pad(rows, torch.device("cpu"))
    assert padded.tokens_NT.tolist() == [[1, 2, 3, 0], [1, 2, 4, 5]]
    assert padded.source_R.tolist() == [1, 5, 6]
    assert (padded.prompt_lengths, padded.lengths) == ([2, 2], [1, 2])
    assert counted(rows).tolist() == [True, True, False]


@dataclasses.dataclass
class Case:
    """The plans of all ranks for rows of some lengths in groups."""

    # The tokens of the sequences of each row.
    sequences: list[list[int]]
    group_size: int
    limit: int
    overhead: int | None
    plans: list[list[MicroBatch]]

    @property
    def lengths(self) -> list[int]:
        return list(map(sum, self.sequences))

    def micro_batches(self) -> Iterator[MicroBatch]:
        return itertools.chain(*self.plans)

    def size(self, group: int) -> int:
        return sum(self.lengths[group * self.group_size : (group + 1) * self.group_size])


@st.composite
def cases(draw):
    prompts, samples, ranks = draw(st.integers(0, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sequences = st.lists(st.integers(1, 90), min_size=1, max_size=3)
    lengths = draw(st.lists(sequences, min_size=prompts * samples, max_size=prompts * samples))
    limit, overhead = draw(st.integers(1, 400)), draw(st.none() | st.integers(0, 100))
    plans = [
        micro_batches(
            lengths, samples, limit=limit, split=partial(forward_passes, overhead=overhead), rank=rank, ranks=ranks
        )
        for rank in range(ranks)
    ]
    return Case(lengths, samples, limit, overhead, plans)


@given(cases())
def test_a_plan_has_each_group_once_equal_passes_on_all_ranks_and_several_chunks_only_for_a_large_group(case):
    groups = [group for micro_batch in case.micro_batches() for group in micro_batch.groups]
    assert sorted(groups) == list(range(len(case.lengths) // case.group_size))
    for micro_batch in case.micro_batches():
        rows = [range(group * case.group_size, (group + 1) * case.group_size) for group in micro_batch.groups]
        assert micro_batch.rows == list(itertools.chain(*rows))
    counts = [tuple(tuple(len(c.passes) for c in m.chunks) for m in plan) for plan in case.plans]
    assert len(set(counts)) == 1
    assert all(count for plan in counts for chunks in plan for count in chunks)
    for micro_batch in case.micro_batches():
        lengths = [case.lengths[row] for row in micro_batch.rows]
        assert [length for chunk in micro_batch.chunks for length in lengths[chunk.rows]] == lengths
        for chunk in micro_batch.chunks:
            in_chunk = list(itertools.chain(*[case.sequences[row] for row in micro_batch.rows[chunk.rows]]))
            assert sum(in_chunk) <= case.limit or len(lengths[chunk.rows]) == 1
            assert [part for part in chunk.passes if part] == forward_passes(in_chunk, case.overhead)
    for at_once in zip(*case.plans, strict=True):
        largest = max((case.size(group) for micro_batch in at_once for group in micro_batch.groups), default=0)
        assert (len(at_once[0].chunks) > 1) <= (largest > case.limit)


@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 6))
def test_loads_of_ranks_differ_by_at_most_one_item(sizes, ranks):
    loads = [sum(sizes[item] for item in items) for items in partition(sizes, ranks)]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize(("limit", "expected"), [(30, [[0, 2, 1]]), (22, [[0, 2], [1]]), (18, [[0], [2, 1]])])
def test_micro_batches_are_whole_groups_within_the_limit(limit, expected):
    plan = micro_batches(
        [[3], [9], [4], [4], [8], [2]], 2, limit=limit, split=partial(forward_passes, overhead=None), rank=0, ranks=1
    )
    assert [micro_batch.groups for micro_batch in plan] == expected


def test_passes_have_similar_lengths_and_are_as_few_as_their_overhead_asks_for():
    assert forward_passes([10, 100, 11, 99], 20) == [[3, 1], [0, 2]]
    assert forward_passes([10, 100, 11, 99], 1000) == [[0, 2, 3, 1]]
    assert forward_passes([7, 7, 7], 0) == [[0, 1, 2]]
    assert forward_passes([10, 100, 11, 99], None) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("overhead", [0, 5, 64])
def test_no_other_split_into_passes_costs_less(overhead):
    rng = np.random.default_rng(overhead)
    lengths = rng.integers(1, 60, size=8).tolist()

    def cost(passes):
        return sum(len(part) * max(lengths[n] for n in part) + overhead for part in passes)

    order = sorted(range(8), key=lengths.__getitem__)
    cuts = [[c for c in range(1, 8) if bits >> c & 1] for bits in range(256)]
    every = [[order[a:b] for a, b in itertools.pairwise([0, *cut_at, 8])] for cut_at in cuts]
    found = forward_passes(lengths, overhead)
    assert sorted(n for part in found for n in part) == list(range(8))
    assert cost(found) == min(map(cost, every))


def test_a_batch_is_equal_on_the_other_ranks():
    rows = [*random_batch(1).rows, make_row(2**40, [1, 2], [], on_policy=True)]
    rows[3] = dataclasses.replace(rows[3], loss_mask=np.zeros_like(rows[3].loss_mask))
    sent = make_batch(rows, np.random.default_rng(0).random((len(rows), 1)), step=7)
    rows[4] = dataclasses.replace(rows[4], segments=np.array([1], np.int32))
    sent = dataclasses.replace(make_batch(rows, sent.reward_BK, step=7), turn_rewards=[[0.5]] * len(rows))
    sent.reference_BK[2] = -1.5
    received = unpack_batch(pack_batch(sent))
    assert (received.step, received.turn_rewards) == (7, sent.turn_rewards)
    for name in ("reward_BK", "reference_BK", "staleness_BK"):
        assert torch.equal(getattr(received, name).nan_to_num(9.0), getattr(sent, name).nan_to_num(9.0))
    for mine, theirs in zip(received.rows, sent.rows, strict=True):
        for field in dataclasses.fields(theirs):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert type(a) is type(b)
            assert np.array_equal(a, b)
            assert np.asarray(a).dtype == np.asarray(b).dtype


MAPS = Path("/proc/self/maps")
# Elements of a tensor that is far from a power of two.
ODD = 9_000_001


class Cudart:
    """Registers memory as CUDA's runtime does: each page once, and only what is mapped."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.mapped: list[bool] = []
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        assert address % 4096 == 0
        if not self.status:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped.append(any(address in _addresses(line) for line in MAPS.read_text().splitlines()))
        del self.registered[address]
        return 0


def _addresses(line: str) -> range:
    first, end = line.partition(" ")[0].split("-")
    return range(int(first, 16), int(end, 16))


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_buffers, "_clear_last_error", lambda: None)
    host_buffers._warn.cache_clear()
    return found


class Stream:
    """A stream of a GPU that is not there: no tensor is on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        pass


def test_tensors_on_the_host_are_copied_to_memory_that_is_not_pinned(cudart, monkeypatch):
    """With `train.offload` masters and moments are there, although the trainer has a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    copies = HostBuffers(torch.device("cuda"))
    masters = {"a": torch.randn(3, 5), "step": torch.tensor(2.0)}
    copy = copies.copy(masters.items())
    assert all(torch.equal(copy.wait()[name], tensor) for name, tensor in masters.items())
    copies.release(copy)
    assert copies.copy(masters.items()).tensors["a"] is copy.tensors["a"]
    assert not cudart.registered


@pytest.mark.slow
def test_pinned_tensors_take_their_bytes_and_not_the_next_power_of_two(cudart):
    shapes = {(ODD,): torch.float32, (1000, 4097): torch.bfloat16, (): torch.float32}
    tensors = [host_tensor(shape, dtype, pinned=True) for shape, dtype in shapes.items()]
    assert sorted(cudart.registered.values()) == [4, 2 * 1000 * 4097, 4 * ODD]
    for tensor in tensors:
        values = torch.arange(tensor.numel()).to(tensor.dtype).view(tensor.shape)
        assert torch.equal(tensor.copy_(values), values)


@pytest.mark.slow
def test_pinned_memory_is_given_back_with_its_last_view_and_before_it_is_unmapped(cudart):
    whole = host_tensor((ODD,), torch.float32, pinned=True)
    view = whole[5:9]
    del whole
    gc.collect()
    assert len(cudart.registered) == 1
    del view
    gc.collect()
    assert not cudart.registered
    assert cudart.mapped == [True]


def test_memory_that_cuda_does_not_pin_is_used_all_the_same_with_one_warning(cudart, caplog):
    cudart.status = 801
    tensors = [host_tensor((10,), torch.float32, pinned=True).fill_(value) for value in (1.0, 2.0)]
    assert [float(tensor.sum()) for tensor in tensors] == [10.0, 20.0]
    assert len([one for one in caplog.records if "cannot be pinned" in one.message]) == 1
