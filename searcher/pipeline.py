"""The searcher's pipeline: from a visit of a prompt to a group of trajectories on its way to the buffer.

    visit ──► generate ──► score ──► deliver
               engine      workers    spool, then the buffer

A prompt with an environment goes back and forth between the first two (`tba.searcher.episodes`).

Each stage has `submit` and `done`. `done` returns what is finished without waiting for the rest, so a slow stage does
not block the engine.
"""

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from typing import Any

import numpy as np

from tba.common.config import Explored, SearchSection, Truncated
from tba.common.config.task import Phase
from tba.common.errors import EngineError, named
from tba.common.log import get_logger
from tba.common.wire.codec import MAX_REQUEST_FRAME_BYTES
from tba.common.wire.fields import NO_VISIT
from tba.common.wire.messages import Visit
from tba.common.wire.trajectory import STOP_EOS, STOP_ERROR, STOP_LENGTH, EpisodeTokens, Int32, Trajectory, one_turn
from tba.searcher.build import LoadedTask
from tba.searcher.delivery.delivery import Delivery
from tba.searcher.engines.engine import Engine, Generation, Requests, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import CUT_OFF, Episode, Episodes
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Group, Scored, failed, phased, storable
from tba.searcher.tasks.task import Prompt, Reward, has_environment

log = get_logger(__name__)

# A prompt that does not fit the context is a row with an error. When nothing else comes, the settings are wrong.
_MAX_FAILURES_IN_A_ROW = 1_000
# The number of responses that show whether responses end by themselves.
_FIRST_RESPONSES = 200
_ERROR_CHARACTERS = 2_000
# The share of a group of episodes that must be good for the group to be trained on.
_LEAST_GOOD = 0.75
# Both a torch.Generator and a msgpack integer accept this many bits.
_SEED_BITS = 63
_NO_TOKENS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Exploration:
    """Draws the sampling settings of a run's responses: temperature, top-p and seed.

    All draws follow from (run seed, prompt, epoch, sample), and not from the order of leases or the batch that a
    response happens to be in. So a run can be repeated, and a visit that is leased again after its searcher died is
    explored in the same way. `searcher` is this one's name, for `explore = "searcher"`.
    """

    config: SearchSection
    run_seed: int
    searcher: str

    def settings(self, visit: Visit, sample: int) -> SamplingSettings:
        """Return the settings of one sample of a visit."""
        # Per-response seeds cost vLLM one generator per row of its batch (docs/design.md), and would not make a run
        # repeatable: in vLLM the rounding of a row depends on the other rows.
        seeded = self.config.engine == "transformers"
        unit = {"sample": (visit.prompt_key, visit.epoch, sample), "group": (visit.prompt_key, visit.epoch)}
        drawn_for = unit.get(self.config.explore, (self.searcher,))
        generator = random.Random(self._hash("settings", *drawn_for))  # noqa: S311
        return SamplingSettings(
            temperature=draw(self.config.temperature, generator),
            top_p=draw(self.config.top_p, generator),
            max_tokens=self.config.max_tokens,
            seed=self._hash("response", visit.prompt_key, visit.epoch, sample) if seeded else None,
            top_k=self.config.top_k,
            min_p=self.config.min_p,
        )

    def guide(self, visit: Visit) -> float | None:
        """Return the fraction of the demonstration with which the responses to a visit begin; None: it is plain.

        The whole group has one, so that it is a sample of one context. It is drawn uniformly up to `visit.guide`: a
        prompt that is seen for the first time then meets all parts of its demonstration, and not only its end.
        """
        generator = random.Random(self._hash("guide", visit.prompt_key, visit.epoch))  # noqa: S311
        if generator.random() >= self.config.guided:
            return None
        return visit.guide * generator.random()

    def _hash(self, *parts: str | int) -> int:
        # repr distinguishes ("a", 11) from ("a1", 1).
        digest = hashlib.blake2b(repr((self.run_seed, *parts)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> (64 - _SEED_BITS)


def draw(explored: Explored, generator: random.Random) -> float:
    """Draw the only value, one of a list, or one of a range in steps of 0.01: recorded values stay readable."""
    if isinstance(explored, tuple):
        return generator.choice(explored)
    if isinstance(explored, dict):
        low, high = explored["min"], explored["max"]
        return min(max(round(generator.uniform(low, high), 2), low), high)
    return explored


@dataclass(frozen=True, slots=True)
class Response:
    """One sample of a group. With an `error` the engine could not generate it."""

    group: Group
    sampling: SamplingSettings
    generation: Generation
    error: str = ""

    @property
    def prefix(self) -> Int32:
        """The tokens before those that the engine generated."""
        return _NO_TOKENS if self.group.prefix is None else self.group.prefix


@dataclass(eq=False)
class GenerationStage:
    """Visits of `prompts` in, responses of the engine out: `samples` to each visit, with the `settings` of each.

    `metadata` returns those of the rows of a visit when it is submitted. `guide` is `Exploration.guide`; without it all
    responses are plain. `context` is the most tokens of prompt and response, None if not known.
    """

    engine: Engine
    loaded: LoadedTask
    prompts: Iterable[Prompt]
    settings: Callable[[Visit, int], SamplingSettings]
    samples: int
    metadata: Callable[[], dict[str, Any]] = dict
    guide: Callable[[Visit], float | None] = lambda _: None
    context: int | None = None

    def __post_init__(self) -> None:
        self._by_key = by_key = {prompt.key: prompt for prompt in self.prompts}
        # Kept for all epochs: they take about as much memory as the texts, which are in memory too.
        self._prompt_ids = cache(lambda key: np.asarray(self.loaded.renderer.ids(by_key[key]), np.int32))
        self._requests = Requests(self.engine)
        self.ask = self._requests.ask
        self._done: list[Response] = []

    @property
    def waiting(self) -> int:
        return self.engine.in_flight + len(self._done)

    def submit(self, visit: Visit) -> list[tuple[int, Group, SamplingSettings]]:
        """Queue a visit's requests; with an environment return (ticket, group, settings) of its episodes to begin."""
        prompt = self._by_key[visit.prompt_key]
        # Of a visit that another searcher left, what is missing: by numbers that no stored response of it had.
        missing = max(1, self.samples - visit.stored)
        first = self.samples * visit.stored
        settings = [self.settings(visit, sample) for sample in range(first, first + missing)]
        metadata = self.metadata()
        # What an explorer serves has no version of the run.
        version = metadata.get("newest_version", self.engine.weights_version)
        if has_environment(self.loaded.task, prompt):
            group = Group(visit, prompt, _NO_TOKENS, missing, metadata, version=version)
            return [(self._requests.new_id(), group, sampling) for sampling in settings]
        prefix = self._prefix(visit, prompt, settings[0].max_tokens)
        group = Group(visit, prompt, self._prompt_ids(visit.prompt_key), missing, metadata, prefix, version)
        context = group.prompt_ids
        if prefix is not None:
            context = np.concatenate([context, prefix])
            settings = [replace(one, max_tokens=one.max_tokens - len(prefix)) for one in settings]
        for sampling in settings:
            try:
                self.ask(context, sampling, partial(self._take, group, sampling), first=False)
            except EngineError as error:
                runs = np.array([[self.engine.weights_version, 0]], np.int32)
                nothing = Generation(self._requests.new_id(), _NO_TOKENS, _NO_LOGPROBS, runs, STOP_ERROR, 0.0)
                self._done.append(Response(group, sampling, nothing, f"not generated: {error}"))
        return []

    def _prefix(self, visit: Visit, prompt: Prompt, max_tokens: int) -> Int32 | None:
        """Return the tokens that a guided group begins with, None for a plain one: at most all but the last token."""
        fraction = self.guide(visit) if prompt.demonstration else None
        if fraction is None:
            return None
        _, renderer, stopping = self.loaded
        room = max_tokens if self.context is None else self.context - len(self._prompt_ids(prompt.key))
        shown = renderer.response_ids(renderer.text(prompt), stopping.before_string(prompt.demonstration))
        ids = list(takewhile(lambda id_: id_ not in stopping.ids, shown))[: min(room, max_tokens)]
        return np.asarray(ids[: round(fraction * (len(ids) - 1))], np.int32)

    def _take(self, group: Group, sampling: SamplingSettings, generation: Generation) -> None:
        self._done.append(Response(group, sampling, generation))

    def done(self) -> list[Response]:
        """Step the engine. Returns the responses that have ended, and those that could not be generated."""
        self._requests.step()
        responses, self._done = self._done, []
        return responses


@dataclass(eq=False)
class ScoringStage:
    """Responses in, groups whose rows all have their reward out. The episodes of a group are played here.

    With `singly` each row of a group without episodes comes out at once, as a part of its group.
    """

    rewards: Rewards
    stopping: Stopping
    truncated: Truncated
    episodes: Episodes
    gives_up: bool = True
    phases: Sequence[Phase] = ()
    singly: bool = False
    trajectories: int = 0
    tokens: int = 0
    errors: int = 0
    # By ticket: the group of each episode in play.
    _played: dict[int, tuple[Group, SamplingSettings]] = field(default_factory=dict)
    _unscored: dict[int, Response] = field(default_factory=dict)
    _complete: list[Group] = field(default_factory=list)
    _failures_in_a_row: int = 0
    _cut_off: int = 0
    _warned: bool = False

    def submit(self, response: Response) -> None:
        """Have a response scored; one without text gets its row immediately."""
        generation, prompt = response.generation, response.group.prompt
        self._count_failure(response.error)
        if response.error:
            log.warning("rollout failed", prompt=prompt.key, reason=response.error)
            self._finish(response, Scored(generation.id, None, Reward(0.0, {}), response.error, "generation"))
            return
        try:
            whole = np.concatenate([response.prefix, generation.response_ids])
            text = storable(self.stopping.scored_text(whole))
        # The ids are of another vocabulary. The row carries the error, as it does when a scorer fails.
        except Exception as error:
            log.exception("response not decoded", prompt=prompt.key)
            reason = f"not decoded: {named(error)}"
            self._finish(response, Scored(generation.id, None, *failed(reason), error_kind="decoding"))
            return
        self._unscored[generation.id] = response
        self.rewards.submit(generation.id, prompt, text, generation.stop_reason == STOP_EOS)

    def done(self, wait_seconds: float) -> list[Group]:
        """The groups that are complete, or parts of them. Waits for the first score at most `wait_seconds`, if due."""
        for scored in self.rewards.wait(wait_seconds if self.rewards.waiting else 0.0):
            if scored.ticket in self.episodes:
                self.episodes.told(scored)
            else:
                self._finish(self._unscored.pop(scored.ticket), scored)
        for episode in self.episodes.ended():
            self._finish_episode(episode)
        groups, self._complete = self._complete, []
        return groups

    def play(self, ticket: int, group: Group, sampling: SamplingSettings) -> None:
        """Begin an episode, which becomes a row of the group."""
        self._played[ticket] = group, sampling
        self.episodes.begin(ticket, group.prompt, sampling)

    def _count_failure(self, error: str) -> None:
        """Count what could not be generated. Raises EngineError if nothing else comes."""
        self._failures_in_a_row = self._failures_in_a_row + 1 if error else 0
        if self.gives_up and self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise EngineError(f"{self._failures_in_a_row} rollouts in a row failed, the last one: {error}")

    def _count_cut_off(self, is_cut: bool, error: str) -> None:
        """Count a response, and say whether the first ones end by themselves. The trainer never sees masked ones."""
        self.trajectories += not error
        self._cut_off += is_cut
        if self.trajectories == _FIRST_RESPONSES and not error and 2 * self._cut_off > _FIRST_RESPONSES:
            reason = f"{self._cut_off} of the first {_FIRST_RESPONSES} reached the length limit without an end token"
            log.warning("responses do not end", reason=reason, remedy="raise search.max_tokens, or set search.stop")

    def _finish(self, response: Response, scored: Scored) -> None:
        """Add the row of a response to its group."""
        group, generation = response.group, response.generation
        count = len(generation.response_ids)
        cut_after = count if generation.stop_reason == STOP_LENGTH else 0
        self._count_cut_off(cut_after > 0, response.error)
        self.tokens += count
        tokens = one_turn(
            group.prompt_ids, generation.response_ids, generation.logprobs, generation.version_runs, generation.kept,
            response.prefix,
        )  # fmt: skip
        self._add(group, response.sampling, scored, tokens, generation.stop_reason, generation.seconds, cut_after)

    def _finish_episode(self, episode: Episode) -> None:
        """Add the row of an episode to its group."""
        group, sampling = self._played.pop(episode.ticket)
        reward = Reward(episode.reward, {} if episode.error else episode.parts)
        scored = Scored(episode.ticket, None, reward, episode.error, error_kind=episode.error_kind)
        if episode.error is not None:
            log.warning("episode failed", prompt=group.prompt.key, reason=episode.error, turns=len(episode.turns))
        self._count_failure(episode.error or "" if episode.error_kind == "generation" else "")
        tokens = episode.tokens()
        self.trajectories += 1
        self.tokens += int(tokens.loss_mask.sum())
        if episode.error_kind != "decoding":
            scored = replace(scored, text=self.stopping.whole_text(tokens.response_ids.tolist()))
        cut_after = episode.length if episode.stop_reason in CUT_OFF else 0
        seconds = float(sum(turn.details["seconds"] for turn in episode.turns))
        self._add(group, sampling, scored, tokens, episode.stop_reason, seconds, cut_after)

    def _add(
        self, group: Group, sampling: SamplingSettings, scored: Scored, tokens: EpisodeTokens, stop: str,
        seconds: float, cut_after: int,
    ) -> None:  # fmt: skip
        """Add a row to a group, which may be complete then. `cut_after` is its tokens if it was cut off, else 0."""
        # All rewards of a group are of the phase in which its visit began.
        phase = next((n for n, one in enumerate(self.phases) if group.version < one.until), None)
        # What is cut off may lack the parts that the phase weighs, and has the reward of `task.truncated`.
        if cut_after and scored.error is None and self.truncated != "score":
            scored = self._cut(scored, cut_after)
        elif phase is not None:
            scored = phased(scored, self.phases[phase].weights)
        self.errors += scored.error is not None and scored.error_kind != "masked"
        if tokens.kept.nbytes > MAX_REQUEST_FRAME_BYTES // group.size:
            self._warn_of_kept(tokens.kept.nbytes)
            tokens = tokens._replace(kept=_NO_TOKENS)
        given = None if group.prefix is None else len(group.prefix)
        more = {"guided": given, "phase": phase}
        row = Trajectory(
            prompt_key=group.prompt.key,
            lease=group.visit.lease,
            **tokens._asdict(),
            reward=scored.reward.total,
            reward_parts=scored.reward.parts,
            stop_reason=stop,
            sampling=sampling.recorded() | {name: value for name, value in more.items() if value is not None},
            created_at=time.time(),
            generation_seconds=seconds,
            text=scored.text,
            error=scored.error and scored.error[:_ERROR_CHARACTERS],
            error_kind=scored.error_kind,
            metadata=group.metadata,
        )
        group.done.append(row)
        is_whole = len(group.done) == group.size
        # Only a group of responses has a prompt of its own. Episodes are judged together.
        has_episodes = not len(group.prompt_ids)
        if self.singly and not has_episodes:
            self._complete.append(replace(group, done=[row], closes=is_whole))
        elif is_whole:
            self._complete.append(_usable(group) if has_episodes else group)

    def _warn_of_kept(self, size: int) -> None:
        """Log once that a row has more kept tokens than a message has room for: its ratios are not known."""
        if not self._warned:
            self._warned = True
            reason = f"top-p and min-p left {size} bytes of tokens to sample from"
            log.warning("the ratios of a response are not known", reason=reason, remedy="set search.top_k, or lower it")

    def _cut(self, scored: Scored, tokens: int) -> Scored:
        """Apply `task.truncated` to a response that was cut off. A row with an error is stored and not trained on."""
        if self.truncated == "mask":
            reason = f'not trained on: cut off after {tokens} tokens, and task.truncated is "mask"'
            return replace(scored, error=reason, error_kind="masked")
        assert self.truncated != "score"
        return replace(scored, reward=Reward(self.truncated, scored.reward.parts))


def _usable(group: Group) -> Group:
    """Return a group of episodes; if fewer than three quarters of its rows are good, with an error in these too.

    The mean over a group that is left of so few is a baseline of the episodes that happened to survive.
    """
    good = sum(row.error is None or row.error_kind == "masked" for row in group.done)
    if good >= math.ceil(_LEAST_GOOD * group.size):
        return group
    reason = f"not trained on: {group.size - good} of the {group.size} episodes of its group failed"
    group.done = [row if row.error else replace(row, error=reason, error_kind="group") for row in group.done]
    return group


@dataclass(slots=True)
class Pipeline:
    """The stages in a row. The leases of all groups that are in them are held."""

    generation: GenerationStage
    scoring: ScoringStage
    delivery: Delivery
    _leases: set[int] = field(default_factory=set)
    # Monotonic time since which generation pauses.
    _paused_at: float | None = None

    @property
    def generating(self) -> bool:
        return self.generation.waiting > 0

    @property
    def leases(self) -> set[int]:
        """The leases of the groups that the buffer has not acknowledged."""
        return {*self._leases, *self.delivery.leases}

    def submit(self, visits: Iterable[Visit]) -> None:
        for visit in visits:
            if visit.lease != NO_VISIT:
                self._leases.add(visit.lease)
            for episode in self.generation.submit(visit):
                self.scoring.play(*episode)

    def step(self, *, generate: bool, wait_seconds: float) -> None:
        """Move everything that is ready to its next stage. Waits at most `wait_seconds` for the first score.

        Without `generate` the engine is not stepped, and the later stages continue.
        """
        now = time.monotonic()
        if self._paused_at is not None:
            self.scoring.episodes.paused_seconds += now - self._paused_at
        self._paused_at = None if generate or not self.generating else now
        for response in self.generation.done() if generate else ():
            self.scoring.submit(response)
        for group in self.scoring.done(wait_seconds):
            if group.closes:
                self._leases.discard(group.visit.lease)
            self.delivery.submit(group.done, group.visit.lease, closes=group.closes)
