"""Requests of the trainer: batches, finished steps, snapshots, the end of the run."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from tba.buffer.sampling.sampler import Shortage
from tba.buffer.service.run_state import ReplyBody, RunState, refuse_beyond
from tba.common.errors import Refused, StorageError, quantity
from tba.common.log import get_logger
from tba.common.wire import messages
from tba.common.wire.codec import MAX_FRAME_BYTES, MAX_REPLY_HEADER_BYTES
from tba.common.wire.trajectory import ARRAY_KINDS, KEPT, LOG_RATIO_DTYPE, RowNumbers

log = get_logger(__name__)

# Without the envelope and the run state.
_MAX_BATCH_HEADER = MAX_REPLY_HEADER_BYTES - (64 << 10)
# Trajectories that are named in the refusal of a batch.
_NAMED = 3
# How many versions a snapshot may be ahead of the newest: as the first of a trainer, for each step, and in addition.
_LEFT_VERSIONS = 1 << 20
_VERSIONS_PER_STEP = 2
_SPARE_VERSIONS = 16
T = TypeVar("T")
_parts = msgspec.json.Decoder(dict[str, float])
_turn_rewards = msgspec.json.Decoder(list[float])


def _decoded(decoder: msgspec.json.Decoder[T], text: str, what: str) -> T:
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise StorageError(f"{what} that the database holds are malformed ({error}): {text!r:.80}") from error


def _flags(column: Sequence[int]) -> list[bool] | msgspec.UnsetType:
    return list(map(bool, column)) if any(column) else msgspec.UNSET


# Records the batch of a step that has none yet, or returns what is missing.
RecordBatch = Callable[[messages.SampleBatch], Shortage | None]


def draw_batch(state: RunState, message: messages.SampleBatch) -> Shortage | None:
    """Draw the batch of a step from the index of the run and record it, or return what is missing."""
    # Not the maximum: a trainer may resume before the last recorded step, or this file may be an older copy.
    state.next_step = message.step
    size = message.prompts * message.samples
    inserted = state.trajectories - state.leases.stored
    if reason := state.rate.shortage(inserted, state.sampled, size):
        return Shortage(reason, inserted)
    # The data of a recorded run does not age.
    stale_from = state.as_of.step if state.as_of else message.step
    draw = state.sampler.sample(
        step=stale_from,
        groups=message.prompts,
        samples=message.samples,
        rng=np.random.default_rng([state.run.seed, message.step]),
    )
    state.too_little_data = isinstance(draw, Shortage)
    if isinstance(draw, Shortage):
        return draw
    entries = list(chain.from_iterable(draw.groups))
    ids = [entry.id for entry in entries]
    sizes = state.store.trajectories.sizes(ids)
    _refuse_oversize(ids, *zip(*[sizes[id_] for id_ in ids], strict=True))
    state.store.batches.record(
        state.run,
        message.step,
        prompts=message.prompts,
        trajectories=ids,
        staleness=[stale_from - entry.step for entry in entries],
        recency=(draw.recency_window, draw.recency_groups, draw.recency_missed),
        now=state.clock.wall(),
    )
    state.index.mark_trained(ids)
    state.next_step = message.step + 1
    state.sampled += len(entries)
    state.lag.note(draw, stale_from)
    return None


def _refuse_oversize(
    trajectories: Sequence[int], header_bytes: Sequence[int], prompt_bytes: Sequence[int], response_bytes: Sequence[int]
) -> None:
    """Raise Refused for a batch that fits no message: once recorded, it could never be handed out.

    If its header is too large, the trajectories that take the most of it are named. Kept tokens do not count.
    """
    if (frame_bytes := max(sum(prompt_bytes), sum(response_bytes))) > MAX_FRAME_BYTES:
        raise Refused(
            "oversize",
            f"a batch with {frame_bytes} bytes of tokens, at most {MAX_FRAME_BYTES} fit a message: "
            "lower train.prompts_per_step or search.max_tokens",
        )
    size = sum(header_bytes)
    if size > _MAX_BATCH_HEADER:
        by_size = sorted(set(zip(header_bytes, trajectories, strict=True)), reverse=True)
        largest = ", ".join(f"{id_} with {size}" for size, id_ in by_size[:_NAMED])
        raise Refused(
            "oversize",
            f"the header of the batch would have {size} bytes, at most {_MAX_BATCH_HEADER} fit a message; the largest "
            f"rows are trajectories {largest}: lower train.prompts_per_step, or use fewer and shorter reward parts",
        )


def _refuse_other_rows(step: int, rows: RowNumbers, tokens: Sequence[int]) -> None:
    """Raise Refused unless each slot has a row, whose log-ratios, if any, fit its number of response `tokens`."""
    if len(rows.skipped) != len(tokens):
        raise Refused(
            "row_numbers",
            f"the report of step {step} has numbers of {quantity(len(rows.skipped), 'row')}, and its batch "
            f"{quantity(len(tokens), 'slot')}: report one row for each slot",
        )
    for slot, (blob, count) in enumerate(zip(rows.token_log_ratios or [], tokens, strict=False)):
        if blob is not None and len(blob) != count * LOG_RATIO_DTYPE.itemsize:
            raise Refused(
                "row_numbers",
                f"the report of step {step} has log-ratios of {quantity(len(blob), 'byte')} for the "
                f"{quantity(count, 'response token')} of slot {slot}: report {LOG_RATIO_DTYPE.itemsize} bytes for each",
            )


def sample_batch(state: RunState, record: RecordBatch, message: messages.SampleBatch, _: str) -> ReplyBody | None:
    """Return the batch of a step, recorded first in the same transaction; None parks the request.

    Raises Refused if payloads of the batch were compacted.
    """
    _refuse_skipped_step(state, message.step)
    is_new = not state.store.batches.has(state.run, message.step)
    if is_new and (shortage := record(message)):
        # A trainer that requests the batch of a later step is still training.
        reason = shortage.reason if message.step <= state.steps_done else ""
        state.pace.wait_for(reason, (shortage.have, len(state.index)), state.index.left)
        return None
    state.pace.wait_for("")
    state.may_skip_steps, state.next_step = False, max(state.next_step, message.step + 1)
    rows = state.store.batches.rows(state.run, message.step, message.reference)
    blobs = list(zip(*state.store.trajectories.payloads(rows["id"]), strict=True))
    turn_rewards = [_decoded(_turn_rewards, text, "turns") for text in rows["turn_rewards"]]
    if sum(map(len, blobs[KEPT])) > MAX_FRAME_BYTES:
        # They fit no message: the ratios of this batch are not known, in a repetition neither.
        blobs[KEPT] = (b"",) * len(blobs[KEPT])
    has_kept = [len(blob) > 0 for blob in blobs[KEPT]]
    # Without kept tokens, the ratios of a response that was cut are not known.
    known = [kept or not cut for kept, cut in zip(has_kept, rows["is_cut"], strict=True)]
    if not any(has_kept):
        blobs = blobs[:KEPT]
    counts: dict[str, Any] = {
        f"{kind.name}_count": [len(blob) // kind.unit_bytes for blob in column]
        for kind, column in zip(ARRAY_KINDS, blobs, strict=False)
    }
    batch = messages.Batch(
        step=message.step,
        trajectory_ids=rows["id"],
        prompt_key=rows["prompt_key"],
        reward=rows["reward"],
        reward_parts=[_decoded(_parts, text, "reward parts") for text in rows["reward_parts"]],
        policy_version=rows["policy_version"],
        staleness=rows["staleness"],
        temperature=[one if is_known else 0.0 for one, is_known in zip(rows["temperature"], known, strict=True)],
        reference_logprobs=rows["reference_logprob"],
        **{name: rows[name][0] for name in ("recency_window", "recency_groups", "recency_missed")},
        reuse_mean=sum(rows["times_used"]) / len(rows["id"]),
        turn_rewards=turn_rewards if any(turn_rewards) else None,
        explored=_flags(rows["explored"]),
        guided=_flags(rows["guided"]),
        **counts,
    )
    return ReplyBody(batch, [b"".join(column) for column in blobs])


def report_step(state: RunState, message: messages.ReportStep, _: str) -> ReplyBody:
    """Record that the optimiser step is done, with the numbers of its rows and its reference log-probabilities."""
    tokens = state.store.batches.response_tokens(state.run, message.step)
    if not tokens:
        raise Refused("unknown_step", f"no batch was handed out for step {message.step}")
    if unknown := state.store.trajectories.unknown(message.trajectory_ids):
        raise Refused(
            "unknown_trajectory",
            f"the report of step {message.step} has log-probabilities of trajectory {unknown[0]}, which does not "
            "exist: report those of the batch",
        )
    if message.rows is not None:
        _refuse_other_rows(message.step, message.rows, tokens)
    state.store.batches.report(state.run, message, state.clock.wall())
    state.steps_done = max(state.steps_done, message.step + 1)
    state.pace.note_step(message.step, message.metrics)
    return ReplyBody(messages.Done())


def announce_snapshot(state: RunState, message: messages.AnnounceSnapshot, _: str) -> ReplyBody:
    """Record a snapshot. Every reply carries the newest one."""
    weights = message.weights
    _refuse_skipped_versions(state, weights)
    known = state.versions.get(weights.version)
    if known is not None and known != weights:
        raise Refused("version_taken", f"snapshot v{known.version} was announced before, with other content")
    state.store.snapshots.add(state.run, message, state.clock.wall())
    state.may_skip_versions = False
    state.versions[weights.version] = weights
    state.newest = state.versions[max(state.versions)]
    return ReplyBody(messages.Done())


def _refuse_skipped_step(state: RunState, step: int) -> None:
    """Raise Refused for a step after the next one. A trainer may begin with any: its checkpoint may be newer than a
    database that was restored from a copy."""
    refuse_beyond("step", step)
    if step > state.next_step and not state.may_skip_steps:
        raise Refused("out_of_range", f"a batch of step {step} is refused: the next step is {state.next_step}")


def _refuse_skipped_versions(state: RunState, weights: messages.WeightsRef) -> None:
    """Raise Refused for a version far beyond the newest: no later one could be announced.

    A publication takes up to two versions at most once per step. The first of a trainer may skip more: directories
    of versions may be left of an earlier one.
    """
    newest = state.newest
    refuse_beyond("snapshot", weights.version, weights.step)
    version, step = (newest.version, newest.step) if newest else (-1, 0)
    steps = max(0, state.next_step - step)
    most = version + (_LEFT_VERSIONS if state.may_skip_versions else _VERSIONS_PER_STEP * steps + _SPARE_VERSIONS)
    if weights.version > most:
        raise Refused(
            "out_of_range",
            f"snapshot v{weights.version} is refused: after v{version} and {steps} recorded steps v{most} is the "
            "newest that is possible",
        )


def finish_run(state: RunState, message: messages.FinishRun, _: str) -> ReplyBody:
    """Record that the last step is done."""
    state.store.runs.finish(state.run, message.step)
    if not state.finished:
        log.info("run finished", run=state.run.name, step=message.step)
    state.finished = True
    return ReplyBody(messages.Done())
