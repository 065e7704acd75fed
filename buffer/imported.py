"""One line of a file to import -> one trajectory, or one sentence about what is wrong with it.

A line is a trajectory, as `tba buffer export` writes it, or a demonstration: a prompt and a response, as text or
as token ids, without log-probabilities. Unknown keys are errors, since a misspelt `reward` would be lost silently.
"""

import difflib
import hashlib
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tba.buffer.texts import Tokenizer
from tba.common import wire
from tba.common.codec import decode_request, encode_request
from tba.common.errors import UsageError, WireError
from tba.common.trajectory import STOP_EOS, Trajectory, pack

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# Nothing is known of how a demonstration was sampled. Temperature 0 is what no policy gradient may take for a plain
# sample, and the zeros in the place of its log-probabilities are named in the metadata.
_DEMONSTRATION_SAMPLING = {"temperature": 0.0, "top_p": 1.0}
_DEMONSTRATION_METADATA = {"logprobs": "absent"}
_KEY_CHARACTERS = 200


class Line(BaseModel):
    """What a line may say. `run` to `received_at` say where an exported trajectory came from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    run: str | None = None
    run_name: str | None = None
    id: wire.Id | None = None
    epoch: int | None = None
    sender: str | None = None
    sequence: wire.Id | None = None
    policy_version: int | None = None
    policy_step: int | None = None
    received_at: float | None = None

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
    stop_reason: wire.StopReason = "eos"
    sampling: dict[str, Any] | None = None
    created_at: wire.UnixTime | None = None
    generation_seconds: float = 0.0
    text: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}

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
    """Makes trajectories for one run. `tokenizer` is called when the first text needs it."""

    def __init__(self, run: str, tokenizer: Callable[[], Tokenizer]) -> None:
        self._run = run
        self._tokenizer = tokenizer

    def parse(self, fields: Any, where: str) -> Trajectory:
        """A checked trajectory. Raises UsageError with `where` and what is wrong."""
        try:
            line = Line.model_validate(fields)
            trajectory = self._trajectory(line)
            _check(trajectory)
        except ValidationError as error:
            raise UsageError(f"{where}: {_sentence(error)}") from error
        except (WireError, ValueError, OverflowError) as error:  # the last one: an integer beyond 64 bits
            raise UsageError(f"{where}: {error}") from error
        return trajectory

    def _trajectory(self, line: Line) -> Trajectory:
        prompt_ids, response_ids = self._prompt_ids(line), self._response_ids(line)
        demonstration = line.logprobs is None
        return Trajectory(
            prompt_key=_key(line, prompt_ids),
            lease=wire.NO_VISIT,
            prompt_ids=np.asarray(prompt_ids, np.int32),
            response_ids=np.asarray(response_ids, np.int32),
            logprobs=np.asarray(line.logprobs if line.logprobs is not None else [0.0] * len(response_ids), np.float32),
            version_runs=_version_runs(line, len(response_ids)),
            loss_mask=np.asarray(line.loss_mask, np.uint8),
            reward=float(line.reward),
            reward_parts={name: float(value) for name, value in line.reward_parts.items()},
            stop_reason=line.stop_reason,
            sampling=_DEMONSTRATION_SAMPLING if demonstration else line.sampling or {},
            created_at=time.time() if line.created_at is None else float(line.created_at),
            generation_seconds=float(line.generation_seconds),
            text=line.text if line.text is not None else line.response,
            error=line.error,
            metadata={**line.metadata, **self._origin(line), **(_DEMONSTRATION_METADATA if demonstration else {})},
        )

    def _prompt_ids(self, line: Line) -> list[int]:
        if line.prompt_ids is not None:
            return line.prompt_ids
        return self._tokenizer().prompt(line.prompt or "")

    def _response_ids(self, line: Line) -> list[int]:
        if line.response_ids is not None:
            return line.response_ids
        return self._tokenizer().response(line.response or "", finished=line.stop_reason == STOP_EOS)

    def _origin(self, line: Line) -> dict[str, Any]:
        """What marks a row as no policy's of this run; nothing if it comes from this very run."""
        if (line.run is not None and line.run == self._run) or "imported_version" in line.metadata:
            return {}
        return {"imported_version": line.policy_version, **({"imported_run": line.run} if line.run else {})}


def _key(line: Line, prompt_ids: list[int]) -> str:
    if line.prompt_key is not None:
        return line.prompt_key
    if line.prompt and len(line.prompt) <= _KEY_CHARACTERS:
        return line.prompt
    source = line.prompt if line.prompt is not None else json.dumps(prompt_ids)
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"


def _version_runs(line: Line, tokens: int) -> Any:
    runs = line.version_runs if line.version_runs is not None else [[0, tokens]]
    if not runs or any(len(run) != 2 for run in runs):
        raise ValueError("version_runs must be pairs [version, tokens], at least one")
    return np.asarray(runs, np.int32)


def _check(trajectory: Trajectory) -> None:
    """What the buffer would refuse. Said here, it has a line number."""
    columns, frames = pack([trajectory])
    message = wire.PutTrajectories(first_sequence=0, rows=wire.Rows.model_validate(columns))
    encoded = encode_request(message, id=1, role="importer", sender="import", run="", frames=frames)
    decode_request([memoryview(frame) for frame in encoded])
    # What JSON cannot hold, and text that is not Unicode (half of a surrogate pair), has no place in the database.
    texts = [trajectory.prompt_key, trajectory.text, trajectory.error, trajectory.metadata, trajectory.reward_parts]
    json.dumps(texts, allow_nan=False, ensure_ascii=False).encode()


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(first["loc"][0]), Line.model_fields, 1)
        hint = f"did you mean {near[0]}?" if near else "what else there is to say goes into metadata"
        return f"unknown key {first['loc'][0]!r}: {hint}"
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")
