"""Join the turns of an episode into the token fields of one row.

A row has one prompt and one response. The response of an episode is everything after its first context, in order: what
the model sampled, and the tokens that were put between. A turn whose context does not extend the one before, because
the chat template has changed the history, begins a *segment*: its whole context follows in the response, so that the
row still holds every context that the model was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from tba.common.wire.trajectory import Float32, Int32, UInt8

_NO_MASK = np.zeros(0, np.uint8)
_NO_SEGMENTS = _NO_KEPT = _NO_PREFIX = np.zeros(0, np.int32)


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
    prompt_ids: Int32, response_ids: Int32, logprobs: Float32, version_runs: Int32, kept: Int32 = _NO_KEPT,
    prefix: Int32 = _NO_PREFIX,
) -> EpisodeTokens:  # fmt: skip
    """Return the row of a single response, all of whose tokens were sampled; the `prefix` before it was not."""
    mask, given = _NO_MASK, len(prefix)
    if given:
        mask = np.repeat(np.array([0, 1], np.uint8), [given, len(response_ids)])
        response_ids = np.concatenate([prefix, response_ids])
        logprobs = np.concatenate([np.zeros(given, np.float32), logprobs])
        version_runs = version_runs + np.array([[0, given]] + [[0, 0]] * (len(version_runs) - 1), np.int32)
        kept = np.concatenate([np.zeros(given, np.int32), kept]) if len(kept) else kept
    return EpisodeTokens(
        prompt_ids, response_ids, mask, logprobs, version_runs, segments=_NO_SEGMENTS, turns=[], kept=kept
    )


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
