"""Parse one line of a file to import: it becomes a trajectory, or an error of one sentence.

A line is a trajectory, as `tba buffer export` writes it, or a demonstration: a prompt and a response, as text or token
ids, without log-probabilities. Unknown keys are errors, because a misspelt `reward` would be ignored silently.
"""

import difflib
import hashlib
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tba.buffer.service.put_columns import to_columns
from tba.buffer.tools.tokenizer import Tokenizer
from tba.common.data_files import require_unicode
from tba.common.errors import UsageError, WireError, problems
from tba.common.wire import fields, messages
from tba.common.wire.codec import decode_request, encode_request
from tba.common.wire.trajectory import ROW_FIELDS, STOP_EOS, Trajectory, pack

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# It is not known how a demonstration was sampled. With temperature 0 no loss treats it as a sample of the policy, and
# the metadata mark its log-probabilities, which are zeros, as absent.
_DEMONSTRATION_SAMPLING = {"temperature": 0.0, "top_p": 1.0}
_DEMONSTRATION_METADATA = {"logprobs": "absent"}
# A longer prompt is identified by its hash.
_KEY_CHARACTERS = 200


class Line(BaseModel):
    """The keys of a line. `run` to `response_tokens` describe the origin of an exported trajectory."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    run: str | None = None
    run_name: str | None = None
    id: Number | None = None
    epoch: int | None = None
    sender: str | None = None
    sequence: Number | None = None
    policy_version: int | None = None
    policy_step: int | None = None
    received_at: float | None = None
    answer: str | None = None
    prompt_tokens: Number | None = None
    response_tokens: Number | None = None

    prompt_key: str | None = None
    prompt: str | None = None
    response: str | None = None
    prompt_ids: list[Token] | None = None
    response_ids: list[Token] | None = None
    logprobs: list[float] | None = None
    version_runs: list[list[Token]] | None = None
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]] = []
    reward: float = 1.0
    reward_parts: dict[str, float] = {}
    stop_reason: fields.StopReason = "eos"
    sampling: dict[str, Any] | None = None
    created_at: float | None = None
    generation_seconds: float = 0.0
    text: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}
    turns: list[dict[str, Any]] = []
    error_kind: fields.ErrorKind | None = None
    segments: list[Token] = []
    kept: list[Token] = []

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.prompt is None and self.prompt_ids is None:
            raise ValueError("it has neither prompt nor prompt_ids")
        if self.response is None and self.response_ids is None:
            raise ValueError("it has neither response nor response_ids")
        if self.logprobs is not None and self.sampling is None:
            raise ValueError("it has logprobs and no sampling: with which temperature and top_p was it sampled?")
        if self.logprobs is not None and self.version_runs is None:
            raise ValueError("it has logprobs and no version_runs: which policy versions produced its tokens?")
        return self


class Parser:
    """Parses the lines of a file for one run. `tokenizer` is called only if a line has text instead of token ids.

    `vocabulary` is the number of token ids of the run's model, None if that is not known here.
    """

    def __init__(self, run: str, tokenizer: Callable[[], Tokenizer], vocabulary: int | None) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def parse(self, fields: Any, where: str) -> Trajectory:
        """Return a checked trajectory. Raises UsageError with the location `where` and the reason."""
        try:
            line = Line.model_validate(fields)
            trajectory = self._trajectory(line)
            self._check_tokens(trajectory)
            _check(trajectory)
        except ValidationError as error:
            raise UsageError(f"{where}: {_sentence(error)}") from error
        # OverflowError: an integer beyond 64 bits.
        except (WireError, ValueError, OverflowError) as error:
            raise UsageError(f"{where}: {error}") from error
        return trajectory

    def _trajectory(self, line: Line) -> Trajectory:
        require_unicode([line.prompt, line.response])
        prompt_ids, response_ids = line.prompt_ids, line.response_ids
        if prompt_ids is None:
            prompt_ids = self._tokenizer().prompt(line.prompt or "")
        if response_ids is None:
            response_ids = self._tokenizer().response(line.response or "", finished=line.stop_reason == STOP_EOS)
        logprobs = [0.0] * len(response_ids) if line.logprobs is None else line.logprobs
        runs = [[0, len(response_ids)]] if line.version_runs is None else line.version_runs
        if not runs or any(len(run) != 2 for run in runs):
            raise ValueError("version_runs must be pairs [version, tokens], at least one")
        return Trajectory(
            prompt_key=_key(line, prompt_ids),
            lease=fields.NO_VISIT,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            response_ids=np.asarray(response_ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            version_runs=np.asarray(runs, np.int32),
            loss_mask=np.asarray(line.loss_mask, np.uint8),
            segments=np.asarray(line.segments, np.int32),
            kept=np.asarray(line.kept, np.int32),
            **self._row_fields(line),
        )

    def _check_tokens(self, trajectory: Trajectory) -> None:
        """Raise ValueError for a token id that the model does not have: the trainer could not make a step with it."""
        # Kept tokens are ids plus 1.
        for name, more in (("prompt_ids", 0), ("response_ids", 0), ("kept", 1)):
            largest = int(getattr(trajectory, name).max(initial=0)) - more
            if self._vocabulary is not None and largest >= self._vocabulary:
                raise ValueError(f"{name} has {largest}, and the run's model has token ids below {self._vocabulary}")

    def _row_fields(self, line: Line) -> dict[str, Any]:
        fields = {name: getattr(line, name) for name in ROW_FIELDS}
        if line.created_at is None:
            fields["created_at"] = time.time()
        # A file that another build exported, or that someone wrote, names no kind.
        if line.error is not None and line.error_kind is None:
            fields["error_kind"] = "imported"
        if line.text is None:
            fields["text"] = line.response
        # Marks a row that no policy of this run has sampled.
        if line.run != self._run and "imported_version" not in line.metadata:
            fields["metadata"] = line.metadata | {"imported_version": line.policy_version}
            if line.run:
                fields["metadata"]["imported_run"] = line.run
        if line.logprobs is None:
            fields["sampling"] = _DEMONSTRATION_SAMPLING
            fields["metadata"] = fields["metadata"] | _DEMONSTRATION_METADATA
        return fields


def _key(line: Line, prompt_ids: list[int]) -> str:
    if line.prompt_key is not None:
        return line.prompt_key
    if line.prompt and len(line.prompt) <= _KEY_CHARACTERS:
        return line.prompt
    source = line.prompt if line.prompt is not None else json.dumps(prompt_ids)
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"


def _check(trajectory: Trajectory) -> None:
    """Raise the error that the buffer would raise, so that the user sees the line number."""
    # The database stores neither values that JSON lacks nor text that is not Unicode, such as a lone surrogate.
    texts: list[Any] = [trajectory.prompt_key, trajectory.text, trajectory.error]
    texts += [trajectory.metadata, trajectory.reward_parts, trajectory.turns]
    json.dumps(texts, allow_nan=False)
    require_unicode(texts)
    columns, frames = pack([trajectory])
    message = messages.PutTrajectories(first_sequence=0, rows=messages.Rows(**columns))
    encoded = encode_request(message, id=1, role="importer", sender="import", run="", frames=frames)
    to_columns(decode_request([memoryview(frame) for frame in encoded]))


def _sentence(error: ValidationError) -> str:
    field, reason = problems(error)[0]
    if field and field[0] not in Line.model_fields:
        near = difflib.get_close_matches(field[0], Line.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else "other data goes into metadata"
        return f"unknown key {field[0]!r}: {hint}"
    return f"{'.'.join(field)}: {reason}" if field else reason
