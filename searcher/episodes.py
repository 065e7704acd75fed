"""Episodes: the policy and an environment take turns until the environment, or a limit, ends them.

    begin ──► reset ──► generate ──► step ──► ended
              worker     engine  ▲    worker
                                 └──────┘ the next turn

Token in, token out: the sampled ids stay as they are, and after each turn only the new messages are rendered, as what
the chat template writes behind the reply. Where a template changes what it wrote before, such as by dropping earlier
thoughts, a new context begins: a *segment* (`Trajectory.segments`).

An environment runs in a reward worker, with its limits (`tba.searcher.scoring`). What is tried for each turn, in this
order, is the table of stop reasons in docs/episodes.md.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tba.common.config import Config
from tba.common.errors import EngineError, named
from tba.common.rendering import Message, PromptRenderer
from tba.common.wire.fields import LARGEST_REWARD, MAX_REWARD_PARTS, MAX_TURN_MESSAGES, ErrorKind
from tba.common.wire.trajectory import STOP_EOS, STOP_ERROR, EpisodeTokens, Int32, SampledTurn, join_turns, one_turn
from tba.searcher.engines.engine import ContextOverflow, Generation, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, storable
from tba.searcher.tasks.task import CORRECT, Prompt, Turn

# Of the texts of one turn in the turn table: a longer observation is cut there, and whole in the tokens.
_MAX_TEXT = 2_000
_MAX_ROLE = 200
_PARSE_ERROR = "parse_error"
_POLICY = "assistant"
# Why an episode with an error of this kind ended; with another one it is "error".
_STOPS = {
    "environment": "environment_error",
    "worker": "environment_error",
    "turn_timeout": "turn_timeout",
    "episode_timeout": "episode_timeout",
}
_SEED_BITS = 63

# What cuts an episode off: `task.truncated` applies.
CUT_OFF = ("max_tokens", "context_overflow")

# Generate after a context, and call back with what was generated; True: before what is queued. Raises EngineError.
Ask = Callable[[Int32, SamplingSettings, Callable[[Generation], None], bool], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an episode: tokens after its first context, sampled tokens of one turn, turns, seconds."""

    tokens: int
    turn_tokens: int
    turns: int
    seconds: float

    @classmethod
    def of(cls, config: Config) -> "Limits":
        search = config.search
        per_turn = min(search.turn_tokens or search.max_tokens, search.max_tokens)
        return cls(search.max_tokens, per_turn, search.max_turns, config.task.episode_seconds)


@dataclass(slots=True)
class Episode:
    """One episode, in play or ended; `stop_reason` is empty while it is in play.

    `turns` are the calls of the engine, with the entries of the turn table as their details, and `replies` their texts,
    (text, finished). The next turn is generated after `context`. `length` are the tokens after the first context.
    `said` are (role, text) of all that was said, as people read it; `conversation` is the template's.
    """

    ticket: int
    prompt: Prompt
    sampling: SamplingSettings
    started: float
    # The policy that served when it began: that of its row if it has no turn.
    version: int
    conversation: Sequence[Message] = ()
    said: list[tuple[str, str]] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    length: int = 0
    turns: list[SampledTurn] = field(default_factory=list)
    replies: list[tuple[str, bool]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    # Since the last answer of the environment.
    turn_started: float = 0.0
    stop_reason: str = ""
    error: str | None = None
    error_kind: ErrorKind | None = None

    @property
    def reward(self) -> float:
        """The sum of the rewards of its turns; 0 with an error."""
        return 0.0 if self.error is not None else float(sum(turn.details["reward"] for turn in self.turns))

    def tokens(self) -> EpisodeTokens:
        """Return the token fields of its row; of an episode without a turn, those of an empty response."""
        if self.turns:
            return join_turns(self.turns)
        runs = np.array([[self.version, 0]], np.int32)
        return one_turn(np.asarray(self.context, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), runs)


@dataclass(slots=True, eq=False)
class Episodes:
    """Plays episodes. Their owner passes on what `Rewards.wait` returns for their tickets (`told`)."""

    ask: Ask
    rewards: Rewards
    renderer: PromptRenderer
    stopping: Stopping
    limits: Limits
    version: Callable[[], int]
    # Seconds in which nothing could be generated.
    paused_seconds: float = 0.0
    _playing: dict[int, Episode] = field(default_factory=dict)
    _ended: list[Episode] = field(default_factory=list)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._playing

    def __len__(self) -> int:
        """Episodes that `begin` has started and `ended` has not returned."""
        return len(self._playing) + len(self._ended)

    def begin(self, ticket: int, prompt: Prompt, sampling: SamplingSettings) -> Episode:
        """Start an episode and return it. `ticket` identifies it in the reward workers."""
        episode = self._playing[ticket] = Episode(ticket, prompt, sampling, self._now(), self.version())
        self.rewards.play(ticket, prompt, [])
        return episode

    def _now(self) -> float:
        """Monotonic time without pauses."""
        return time.monotonic() - self.paused_seconds

    def told(self, scored: Scored) -> None:
        """Continue the episode that an answer of a worker belongs to, or end it."""
        episode = self._playing[scored.ticket]
        turn = scored.turn
        if scored.error is not None or turn is None:
            self._fail(episode, scored.error_kind or "environment", scored.error or "the environment answered nothing")
        elif episode.stop_reason:
            # It was closed.
            self._end(episode, episode.stop_reason)
        elif not episode.replies:
            self._open(episode, turn)
        else:
            self._go_on(episode, turn)

    def ended(self) -> list[Episode]:
        """Return the episodes that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _open(self, episode: Episode, turn: Turn) -> None:
        try:
            episode.context, episode.conversation = self.renderer.begin(episode.prompt, turn.messages)
        except ValueError as error:
            self._fail(episode, "generation", f"not rendered: {error}", is_open=True)
            return
        episode.said += [message[:2] for message in episode.conversation]
        self._generate(episode)

    def _generate(self, episode: Episode, following: Sequence[int] = (), *, restart: bool = False) -> None:
        """Have the next turn generated, after the ids that follow the last one, or with `restart` after these alone."""
        number = len(episode.turns)
        seed = episode.sampling.seed
        if seed is not None and number:
            seed = random.Random(f"{seed}:{number}").getrandbits(_SEED_BITS)  # noqa: S311
        episode.context = [*following] if restart else [*episode.context, *following]
        episode.length += len(following)
        left = self.limits.tokens - episode.length
        sampling = replace(episode.sampling, seed=seed, max_tokens=min(left, self.limits.turn_tokens))
        try:
            self.ask(np.asarray(episode.context, np.int32), sampling, partial(self._replied, episode), number > 0)
        except ContextOverflow as error:
            if number:
                self._close(episode, "context_overflow")
            else:
                self._fail(episode, "generation", f"not generated: {error}", is_open=True)
        except EngineError as error:
            self._fail(episode, "generation", f"not generated: {error}", is_open=True)

    def _replied(self, episode: Episode, generation: Generation) -> None:
        """Give the reply of the policy to the environment."""
        sampled = generation.response_ids.tolist()
        details = {"seconds": generation.seconds, "reward": 0.0, "parts": {}, "messages": []}
        logprobs, runs = generation.logprobs.tolist(), generation.version_runs.tolist()
        kept = generation.kept.tolist()
        episode.turns.append(SampledTurn(episode.context, sampled, logprobs, runs, details, kept))
        episode.context = episode.context + sampled
        episode.length += len(sampled)
        try:
            text = storable(self.stopping.scored_text(sampled))
        # The ids are of another vocabulary.
        except Exception as error:  # noqa: BLE001
            self._fail(episode, "decoding", f"not decoded: {named(error)}", is_open=True)
            return
        episode.replies.append((text, generation.stop_reason == STOP_EOS))
        episode.said.append((_POLICY, text))
        episode.turn_started = time.monotonic()
        is_last = bool(self._reached_limit(episode))
        self.rewards.play(episode.ticket, episode.prompt, episode.replies, last=is_last)

    def _go_on(self, episode: Episode, turn: Turn) -> None:
        """Note what a turn led to, and generate the next one unless the episode is over."""
        now = time.monotonic()
        was_last = turn.done or bool(self._reached_limit(episode))
        # Of one turn they are within the limits already.
        names, total = episode.parts.keys() | turn.parts.keys(), episode.reward + turn.reward
        # Whether an episode was right is what its last word says.
        last = {name: name.rpartition(".")[2] == CORRECT for name in turn.parts}
        sums = [value + (0.0 if last[name] else episode.parts.get(name, 0.0)) for name, value in turn.parts.items()]
        if len(names) > MAX_REWARD_PARTS or abs(total) > LARGEST_REWARD or not all(map(math.isfinite, sums)):
            reason = f"its turns together have {len(names)} parts and a reward of {total:g}: beyond what a row holds"
            self._fail(episode, "environment", reason, is_open=not was_last)
            return
        episode.said += [message[:2] for message in turn.messages]
        messages = [[role[:_MAX_ROLE], content[:_MAX_TEXT]] for role, content, *_ in turn.messages[:MAX_TURN_MESSAGES]]
        seconds = round(now - episode.turn_started, 6)
        details = {"reward": turn.reward, "parts": dict(turn.parts), "messages": messages}
        episode.turns[-1].details.update(details, environment_seconds=seconds)
        episode.parts |= zip(turn.parts, sums, strict=True)
        if self._now() - episode.started > self.limits.seconds:
            reason = f"the episode took longer than task.episode_seconds = {self.limits.seconds:g}"
            self._fail(episode, "episode_timeout", reason, is_open=not was_last)
        elif turn.done:
            self._end(episode, _PARSE_ERROR if turn.parts.get(_PARSE_ERROR, 0.0) > 0 else "completed")
        elif limit := self._reached_limit(episode):
            self._end(episode, limit)
        else:
            self._add_messages(episode, turn.messages)

    def _reached_limit(self, episode: Episode) -> str:
        if len(episode.turns) >= self.limits.turns:
            return "max_turns"
        return "max_tokens" if episode.length >= self.limits.tokens else ""

    def _add_messages(self, episode: Episode, messages: Sequence[Message]) -> None:
        sampled = list(episode.turns[-1].completion_token_ids)
        ended_by = sampled[-1] if sampled[-1] in self.stopping.ids else None
        reply = self.stopping.whole_text(sampled if ended_by is None else sampled[:-1])
        said, prompt = episode.conversation, episode.prompt
        try:
            following = self.renderer.proceed(said, reply, messages, variables_of=prompt, ended_by=ended_by)
        except ValueError as error:
            self._fail(episode, "environment", f"its messages cannot be rendered: {error}", is_open=True)
            return
        if episode.length + len(following.ids) >= self.limits.tokens:
            self._close(episode, "max_tokens")
            return
        episode.conversation = following.conversation
        self._generate(episode, following.ids, restart=following.broken)

    def _fail(self, episode: Episode, kind: ErrorKind, reason: str, *, is_open: bool = False) -> None:
        """End an episode with an error, the first one it has; an environment that is still open is closed before."""
        if episode.error is None:
            episode.error, episode.error_kind = reason, kind
            episode.stop_reason = _STOPS.get(kind, STOP_ERROR)
        (self._close if is_open else self._end)(episode, episode.stop_reason)

    def _close(self, episode: Episode, stop_reason: str) -> None:
        """Have an environment closed that does not know yet that the episode is over."""
        episode.stop_reason = stop_reason
        self.rewards.play(episode.ticket, episode.prompt, episode.replies, close=True)

    def _end(self, episode: Episode, stop_reason: str) -> None:
        episode.stop_reason = stop_reason
        self._ended.append(self._playing.pop(episode.ticket))
