"""OpenEnv's `TrainingTrace` v1, read and written: one episode of an agent, as the calls of the model that it made.

    line ──► trace ──► checks ──► the calls that are trained on ──► the keys of one row (import_row.Line)
    exported row ──► trace ──► the same checks ──► line

The checks have the names and levels of OpenEnv's validator: a FATAL one refuses the file, a WARN is counted. A trace
has no place for its reward, which OpenEnv's `verify` returns apart from it. Here that result is in the metadata of the
last call, {"verify": {"env_reward": 1.0, "metrics": {}}}. A trace without a reward becomes an error row: what nobody has
scored is not worth 0.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tba.common.errors import UsageError, first_problem, quantity
from tba.common.wire.episode import EpisodeTokens, SampledTurn, join_turns
from tba.common.wire.trajectory import ARRAY_KINDS, STOP_EOS, STOP_LENGTH

FATAL, WARN = "FATAL", "WARN"
_MODEL = re.compile(r"policy@v(\d+)\Z")
_DETAILS = ("seconds", "environment_seconds", "reward", "parts", "messages")
# The keys of an exported trajectory that the calls themselves hold, or other metadata.
_IN_CALLS = {*(kind.name for kind in ARRAY_KINDS), "turns", "prompt_key", "sampling", "reward_parts"}


class _Part(BaseModel):
    """A part of a trace of which only some keys matter here."""

    model_config = ConfigDict(strict=True)


class _Span(_Part):
    version: int
    start: int
    end: int


class _Choice(_Part):
    message: Any = None
    finish_reason: Any = None


class _Response(_Part):
    choices: list[_Choice] = []
    version_spans: list[_Span] | None = None


class _Sampling(_Part):
    temperature: float | None = None
    top_p: float | None = None


class _Verify(_Part):
    env_reward: float | None = None
    metrics: dict[str, Any] = {}


class _Metadata(_Part):
    """The keys of a call's metadata that an import reads; docs/database.md explains them."""

    model: str | None = None
    sampling_params: _Sampling = _Sampling()
    prompt_key: str | None = None
    verify: _Verify = _Verify()
    tba: dict[str, Any] = {}
    seconds: float = 0.0
    environment_seconds: float | None = None
    reward: float = 0.0
    parts: dict[str, float] = {}
    messages: list[list[str]] = []


class Call(BaseModel):
    """One call of the model: its prompt [P], what it sampled [C], and a mask over both [P + C]."""

    model_config = ConfigDict(strict=True, extra="forbid")
    node_id: Annotated[str, Field(min_length=1)]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = {}
    response: _Response = _Response()
    metadata: _Metadata = _Metadata()

    @property
    def mask(self) -> list[int]:
        """The mask of the sampled tokens, [C]."""
        return self.loss_mask[len(self.prompt_token_ids) :]

    @property
    def finish_reason(self) -> Any:
        """The server's word for why it stopped, None if the trace lacks it."""
        return self.response.choices[0].finish_reason if self.response.choices else None

    @property
    def sampling(self) -> dict[str, float]:
        """The settings of sampling; 1 where none is recorded, which is the default of servers."""
        recorded = self.metadata.sampling_params.model_dump()
        return {name: 1.0 if value is None else value for name, value in recorded.items()}

    @property
    def version_runs(self) -> list[list[int]] | None:
        """The policy versions of the sampled tokens, None if no searcher of tba has served them."""
        if spans := self.response.version_spans:
            return [[span.version, span.end - span.start] for span in spans]
        served = _MODEL.match(self.metadata.model or "")
        return [[int(served[1]), len(self.completion_token_ids)]] if served else None


class Trace(BaseModel):
    """The calls of one episode."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    turns: list[Call]


class Finding(NamedTuple):
    """What a check has found in the call with this number from 1 or, with 0, in the whole trace."""

    level: str
    check: str
    turn: int
    what: str


def is_trace(fields: Any) -> bool:
    """Whether a line is a trace, rather than a trajectory or a demonstration."""
    return isinstance(fields, dict) and ("schema_version" in fields or fields.keys() == {"turns"})


def find(trace: Trace) -> list[Finding]:
    """Return the findings about each call, and those about the whole trace if no call has a fatal one."""
    each = [Finding(level, name, n, what) for n, c in enumerate(trace.turns, 1) for level, name, what in _of_call(c)]
    return each if any(one.level == FATAL for one in each) else each + [*_of_trace(trace.turns)]


def _of_call(call: Call) -> Iterator[tuple[str, str, str]]:
    prompt, sampled = len(call.prompt_token_ids), len(call.completion_token_ids)
    logprobs, mask = call.per_token_logps, call.loss_mask
    negative = min(call.prompt_token_ids, default=0) < 0 or min(call.completion_token_ids, default=0) < 0
    counts = f"{len(logprobs)} log-probabilities of {quantity(sampled, 'sampled token')}"
    checks = (
        (FATAL, "invalid_token_id", negative, "a token id is negative"),
        (FATAL, "no_prompt_ids", not prompt, "prompt_token_ids is empty"),
        (WARN, "no_sampled_ids", not sampled, ""),
        (FATAL, "invalid_logprob", not all(map(math.isfinite, logprobs)), "a log-probability is not finite"),
        (FATAL, "positive_logprob", max(logprobs, default=0) > 0, "a log-probability is above 0"),
        (WARN, "truncated_turn", call.finish_reason == "length", ""),
        (FATAL, "logprob_misalign", len(logprobs) != sampled, counts),
        (FATAL, "length_mismatch", len(mask) != prompt + sampled, f"{len(mask)} in loss_mask, {prompt} + {sampled} ids"),
        (FATAL, "invalid_loss_mask", not {*mask} <= {0, 1}, "loss_mask has other values than 0 and 1"),
        (FATAL, "trainable_prompt", any(mask[:prompt]), "loss_mask counts tokens of the prompt"),
    )
    return ((level, name, what) for level, name, found, what in checks if found)


def _of_trace(calls: Sequence[Call]) -> Iterator[Finding]:
    ids = {call.node_id for call in calls}
    settings = {tuple(call.sampling.values()) for call in calls if any(call.mask)}
    parents = _parents(calls)
    roots = parents.count(None)
    checks = (
        (FATAL, "no_turns", not calls, "there is none"),
        (FATAL, "duplicate_node_ids", len(ids) < len(calls), "two turns have the same node_id"),
        (FATAL, "nothing_trainable", not settings, "no loss_mask counts a token"),
        (FATAL, "sampling_policy_changed", len(settings) > 1, f"temperature and top_p are {sorted(settings)}"),
        (WARN, "degenerate_rollout", len(calls) == 1, ""),
        (WARN, "per_turn_capture_only", 1 < len(calls) == roots, ""),
        (WARN, "multiple_roots", 1 < roots < len(calls), ""),
        (WARN, "discarded_turns", _discarded(calls, parents), ""),
    )
    return (Finding(level, name, 0, what) for level, name, found, what in checks if found)


def _parents(calls: Sequence[Call]) -> list[int | None]:
    """Return for each call the one whose prompt and completion are the longest beginning of its prompt."""
    prompts = [np.array(call.prompt_token_ids, np.int64).tobytes() for call in calls]
    ends = [p + np.array(c.completion_token_ids, np.int64).tobytes() for p, c in zip(prompts, calls, strict=True)]
    longest_first = sorted(range(len(calls)), key=lambda one: -len(ends[one]))
    return [
        next((one for one in longest_first if len(prompts[one]) < len(p) and p.startswith(ends[one])), None)
        for p in prompts
    ]


def _discarded(calls: Sequence[Call], parents: Sequence[int | None]) -> set[int]:
    """Return the calls without a continuation that were made again, by one that has a continuation."""
    families: dict[Any, set[int]] = {}
    for number, parent in enumerate(parents):
        families.setdefault(tuple(calls[number].prompt_token_ids) if parent is None else parent, set()).add(number)
    continued = {parent for parent in parents if parent is not None}
    return set[int]().union(*(family - continued for family in families.values() if family & continued))


def read(fields: Any, where: str, run: str) -> tuple[dict[str, Any], list[str]]:
    """Return a trace as the keys of a row, and the names of the checks that warn of it.

    The row has the policy versions of `run` if a searcher of tba served all of its calls, and else those of no policy.
    Raises UsageError with the location `where`, the turn and the check.
    """
    try:
        trace = Trace.model_validate(fields)
    except ValidationError as error:
        path, reason = first_problem(error)
        turn = f"turn {int(path[1]) + 1}: " if path[1:] else ""
        raise UsageError(f"{where}: {turn}{'.'.join(path[2:] if turn else path)}: {reason}") from error
    findings = find(trace)
    for level, name, turn, what in findings:
        if level == FATAL:
            raise UsageError(f"{where}: {f'turn {turn}' if turn else 'the turns'}: {name}: {what}")
    line = _line(trace.turns)
    warnings = {finding.check for finding in findings} | ({"unscored"} if line.get("error_kind") == "imported" else set())
    return line, sorted(warnings)
