"""OpenEnv's `TrainingTrace` v1, read and written: one episode of an agent, as the calls of the model that it made.

    line ──► trace ──► checks ──► the calls that are trained on ──► the keys of one row (import_file.Line)

The checks have the names and levels of OpenEnv's validator: a FATAL one refuses the file, a WARN is counted. A trace
has no place for a reward: the result of OpenEnv's `verify` is in the metadata of its last call. Without one the row is
an error, because what no one has scored is not worth 0.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AliasPath, BaseModel, Field, ValidationError

from tba.common.errors import UsageError, problems
from tba.common.wire.fields import MAX_TURN_MESSAGES, MAX_TURN_TEXT
from tba.common.wire.trajectory import STOP_EOS, STOP_LENGTH, SampledTurn, join_turns

FATAL, WARN = "FATAL", "WARN"
_MODEL = re.compile(r"policy@v(\d+)\Z")
_CHOICE = ("response", "choices", 0)
_MESSAGE = (*_CHOICE, "message")
# Entries of the turn table, each also a key of the metadata of a call.
_DETAILS = ("seconds", "environment_seconds", "reward", "parts", "messages")
_Spans = list[Annotated[list[int], Field(min_length=3, max_length=3)]]
# By setting of sampling, the values without an effect.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
# The fields of an exported row that a trace has no place for: they are in the metadata of its last call.
_KEPT = (
    *("run", "run_name", "id", "epoch", "sender", "sequence", "policy_version", "policy_step", "received_at"),
    *("stop_reason", "created_at", "generation_seconds", "text", "error", "error_kind", "metadata"),
)


def _at(first: str, *path: str | int, default: Any = None) -> Any:
    """Return a field whose value is at a path of the call's `request`, `response` or `metadata`."""
    return Field(default, validation_alias=AliasPath(first, *path))


class Call(BaseModel, strict=True, extra="forbid"):
    """One call of the model: its prompt [P], what it sampled [C], and a mask over both [P + C]."""

    node_id: Annotated[str, Field(min_length=1)]
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = {}
    response: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    asked: list[dict[str, Any]] | None = _at("request", "messages")
    content: Any = _at(*_MESSAGE, "content")
    finish_reason: Any = _at(*_CHOICE, "finish_reason")
    # [start, end, version] of the sampled tokens, and the run of these versions, as search.serve answers. Of an answer
    # that passed through OpenEnv's capture, the message has them.
    spans_of_choice: _Spans | None = _at(*_CHOICE, "version_spans")
    spans_of_message: _Spans | None = _at(*_MESSAGE, "version_spans")
    run_of_response: str | None = _at("response", "run")
    run_of_message: str | None = _at(*_MESSAGE, "run")
    model: str | None = _at("metadata", "model")
    temperature: float | None = _at("metadata", "sampling_params", "temperature")
    top_p: float | None = _at("metadata", "sampling_params", "top_p")
    prompt_key: str | None = _at("metadata", "prompt_key")
    env_reward: float | None = _at("metadata", "verify", "env_reward")
    metrics: dict[str, Any] = _at("metadata", "verify", "metrics", default={})
    tba: dict[str, Any] = _at("metadata", "tba", default={})
    seconds: float = _at("metadata", "seconds", default=0.0)
    environment_seconds: float | None = _at("metadata", "environment_seconds")
    reward: float = _at("metadata", "reward", default=0.0)
    parts: dict[str, float] = _at("metadata", "parts", default={})
    messages: list[list[str]] = _at("metadata", "messages", default=[])

    @property
    def mask(self) -> list[int]:
        """The mask of the sampled tokens, [C]."""
        return self.loss_mask[len(self.prompt_token_ids) :]

    @property
    def sampling(self) -> dict[str, float]:
        """The settings of sampling, by default 1 as of servers. Temperature 0 where others changed the distribution."""
        found = {"temperature": 1.0, "top_p": 1.0}
        found |= self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        return found if self.is_modelled else found | {"temperature": 0.0}

    @property
    def is_modelled(self) -> bool:
        """Whether nothing but temperature and top_p changed the distribution that was sampled."""
        given = self.metadata.get("sampling_params")
        return not isinstance(given, dict) or all(given.get(name) in (None, *no) for name, no in _NEUTRAL.items())

    @property
    def spans(self) -> list[list[int]]:
        """[start, end, version] of the sampled tokens; empty if no searcher of tba has served them."""
        served = _MODEL.match(self.model or "")
        whole = [[0, len(self.completion_token_ids), int(served[1])]] if served else []
        return self.spans_of_choice or self.spans_of_message or whole


class Trace(BaseModel, strict=True, extra="forbid"):
    """The calls of one episode."""

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


def find(calls: Sequence[Call]) -> list[Finding]:
    """Return the findings about each call, and those about the whole trace if no call has a fatal one."""
    each = [Finding(level, name, n, what) for n, call in enumerate(calls, 1) for level, name, what in _of_call(call)]
    return each if any(one.level == FATAL for one in each) else [*each, *_of_trace(calls)]


def _of_call(call: Call) -> Iterator[tuple[str, str, str]]:
    prompt, sampled = len(call.prompt_token_ids), len(call.completion_token_ids)
    logprobs, mask, spans = call.per_token_logps, call.loss_mask, call.spans
    is_whole = not spans or all(a[1] == b[0] for a, b in pairwise([[0, 0], *spans, [sampled]]))
    is_whole &= all(start <= end for start, end, _ in spans)
    has_versions = is_whole and all(0 <= version < 1 << 31 for *_, version in spans)
    all_ids = {*call.prompt_token_ids, *call.completion_token_ids, 0}
    ids = f"{prompt} prompt and {sampled} completion ids"
    checks = (
        (FATAL, "invalid_token_id", min(all_ids) < 0 or max(all_ids) >= 1 << 31, "a token id is below 0 or above 2^31"),
        (FATAL, "no_prompt_ids", not prompt, "prompt_token_ids is empty"),
        (WARN, "no_sampled_ids", not sampled, ""),
        (FATAL, "invalid_logprob", not all(map(math.isfinite, logprobs)), "a log-probability is not finite"),
        (FATAL, "positive_logprob", max(logprobs, default=0) > 0, "a log-probability is above 0"),
        (FATAL, "logprob_misalign", len(logprobs) != sampled, f"{len(logprobs)} log-probabilities for {ids}"),
        (FATAL, "length_mismatch", len(mask) != prompt + sampled, f"a loss_mask of {len(mask)} for {ids}"),
        (FATAL, "invalid_loss_mask", not {*mask} <= {0, 1}, "loss_mask has other values than 0 and 1"),
        (FATAL, "trainable_prompt", any(mask[:prompt]), "loss_mask counts tokens of the prompt"),
        (FATAL, "version_spans", not has_versions, f"they are not versions of all tokens, in order, of {ids}"),
        (WARN, "truncated_turn", call.finish_reason == "length", ""),
    )
    return ((level, name, what) for level, name, found, what in checks if found)


def _of_trace(calls: Sequence[Call]) -> Iterator[Finding]:
    paths, discarded = _graph(calls)
    roots = sum(len(path) == 1 for path in paths.values())
    settings = {tuple(c.sampling.values()) for n, c in enumerate(calls) if any(c.mask) and n not in discarded}
    checks = (
        (FATAL, "no_turns", not calls, "there is none"),
        (FATAL, "duplicate_node_ids", len({c.node_id for c in calls}) < len(calls), "two turns have the same node_id"),
        (FATAL, "nothing_trainable", calls and not settings, "no loss_mask counts a token"),
        (FATAL, "sampling_policy_changed", len(settings) > 1, f"temperature and top_p are {sorted(settings)}"),
        (WARN, "degenerate_rollout", len(calls) == 1, ""),
        (WARN, "per_turn_capture_only", 1 < len(calls) == roots, ""),
        (WARN, "multiple_roots", 1 < roots < len(calls), ""),
        (WARN, "discarded_turns", discarded, ""),
    )
    return (Finding(level, name, 0, what) for level, name, found, what in checks if found)


def _graph(calls: Sequence[Call]) -> tuple[dict[int, tuple[int, ...]], set[int]]:
    """Return the path to each call from the first of its conversation, and the calls that led nowhere.

    A call continues the one whose prompt and completion are the longest beginning of its prompt. A call led nowhere if
    none continues it, although one continues another call after the same one, or with the same first prompt.
    """
    prompts = [np.array(call.prompt_token_ids, np.int64).tobytes() for call in calls]
    ends = [p + np.array(c.completion_token_ids, np.int64).tobytes() for p, c in zip(prompts, calls, strict=True)]
    longest_first = sorted(range(len(calls)), key=lambda one: -len(ends[one]))
    paths, families = dict[int, tuple[int, ...]](), dict[bytes | tuple[int, ...], set[int]]()
    for number in sorted(range(len(calls)), key=lambda one: len(prompts[one])):
        prompt = prompts[number]
        before = (one for one in longest_first if len(prompts[one]) < len(prompt) and prompt.startswith(ends[one]))
        path = next((paths[one] for one in before), ())
        paths[number] = (*path, number)
        families.setdefault(path or prompt, set()).add(number)
    continued = {one for path in paths.values() for one in path[:-1]}
    return paths, {one for family in families.values() if family & continued for one in family - continued}


def read(fields: Any, where: str, run: str) -> tuple[dict[str, Any], list[str]]:
    """Return a trace as the keys of a row, and the names of the checks that warn of it.

    The row has the policy versions of one run, which is `run` where the calls name none, if its searchers served all of
    them, and else those of no policy. Raises UsageError with the location `where`, the turn and the check.
    """
    try:
        calls = Trace.model_validate(fields).turns
    except ValidationError as error:
        path, reason = problems(error)[0]
        place = f"turn {int(path[1]) + 1}: {'.'.join(path[2:])}" if path[1:] else ".".join(path)
        raise UsageError(f"{where}: {place}: {reason}") from error
    findings = find(calls)
    for level, name, turn, what in findings:
        if level == FATAL:
            raise UsageError(f"{where}: {f'turn {turn}' if turn else 'turns'}: {name}: {what}")
    own = {"unscored"} if calls[-1].env_reward is None else set()
    own |= set() if all(call.is_modelled for call in calls) else {"sampling_not_modelled"}
    return _line(calls, run), sorted({finding.check for finding in findings} | own)


def _line(calls: Sequence[Call], run: str) -> dict[str, Any]:
    """Return the keys of a row. What an export has kept of the row comes before what is known of the calls."""
    # The calls with tokens to train on, one conversation after the other. The tokens of others are context.
    paths, discarded = _graph(calls)
    order = sorted(paths.keys() - discarded, key=paths.__getitem__)
    # A row of ours has no retries: its contexts may return to an earlier one.
    kept = [calls[n] for n in (range(len(calls)) if calls[-1].tba else order) if any(calls[n].mask)]
    runs = {(call.run_of_response or call.run_of_message or run) if call.spans else None for call in kept}
    served_by = runs.pop() if len(runs) == 1 else None
    is_episode = len(kept) > 1 or not kept[0].model_fields_set.isdisjoint(_DETAILS)
    is_cut, last = kept[-1].finish_reason == "length", calls[-1]
    texts = [call.content for call in kept if isinstance(call.content, str)]
    line = {
        "run": served_by,
        "prompt_key": next((call.prompt_key for call in calls if call.prompt_key), None),
        "reward": last.env_reward or 0.0,
        # An integer of JSON may be larger than any float.
        "reward_parts": {
            name: float(value)
            for name, value in last.metrics.items()
            if isinstance(value, int | float) and abs(value) < 1e300
        },
        "stop_reason": ((STOP_EOS, STOP_LENGTH), ("completed", "max_tokens"))[is_episode][is_cut],
        "sampling": kept[0].sampling,
        "generation_seconds": sum(call.seconds for call in kept),
        "text": "\n".join(texts) or None,
        "error": "the trace has no env_reward: it was not scored" if last.env_reward is None else None,
        "error_kind": "imported" if last.env_reward is None else None,
        "metadata": {"node_id": calls[0].node_id},
    }
    line |= {name: value for name, value in last.tba.items() if name in _KEPT and value is not None}
    tokens = _tokens(kept, has_versions=served_by is not None)
    if not is_episode:
        tokens |= {"turns": [], "loss_mask": [] if all(tokens["loss_mask"]) else tokens["loss_mask"]}
    return line | tokens


def _tokens(kept: Sequence[Call], *, has_versions: bool) -> dict[str, Any]:
    """Return the arrays of the row, and its turn table."""
    turns = []
    for call, following in zip(kept, [*kept[1:], None], strict=True):
        sampled = call.completion_token_ids
        runs = [(version, end - start) for start, end, version in call.spans] if has_versions else [(0, len(sampled))]
        turns.append(SampledTurn(call.prompt_token_ids, sampled, call.per_token_logps, runs, _details(call, following)))
    tokens = join_turns(turns)
    for turn, call in zip(tokens.turns, kept, strict=True):
        tokens.loss_mask[turn["start"] : turn["start"] + turn["tokens"]] = call.mask
    tokens.logprobs[tokens.loss_mask == 0] = 0
    return {name: value if name == "turns" else value.tolist() for name, value in tokens._asdict().items()}


def _details(call: Call, following: Call | None) -> dict[str, Any]:
    """Return the entries of the turn table; the environment's answer is what the next request adds to this one."""
    recorded = call.model_dump(include={*_DETAILS}, exclude_none=True)
    before, after = call.asked or [], following.asked or [] if following else []
    if not recorded["messages"] and after[: len(before)] == before:
        # The first message that is new is the model's own.
        added = after[len(before) + 1 :][:MAX_TURN_MESSAGES]
        recorded["messages"] = [[str(one.get("role")), str(one.get("content"))[:MAX_TURN_TEXT]] for one in added]
    return recorded


def write(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return an exported row as a trace; None for one without sampled tokens or their log-probabilities."""
    response = record["response_ids"]
    if not response or record["metadata"].get("logprobs") == "absent":
        return None
    versions = np.repeat(*np.array(record["version_runs"]).T)
    mask = record["loss_mask"] or [1] * len(response)
    calls = []
    for number, turn in enumerate(record["turns"] or [{"start": 0, "tokens": len(response)}]):
        start, end = turn["start"], turn["start"] + turn["tokens"]
        # The context of a turn begins with the segment that it is in, or else with the prompt.
        segment = max((one for one in record["segments"] if one <= start), default=None)
        prompt = record["prompt_ids"] + response[:start] if segment is None else response[segment:start]
        edges = [0, *(np.flatnonzero(np.diff(versions[start:end])) + 1).tolist(), end - start]
        spans = [[a, b, int(versions[start + a])] for a, b in pairwise(edges)]
        details = {name: turn[name] for name in turn.keys() - {"start", "tokens"}}
        call = {
            "node_id": f"{record['run']}-{record['id']}-{number}",
            "prompt_token_ids": prompt,
            "completion_token_ids": response[start:end],
            # The rounding of a probability of 1 may be above 0.
            "per_token_logps": [0.0 if 0 < one < 1e-4 else one for one in record["logprobs"][start:end]],
            "loss_mask": [0] * len(prompt) + mask[start:end],
            "response": {"run": record["run"], "choices": [{"finish_reason": "stop", "version_spans": spans}]},
            "metadata": {"model": f"policy@v{spans[0][2]}", "sampling_params": record["sampling"], **details},
        }
        calls.append(call)
    if record["stop_reason"] in (STOP_LENGTH, "max_tokens"):
        calls[-1]["response"]["choices"][0]["finish_reason"] = "length"
    calls[0]["metadata"]["prompt_key"] = record["prompt_key"]
    reward = None if record["error"] else record["reward"]
    calls[-1]["metadata"]["verify"] = {"env_reward": reward, "metrics": record["reward_parts"]}
    calls[-1]["metadata"]["tba"] = {name: record[name] for name in _KEPT}
    trace = {"schema_version": 1, "turns": calls}
    return trace if all(one.level == WARN for one in find(Trace.model_validate(trace).turns)) else None
