"""[buffer] and [curriculum]: the replay buffer, and the order of prompts in an epoch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.common.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    matching,
)


class BufferSection(Section):
    """The replay buffer: address, durability, limits, and sampling."""

    address: Annotated[
        str, matching(r"auto|tcp://\S+:(\d+|\*)|ipc://\S(.*\S)?", "auto, tcp://HOST:PORT or ipc://PATH")
    ] = "auto"
    """ZeroMQ endpoint of the buffer: tcp://HOST:PORT, on all interfaces if HOST is its own machine, or ipc://PATH for
    one machine. auto is a socket file in run.dir for this user alone (in /dev/shm if the path is too long)."""
    database: Path | None = None
    """SQLite file; by default `buffer.sqlite` in run.dir."""
    durability: Literal["power", "process"] = "power"
    """What an acknowledged write survives: a power cut, or a crash."""
    queue_mib: Positive = 256
    """Maximum MiB of requests that wait for a transaction. At the limit producers wait."""
    min_free_mib: NonNegative = 128
    """Free disk space, in MiB, below which trajectories are refused; 0: never."""
    lease_seconds: PositiveFloat = 120.0
    """After this many seconds of silence the prompts of a searcher go to others."""
    recency_fraction: Fraction = 0.95
    """m: the probability that a group is drawn from recent data, not by priority."""
    recency_window: NonNegative | Literal["auto"] = "auto"
    """Data of at most this staleness, in optimiser steps, is recent; without any, the newest comes first, in tiers of
    age. auto: that of the newest data plus train.publish_every."""
    prompt_priority: Literal["uniform", "recency", "softmax", "rank"] = "uniform"
    """The priority rule across prompts. uniform: all equal; recency: those with recent untrained data, then with recent
    data, then in tiers of age; softmax: by inverse_temperature x score, the mean reward; rank: by 1 / the rank of the
    score."""
    trajectory_priority: Literal["uniform", "recency", "softmax", "rank"] = "softmax"
    """The priority rule within a prompt. uniform: all equal; recency: the recent, else the newest tier of age; softmax:
    by inverse_temperature x reward; rank: by 1 / the rank of the reward."""
    inverse_temperature: NonNegativeFloat = 0.0
    """softmax: the probability is proportional to exp(inverse_temperature x reward); 0 is uniform."""
    flat_group_weight: Fraction = 1.0
    """Factor on the probability of a prompt whose sampleable rewards are all equal, or that has only one; 0 draws it
    only for want of others. With `prompt_priority = "rank"` any value below 1 puts it last."""
    varied_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Least share of the prompts, those whose sampleable rewards vary most, that are drawn before others of the same
    age, as RAGEN (2504.20073) does; 1: all alike."""
    replacement: Literal["if_needed", "never", "always"] = "if_needed"
    """Whether a group may contain a trajectory twice. if_needed: with fewer than train.samples_per_prompt; never: such
    a prompt is not sampled."""
    max_staleness: NonNegative | Literal["unbounded"] = "unbounded"
    """Maximum optimiser steps from the policy that sampled to the step that trains; 0 is synchronous."""
    min_fill: NonNegative = 0
    """Trajectories that must be sampleable before the first step."""
    samples_per_insert: PositiveFloat | Literal["unbounded"] = "unbounded"
    """How often a trajectory is trained on, on average: at this the trainer waits, and searchers that are ahead by more
    than `samples_per_insert_slack`."""
    samples_per_insert_slack: Positive | Literal["auto"] = "auto"
    """Trajectories that searchers may be ahead; auto is twice the minimum. If few responses are much longer than the
    others, set four batches (docs/evidence.md)."""
    prompt_cap: Positive = 100
    """Maximum sampleable trajectories per prompt; the others stay in history."""
    prompt_keep: Literal["newest", "best", "reservoir"] = "newest"
    """Which trajectories of a prompt stay sampleable at prompt_cap: the newest, the best, or a uniform sample."""
    max_trajectories: Positive | Literal["unbounded"] = "unbounded"
    """Maximum sampleable trajectories; `keep` says which leave, into history."""
    keep: Literal["newest", "reservoir", "both"] = "newest"
    """Which trajectories of the run stay sampleable at max_trajectories. newest; reservoir: a uniform sample of the
    whole history, in which fresh data becomes rare; both: half of each. The responses of a prompt at one optimiser step
    stay together."""
    max_payload_bytes: Positive | Literal["unbounded"] = "unbounded"
    """Maximum bytes of tokens (ids, log-probabilities, masks) of sampleable trajectories; the oldest leave."""
    dedup: bool = True
    """Sample only the newest of identical responses to a prompt; false where they are short and repeat."""

    @model_validator(mode="after")
    def _check_keep(self) -> Self:
        if self.keep == "newest":
            return self
        what = f'buffer.keep = "{self.keep}"'
        if self.max_trajectories == "unbounded":
            raise ValueError(f"{what} is about what leaves at buffer.max_trajectories: set that to a number")
        if self.max_payload_bytes != "unbounded":
            raise ValueError(
                f"{what} samples trajectories alike, and a limit in bytes would prefer short ones: remove "
                "buffer.max_payload_bytes, and set buffer.max_trajectories alone"
            )
        if self.keep == "reservoir" and self.max_staleness != "unbounded":
            raise ValueError(
                f"{what} runs out of data within buffer.max_staleness = {self.max_staleness}: ever fewer of the sample "
                'are fresh. Set buffer.keep = "both"'
            )
        return self


class CurriculumSection(Section):
    """Which prompts an epoch skips, postpones or leases first, by their newest answers (docs/tasks.md)."""

    solved: Annotated[float, Field(gt=0, le=1)] | Literal["off"] = "off"
    """Pass rate, such as 0.95, from which on epochs skip a prompt. off skips none."""
    unsolved_last: bool = False
    """Whether prompts whose newest answers all failed come at the end of an epoch."""
    answers: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Newest answers of which a pass rate is; a prompt with fewer keeps its place."""
    pass_reward: float = 1.0
    """Reward from which on an answer passes."""
    revisit_every: Annotated[int, Field(ge=2)] = 4
    """A solved prompt is visited in one of this many epochs, so that forgetting is noticed."""
    longest_first: bool = False
    """Whether, of `train.prompts_per_step` prompts, those whose newest responses are longest are leased first."""

    @property
    def is_on(self) -> bool:
        """Whether an epoch may skip or postpone prompts."""
        return self.solved != "off" or self.unsolved_last
