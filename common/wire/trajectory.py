"""Trajectories on the wire: one column per field, and one array frame per kind of token data.

Shape suffixes: N trajectories, P prompt tokens of all of them, R response tokens, V version runs.

A *version run* is a pair (policy version, number of tokens). A response has one for each policy version that produced
some of its tokens: more than one if it spans a hot reload. Their lengths add up to the length of the response.

The *kept tokens* of a position are those that top-p, top-k and min-p left to sample from, the sampled one among them. A
response has them as one array: for each of its tokens the ids of the others, each plus 1 and in ascending order, and
then a 0. The array is empty if all of the vocabulary was left, or if they are not known.

The response of an *episode* is everything after its first context: the tokens of its turns, and between them those that
were not sampled, with mask 0. Where a chat template rewrites what came before, a *segment* begins: it starts
with the whole new context, and is a sequence of its own (`sequences`). So the row holds every context that the model
was given.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from tba.common.errors import WireError, quantity
from tba.common.wire.fields import (
    ERROR_STOPS,
    MAX_TURN_MESSAGES,
    MAX_TURN_TEXT,
    Column,
    Count,
    Finite,
    RewardParts,
    Seconds,
)

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

STOP_EOS = "eos"
STOP_LENGTH = "length"
STOP_ERROR = "error"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One prompt and one response to it.

    `lease` is the id of the prompt visit that it answers. `logprobs` are natural-log probabilities of the response
    tokens under the distribution they were sampled from, temperature and top-p included. `version_runs` is [V, 2].
    `created_at` is Unix time. An empty `loss_mask` counts every response token. `turns` are those of an episode, each a
    dict as `TurnRecord`. `error_kind` is an `ErrorKind` exactly where there is an `error`. `segments` are the positions
    in the response at which a new context begins, usually none. `kept` are the kept tokens, as above.
    """

    prompt_key: str
    lease: int
    prompt_ids: Int32
    response_ids: Int32
    logprobs: Float32
    version_runs: Int32
    reward: float
    reward_parts: dict[str, float]
    stop_reason: str
    sampling: dict[str, Any]
    created_at: float
    generation_seconds: float
    text: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    loss_mask: UInt8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    turns: list[dict[str, Any]] = field(default_factory=list)
    error_kind: str | None = None
    segments: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    kept: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))


class TurnRecord(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of an episode: `tokens` sampled ones from the position `start` of the response on.

    `seconds` is how long they took, `environment_seconds` how long the environment took to answer. `reward` and `parts`
    are what it gave for the turn, `messages` its answer as [role, content] pairs, possibly shortened.
    """

    start: Count
    tokens: Annotated[int, Meta(ge=1)]
    seconds: Seconds
    reward: Finite
    parts: RewardParts
    messages: Annotated[
        list[tuple[Annotated[str, Meta(max_length=200)], Annotated[str, Meta(max_length=MAX_TURN_TEXT)]]],
        Meta(max_length=MAX_TURN_MESSAGES),
    ]
    environment_seconds: Seconds | None = None


# The fields with one value per trajectory that are stored under their own names, and their types. Columns on the wire
# and in the database, exports and imports derive from this list. A dict or list is JSON text in the database.
ROW_FIELDS: dict[str, type] = {
    "reward": float,
    "reward_parts": dict,
    "stop_reason": str,
    "sampling": dict,
    "created_at": float,
    "generation_seconds": float,
    "text": str,
    "error": str,
    "metadata": dict,
    "turns": list,
    "error_kind": str,
}
MAP_FIELDS = tuple(name for name, kind in ROW_FIELDS.items() if kind in (dict, list))
# Left out of a message in which no row has a value.
_SPARSE = ("turns", "error_kind")
# Prompt and visit travel by key and number; the database has references to their rows instead.
ROW_COLUMNS = ("prompt_key", "lease", *ROW_FIELDS)


@dataclass(frozen=True)
class ArrayKind:
    """The encoding of one kind of token data: `width` numbers of `dtype` per token, version run, or entry."""

    name: str
    dtype: str
    width: int

    @cached_property
    def unit_bytes(self) -> int:
        """The size of one token or version run in bytes."""
        return np.dtype(self.dtype).itemsize * self.width


ARRAY_KINDS = (
    ArrayKind("prompt_ids", "<i4", 1),
    ArrayKind("response_ids", "<i4", 1),
    ArrayKind("logprobs", "<f4", 1),
    ArrayKind("version_runs", "<i4", 2),
    ArrayKind("loss_mask", "|u1", 1),
    ArrayKind("segments", "<i4", 1),
    # The last one: its count and its frame are left out of a message in which no row has any.
    ArrayKind("kept", "<i4", 1),
)

# One object for all empty arrays: see `DatabaseFile.insert`.
_NOTHING = memoryview(b"")

# Positions in ARRAY_KINDS, which are also those of the frames.
PROMPT_IDS, RESPONSE_IDS, LOGPROBS, VERSION_RUNS, LOSS_MASK, SEGMENTS, KEPT = range(len(ARRAY_KINDS))


def encode_kept(token_ids: Sequence[int], kept: Sequence[Int32]) -> Int32:
    """Return the kept tokens of a response as one array: `kept[i]` are those of token i, ascending, itself included."""
    ends = np.zeros(1, np.int32)
    parts = [part for token, ids in zip(token_ids, kept, strict=True) for part in (ids[ids != token] + 1, ends)]
    return np.concatenate(parts, dtype=np.int32) if parts else ends[:0]


def kept_between(kept: Int32, first: int, end: int) -> Int32:
    """Return the kept tokens of the positions from `first` to `end`, without the latter."""
    starts = np.concatenate([[0], np.flatnonzero(kept == 0) + 1])
    return kept[starts[first] : starts[end]] if len(kept) else kept


def _check_kept(counts: Sequence[Sequence[int]], frame: memoryview) -> None:
    """Raise WireError unless the rows with kept tokens have ascending ones of each of their positions."""
    kept = np.frombuffer(frame, "<i4")
    ended = np.concatenate([[0], np.cumsum(kept == 0)])
    lengths, tokens = np.array(counts[KEPT]), np.array(counts[RESPONSE_IDS])
    stops = np.cumsum(lengths)
    some = lengths > 0
    positions = ended[stops] - ended[stops - lengths]
    last = kept[stops[some] - 1]
    ascending = (kept[1:] > kept[:-1]) | (kept[1:] == 0)
    if (positions != tokens)[some].any() or last.any() or not ascending.all() or kept.min(initial=0) < 0:
        raise WireError("the kept tokens of a row are not ascending ids plus 1 with a 0 after those of each token")


def pack(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Any], list[bytes]]:
    """Return the columns for a message header, and one frame per array kind for the whole batch."""
    columns: dict[str, Any] = {}
    for name in ROW_COLUMNS:
        column = [getattr(t, name) for t in trajectories]
        if name not in _SPARSE or any(value is not None and value != [] for value in column):
            columns[name] = column
    frames = []
    for kind in ARRAY_KINDS:
        arrays = [getattr(t, kind.name) for t in trajectories]
        counts = list(map(len, arrays))
        if kind is ARRAY_KINDS[KEPT] and not any(counts):
            break
        columns[f"{kind.name}_count"] = counts
        # The usual case of masks and segments.
        if not any(counts):
            frames.append(b"")
            continue
        frames.append(b"".join(np.ascontiguousarray(array, dtype=kind.dtype).tobytes() for array in arrays))
    return columns, frames


def array_counts(columns: Mapping[str, Any]) -> list[list[int]]:
    """Return the counts of each array kind, also of one that was left out."""
    return [columns.get(f"{kind.name}_count") or [0] * len(columns["prompt_ids_count"]) for kind in ARRAY_KINDS]


def all_frames(frames: Sequence[memoryview]) -> list[memoryview]:
    """Return one frame for each array kind, also for one that was left out."""
    return [*frames, memoryview(b"")] if len(frames) == KEPT else [*frames]


def slices(sizes: Sequence[int], frame: memoryview) -> list[memoryview]:
    """Cut a frame into one view of `sizes[i]` bytes per trajectory, without copying or decoding."""
    if not frame.nbytes:
        return [_NOTHING] * len(sizes)
    stops = list(accumulate(sizes))
    return list(map(frame.__getitem__, map(slice, [0, *stops], stops)))


def check_frames(columns: dict[str, Any], frames: Sequence[memoryview]) -> None:
    """Raise WireError unless the frames match the columns of counts, masks and version runs the responses."""
    if len(frames) != len(ARRAY_KINDS):
        raise WireError(f"{quantity(len(frames), 'array frame')} where {len(ARRAY_KINDS)} are needed")
    counts = array_counts(columns)
    for kind, count, frame in zip(ARRAY_KINDS, counts, frames, strict=True):
        expected = sum(count) * kind.unit_bytes
        if frame.nbytes != expected:
            raise WireError(f"frame {kind.name} has {frame.nbytes} bytes, its counts add up to {expected}")
    if columns["logprobs_count"] != columns["response_ids_count"]:
        raise WireError("logprobs and response_ids differ in length: one log-probability belongs to each token")
    _check_version_runs(columns, frames)
    if frames[KEPT].nbytes:
        _check_kept(counts, frames[KEPT])
    if any(columns["loss_mask_count"]):
        for masked, tokens in zip(columns["loss_mask_count"], columns["response_ids_count"], strict=True):
            if masked not in (0, tokens):
                raise WireError(
                    f"a loss mask has {quantity(masked, 'entry', 'entries')} for {quantity(tokens, 'response token')}"
                )
    if any(columns["segments_count"]):
        arrays = unpack_arrays(columns, frames)
        for row, (segments, mask) in enumerate(zip(arrays["segments"], arrays["loss_mask"], strict=True)):
            _check_segments(row, segments.tolist(), mask)


def _check_segments(row: int, segments: list[int], mask: UInt8) -> None:
    """Raise WireError unless each segment starts with a context, after which at least one token was sampled."""
    for start, end in pairwise([*segments, len(mask)]):
        # The first segment would leave nothing of the response to the first context if it started at 0.
        if not (0 < start < end <= len(mask)) or mask[start] or not mask[start:end].any():
            raise WireError(
                f"the segments {segments[:10]} of row {row} are not ascending positions in the response, each of a "
                "token that was not sampled, with a sampled one before the next segment"
            )


def check_errors(errors: Sequence[str | None], kinds: Sequence[str | None] | None, reasons: Sequence[str]) -> None:
    """Raise WireError unless exactly the rows with an error have a kind, and no other row stopped by one."""
    # The usual case: no row has an error.
    if kinds is None and errors.count(None) == len(errors) and ERROR_STOPS.isdisjoint(reasons):
        return
    for row, (error, kind, reason) in enumerate(zip(errors, kinds or [None] * len(errors), reasons, strict=True)):
        if (error is None) != (kind is None) or (error is None and reason in ERROR_STOPS):
            raise WireError(
                f"row {row} has error {error!r:.80}, error_kind {kind!r} and stop_reason {reason!r}: an error has a "
                f"kind, and only a row with an error ends by {', '.join(sorted(ERROR_STOPS))}"
            )


def check_turns(turns: Sequence[Sequence[TurnRecord]], lengths: Sequence[int]) -> None:
    """Raise WireError unless the turns of each row follow each other inside its response of `lengths` tokens."""
    for row, (own, length) in enumerate(zip(turns, lengths, strict=True)):
        end = 0
        for number, turn in enumerate(own):
            if turn.start < end or turn.start + turn.tokens > length:
                raise WireError(
                    f"turn {number} of row {row} is not after the one before it and inside the response: "
                    f"{quantity(turn.tokens, 'token')} from {turn.start} on of {length}"
                )
            end = turn.start + turn.tokens


class TokenSequence(NamedTuple):
    """What a model sees at once: a context, and the tokens after it. `mask` is 1 where one was sampled."""

    context_ids: Int32
    response_ids: Int32
    mask: UInt8
    logprobs: Float32


def sequences(row: Trajectory) -> list[TokenSequence]:
    """Return the sequences of a row: one, and one more for each of its segments, whose context is inside the response.

    for context_ids, response_ids, mask, logprobs in sequences(row): ...
    """
    mask = row.loss_mask if len(row.loss_mask) else np.ones(len(row.response_ids), np.uint8)
    return [
        TokenSequence(
            row.response_ids[start:first] if first else row.prompt_ids,
            row.response_ids[first:end],
            mask[first:end],
            row.logprobs[first:end],
        )
        for start, first, end in sequence_spans(mask, row.segments)
    ]


def sequence_spans(mask: UInt8, segments: Int32) -> list[tuple[int, int, int]]:
    """Return (start of the context, first token after it, end) of each sequence; (0, 0, end) of the first."""
    first, *others = pairwise([0, *segments.tolist(), len(mask)])
    return [(0, *first), *((start, start + int((mask[start:end] != 0).argmax()), end) for start, end in others)]


def _check_version_runs(columns: dict[str, Any], frames: Sequence[memoryview]) -> None:
    """Raise WireError unless the runs of each row have positive lengths that add up to its response length."""
    if not columns["version_runs_count"]:
        return
    runs = np.frombuffer(frames[VERSION_RUNS], "<i4").reshape(-1, 2)
    # The usual case: no response spans a hot reload, so each row has one run.
    if len(runs) == len(columns["version_runs_count"]):
        covered = runs[:, 1].tolist()
    else:
        starts = np.cumsum([0, *columns["version_runs_count"][:-1]])
        covered = np.add.reduceat(runs[:, 1], starts, dtype=np.int64).tolist()
        # Only an empty response may have an empty run: otherwise a row could have more runs than tokens.
        in_row = np.repeat(np.array(covered) > 0, columns["version_runs_count"])
        if (runs[in_row, 1] == 0).any():
            raise WireError("version runs hold a negative number or an empty run")
    if covered != columns["response_ids_count"]:
        pairs = enumerate(zip(covered, columns["response_ids_count"], strict=True))
        row, tokens = next((row, tokens) for row, (length, tokens) in pairs if length != tokens)
        raise WireError(f"the version runs of row {row} do not cover its {quantity(tokens, 'response token')}")
    if np.minimum.reduce(runs, axis=None) < 0:
        raise WireError("version runs hold a negative number or an empty run")


def check_tokens(columns: dict[str, Any], frames: Sequence[memoryview], errors: Sequence[str | None]) -> None:
    """Raise WireError for values that no model produces. Only rows with an error may be empty."""
    for name, position in (("prompt_ids", PROMPT_IDS), ("response_ids", RESPONSE_IDS)):
        if np.minimum.reduce(np.frombuffer(frames[position], "<i4"), initial=0) < 0:
            raise WireError(f"negative token id in {name}")
        counts = columns[f"{name}_count"]
        if 0 in counts and any(not count and error is None for count, error in zip(counts, errors, strict=True)):
            raise WireError(f"a trajectory without an error has empty {name}")
    logprobs = np.frombuffer(frames[LOGPROBS], "<f4")
    # A finite sum proves that all terms are finite, in a quarter of the time of isfinite. An infinite sum may also be
    # an overflow, so only then each term is checked.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduce(logprobs)
    if not math.isfinite(total) and not np.isfinite(logprobs).all():
        raise WireError("a log-probability is not finite")


def unpack_arrays(columns: dict[str, Any], frames: Sequence[memoryview]) -> dict[str, list[npt.NDArray[Any]]]:
    """Return the arrays of a checked batch by kind, one per trajectory, of shape [count] or [count, width]."""
    arrays = {}
    for kind, counts, frame in zip(ARRAY_KINDS, array_counts(columns), all_frames(frames), strict=True):
        shape = (-1,) if kind.width == 1 else (-1, kind.width)
        views = slices([count * kind.unit_bytes for count in counts], frame)
        arrays[kind.name] = [np.frombuffer(view, kind.dtype).reshape(shape) for view in views]
    return arrays


QUANTITIES = ("logprob", "log_ratio", "advantage", "weight", "mismatch")
# Of the log-ratio of a token: an error of 0.05 % from 6e-5 to 65,504 nats, of 3e-8 nats below.
LOG_RATIO_DTYPE = np.dtype("<f2")
# Of the log-ratios of the tokens of all rows, so that a report always fits a message with everything else in it.
MAX_LOG_RATIO_BYTES = 10 << 20
TokenLogRatios = Annotated[bytes, Meta(max_length=MAX_LOG_RATIO_BYTES)]


class RowNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """What a step computed for each row of its batch, in the order of the slots; None where a number is not known.

    All are of the policy before the update. `logprob` is log pi of the response at temperature 1, `log_ratio` its
    log pi - log mu at the temperature of sampling, None if the sampler is unknown; both are sums over the counted
    tokens, in nats. `advantage` and `weight` are those of the objective: the gradient of the loss is a sum of
    -weight * advantage * grad log pi. `mismatch` is the mean of |log pi - log mu| over the counted tokens, in nats, for
    a response of the weights that are trained. A row is `skipped` if it had no part in the update: the step made none,
    or the weight is 0.

    `token_log_ratios` are the terms of `log_ratio`: for each row one LOG_RATIO_DTYPE per response token, 0 where a
    token does not count; None if they are unknown or did not fit MAX_LOG_RATIO_BYTES.
    """

    logprob: Column[Finite | None]
    log_ratio: Column[Finite | None]
    advantage: Column[Finite | None]
    weight: Column[Finite | None]
    mismatch: Column[Finite | None]
    skipped: Column[bool]
    token_log_ratios: Column[TokenLogRatios | None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the columns differ in length, or log-ratios of tokens are too many or not finite."""
        rows, each = len(self.skipped), self.token_log_ratios
        if any(len(getattr(self, name)) != rows for name in QUANTITIES) or (each is not None and len(each) != rows):
            raise ValueError("the columns of numbers of rows differ in length")
        blobs = [blob for blob in each or [] if blob]
        if (size := sum(map(len, blobs))) > MAX_LOG_RATIO_BYTES:
            raise ValueError(f"log-ratios of tokens of {size} bytes, at most {MAX_LOG_RATIO_BYTES} fit a report")
        if any(len(blob) % LOG_RATIO_DTYPE.itemsize for blob in blobs):
            raise ValueError("log-ratios of tokens end within a number")
        if not np.isfinite(np.frombuffer(b"".join(blobs), LOG_RATIO_DTYPE)).all():
            raise ValueError("a log-ratio of a token is not finite")


_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One call of the model: the context that it was given, [P] tokens, and the completion that it sampled, [C] tokens.

    `logprobs` [C] are natural-log probabilities of the completion under the distribution it was sampled from.
    `version_runs` [V, 2] are pairs (policy version, tokens) in order; the tokens sum to C. `details` are entries of the
    turn table, such as `seconds`, `reward`, `parts` and `messages`. `kept` is as in `Trajectory`, of the completion.
    """

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    logprobs: Sequence[float]
    version_runs: Sequence[Sequence[int]]
    details: dict[str, Any] = field(default_factory=dict)
    kept: Sequence[int] = ()


class EpisodeTokens(NamedTuple):
    """The fields of a `Trajectory` that hold the tokens of an episode, as in `Trajectory(**tokens._asdict(), ...)`.

    `loss_mask` is 1 on sampled tokens; the others have `logprobs` 0, and the
    version that sampled the next token. `segments` are the positions in `response_ids` at which a new context begins.
    `kept` is empty unless all turns have some.
    Shapes: `prompt_ids` [P], `version_runs` [V, 2], `segments` [S], the others [R].
    """

    prompt_ids: Int32
    response_ids: Int32
    loss_mask: UInt8
    logprobs: Float32
    version_runs: Int32
    segments: Int32
    turns: list[dict[str, Any]]
    kept: Int32


def one_turn(
    prompt_ids: Int32, response_ids: Int32, logprobs: Float32, version_runs: Int32, kept: Int32 = _NONE,
    prefix: Int32 = _NONE,
) -> EpisodeTokens:  # fmt: skip
    """Return the row of a single response, all of whose tokens were sampled; the `prefix` before it was not."""
    mask, given = np.zeros(0, np.uint8), len(prefix)
    if given:
        mask = np.repeat(np.array([0, 1], np.uint8), [given, len(response_ids)])
        response_ids = np.concatenate([prefix, response_ids])
        logprobs = np.concatenate([np.zeros(given, np.float32), logprobs])
        version_runs = version_runs + np.array([[0, given]] + [[0, 0]] * (len(version_runs) - 1), np.int32)
        kept = np.concatenate([np.zeros(given, np.int32), kept]) if len(kept) else kept
    return EpisodeTokens(prompt_ids, response_ids, mask, logprobs, version_runs, segments=_NONE, turns=[], kept=kept)


def join_turns(turns: Sequence[SampledTurn]) -> EpisodeTokens:
    """Return the row of an episode's turns, at least one, in the order in which they were sampled."""
    prompt = list(turns[0].prompt_token_ids)
    context, response, mask, versions = list(prompt), list[int](), list[int](), list[int]()
    logprobs, segments, table = list[float](), list[int](), list[dict[str, Any]]()
    kept, has_kept = list[int](), all(len(turn.kept) for turn in turns)
    for turn in turns:
        own = [version for version, tokens in turn.version_runs for _ in range(tokens)]
        given, sampled = list(turn.prompt_token_ids), list(turn.completion_token_ids)
        if given[: len(context)] != context:
            segments.append(len(response))
            context = []
        between = given[len(context) :]
        context = given + sampled
        response += between + sampled
        mask += [0] * len(between) + [1] * len(sampled)
        logprobs += [0.0] * len(between) + list(turn.logprobs)
        kept += [0] * len(between) + list(turn.kept) if has_kept else []
        versions += own[:1] * len(between) + own
        start = len(response) - len(sampled)
        empty = {"seconds": 0.0, "reward": 0.0, "parts": {}, "messages": []}
        table.append({"start": start, "tokens": len(sampled), **empty, **turn.details})
    return EpisodeTokens(
        np.array(prompt, np.int32), np.array(response, np.int32), np.array(mask, np.uint8),
        np.array(logprobs, np.float32), np.array([(v, len([*run])) for v, run in groupby(versions)], np.int32),
        np.array(segments, np.int32), table, np.array(kept, np.int32),
    )  # fmt: skip
