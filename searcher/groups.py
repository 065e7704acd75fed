"""Groups of responses: from a leased prompt to a batch of trajectories that is ready to be put.

lease ──► S requests in the engine ──► responses come back, each scored ──► complete ──► put ──► acknowledged
"""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tba.common.errors import EngineError
from tba.common.log import get_logger
from tba.common.trajectory import STOP_EOS, STOP_ERROR, Int32, Trajectory
from tba.common.wire import Visit
from tba.searcher.engine import Engine, Generation, GenerationRequest, SamplingSettings
from tba.searcher.exploration import Exploration
from tba.searcher.rewards import Rewards
from tba.searcher.scores import Scored
from tba.searcher.tasks.scoring import failed, storable
from tba.searcher.tasks.task import Prompt, Task

log = get_logger(__name__)

# Prompts that do not fit are rows with an error; when nothing else comes, something is wrong with the settings.
_FAILURES_IN_A_ROW = 1_000
_ERROR_CHARACTERS = 2_000
_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(slots=True)
class Group:
    """The responses to one leased prompt."""

    visit: Visit
    prompt: Prompt
    prompt_ids: Int32
    size: int
    done: list[Trajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All responses are there."""
        return len(self.done) == self.size


class GroupBuilder:
    """Turns visits into requests, and generations into scored trajectories."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        rewards: Rewards,
        tokenizer: Tokenizer,
        exploration: Exploration,
        *,
        samples: int,
    ) -> None:
        self._engine = engine
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._exploration = exploration
        self._samples = samples
        self._prompts = {prompt.key: prompt for prompt in task.prompts()}
        # Kept for all epochs: about as many bytes as the texts, which are in memory too.
        self._prompt_ids: dict[str, Int32] = {}
        self._requests: dict[int, tuple[Group, SamplingSettings]] = {}
        self._unscored: dict[int, tuple[Group, SamplingSettings, Generation]] = {}
        self._next_id = 0
        self.trajectories = 0
        self.tokens = 0
        self.errors = 0
        self._failures_in_a_row = 0

    def start(self, visit: Visit) -> Group | None:
        """Submit the requests of a visit. Returns its group if nothing of it can be generated."""
        prompt = self._prompts[visit.prompt_key]
        group = Group(visit, prompt, self._ids_of(prompt), self._samples)
        for sample in range(self._samples):
            self._submit(group, self._exploration.settings(visit, sample))
        return group if group.complete else None

    def finish(self, generation: Generation) -> Group | None:
        """Have a response scored. Returns its group if it cannot be, and was the last one."""
        group, sampling = self._requests.pop(generation.id)
        try:
            text = storable(self._tokenizer.decode(generation.response_ids.tolist(), skip_special_tokens=True))
        except Exception as error:  # of another vocabulary: a row with its error, as from a reward
            log.exception("response not decoded", prompt=group.prompt.key)
            undecoded = Scored(generation.id, None, *failed(f"not decoded: {type(error).__name__}: {error}"))
            group.done.append(self._trajectory(group, sampling, generation, undecoded))
            return group if group.complete else None
        self._unscored[generation.id] = group, sampling, generation
        self._rewards.submit(generation.id, group.prompt, text, generation.stop_reason == STOP_EOS)
        return None

    def scored(self, scored: Scored) -> Group | None:
        """Take a score. Returns the response's group if that was the last one."""
        group, sampling, generation = self._unscored.pop(scored.ticket)
        group.done.append(self._trajectory(group, sampling, generation, scored))
        return group if group.complete else None

    def _ids_of(self, prompt: Prompt) -> Int32:
        if (ids := self._prompt_ids.get(prompt.key)) is None:
            ids = self._prompt_ids[prompt.key] = np.asarray(self._tokenizer.encode(prompt.text), np.int32)
        return ids

    def _submit(self, group: Group, sampling: SamplingSettings) -> None:
        request = GenerationRequest(self._next_id, group.prompt_ids, sampling)
        self._next_id += 1
        try:
            self._engine.submit(request)
        except EngineError as error:
            group.done.append(self._failed(group, sampling, f"not generated: {error}"))
            return
        self._requests[request.id] = group, sampling

    def _trajectory(
        self, group: Group, sampling: SamplingSettings, generation: Generation, scored: Scored
    ) -> Trajectory:
        self.errors += scored.error is not None
        self.trajectories += 1
        self.tokens += len(generation.response_ids)
        self._failures_in_a_row = 0
        return Trajectory(
            **_common(group, sampling),
            response_ids=generation.response_ids,
            logprobs=generation.logprobs,
            version_runs=generation.version_runs,
            reward=scored.reward.total,
            reward_parts=scored.reward.parts,
            stop_reason=generation.stop_reason,
            generation_seconds=generation.seconds,
            text=scored.text,
            error=scored.error,
        )

    def _failed(self, group: Group, sampling: SamplingSettings, error: str) -> Trajectory:
        self.errors += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _FAILURES_IN_A_ROW:
            raise EngineError(f"{self._failures_in_a_row} rollouts in a row failed, the last one: {error}")
        log.warning("rollout failed", prompt=group.prompt.key, reason=error)
        return Trajectory(
            **_common(group, sampling),
            response_ids=_NO_TOKENS,
            logprobs=_NO_LOGPROBS,
            version_runs=np.array([[self._engine.weights_version, 0]], np.int32),
            reward=0.0,
            reward_parts={},
            stop_reason=STOP_ERROR,
            generation_seconds=0.0,
            error=error[:_ERROR_CHARACTERS],
        )


def _common(group: Group, sampling: SamplingSettings) -> dict[str, Any]:
    return {
        "prompt_key": group.prompt.key,
        "lease": group.visit.lease,
        "prompt_ids": group.prompt_ids,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p},
        "created_at": time.time(),
    }
