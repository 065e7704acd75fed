"""[buffer] and [curriculum]: the replay buffer, and which prompts an epoch skips or postpones."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.common.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class BufferSection(Section):
    """The replay buffer: address, durability, limits, and sampling."""

    address: Annotated[str, Field(pattern=r"^(auto|tcp://\S+:(\d+|\*)|ipc://\S(.*\S)?)$")] = "auto"
    """ZeroMQ endpoint that the buffer binds and all clients connect to: tcp://HOST:PORT, or ipc://PATH for one machine.
    At the host name of its own machine the buffer listens on all interfaces. auto is a socket file in run.dir that only
    this user can connect to (in /dev/shm if the path is too long)."""
    database: Path | None = None
    """SQLite file; by default `buffer.sqlite` in run.dir."""
    durability: Literal["power", "process"] = "power"
    """What an acknowledged write survives: a power cut (synchronous=FULL) or a crash of the process."""
    queue_mib: Positive = 256
    """Maximum size of the requests that wait for a transaction, in MiB. At the limit producers wait."""
    min_free_mib: NonNegative = 128
    """Free disk space, in MiB, below which new trajectories are refused; 0 never refuses."""
    lease_seconds: PositiveFloat = 120.0
    """A searcher that is silent for this many seconds loses its leases, and its prompts go to other searchers."""
    recency_fraction: Fraction = 0.95
    """m: the probability that a group is drawn from recent data. Otherwise it is drawn by priority."""
    recency_window: NonNegative | Literal["auto"] = "auto"
    """Data with at most this staleness, in optimiser steps, is recent; if none is, the newest comes first, in tiers of
    age. auto: the age of the newest sampleable data plus train.publish_every."""
    prompt_priority: Literal["uniform", "recency", "softmax", "rank"] = "uniform"
    """The priority rule across prompts. uniform: all equal; recency: those with recent data that was never trained on,
    then with recent data, then older ones in tiers of age; softmax: by inverse_temperature x score, the mean reward of
    the sampleable trajectories; rank: by 1 / the rank of the score."""
    trajectory_priority: Literal["uniform", "recency", "softmax", "rank"] = "softmax"
    """The priority rule within a prompt. uniform: all equal; recency: the recent ones, else those of the newest tier of
    age; softmax: by inverse_temperature x reward; rank: by 1 / the rank of the reward."""
    inverse_temperature: NonNegativeFloat = 0.0
    """softmax: the probability is proportional to exp(inverse_temperature x reward); 0 is uniform."""
    flat_group_weight: Fraction = 1.0
    """Factor on the probability of a prompt whose sampleable rewards are all equal, or that has only one; 0 draws it
    only if there is no other of the same recency. `prompt_priority = "rank"` puts such prompts last with any value
    below 1."""
    replacement: Literal["if_needed", "never", "always"] = "if_needed"
    """Whether a group may contain a trajectory twice. if_needed: if there are fewer than train.samples_per_prompt to
    draw from; never: such a prompt is not sampled. A batch contains a prompt once, and with `search.guided` or
    `task.phases` once for each beginning and phase."""
    max_staleness: NonNegative | Literal["unbounded"] = "unbounded"
    """Maximum optimiser steps between the policy that generated and the step that trains; 0 is synchronous."""
    min_fill: NonNegative = 0
    """Number of trajectories that must be sampleable before the first step; until then searchers never wait."""
    samples_per_insert: PositiveFloat | Literal["unbounded"] = "unbounded"
    """How often a trajectory is trained on, on average. The trainer waits rather than exceed this, and so do searchers
    that are ahead by more than `samples_per_insert_slack`."""
    samples_per_insert_slack: Positive | Literal["auto"] = "auto"
    """How many trajectories searchers may be ahead of `samples_per_insert`; auto is twice the minimum. If few responses
    are much longer than the others, set four batches (docs/evidence.md)."""
    prompt_cap: Positive = 100
    """Maximum number of sampleable trajectories per prompt; the others stay in history."""
    prompt_keep: Literal["newest", "best", "reservoir"] = "newest"
    """Which trajectories of a prompt stay sampleable: the newest, those of highest reward, or a uniform sample."""
    max_trajectories: Positive | Literal["unbounded"] = "unbounded"
    """Maximum number of sampleable trajectories; `keep` says which ones leave. They stay in history."""
    keep: Literal["newest", "reservoir", "both"] = "newest"
    """Which trajectories of the run stay sampleable at max_trajectories. newest; reservoir: a uniform sample of the
    whole history, in which fresh data becomes rare; both: the newest in one half, a sample of all older ones in the
    other. A sample keeps the responses of a prompt at one optimiser step together."""
    max_payload_bytes: Positive | Literal["unbounded"] = "unbounded"
    """Maximum bytes of sampleable token ids, log-probabilities and masks; the oldest trajectories leave."""
    dedup: bool = True
    """Sample only the newest of identical responses to a prompt. Set it to false where answers are short and repeat."""

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
    """Prompts that an epoch skips or postpones, by the pass rate of their newest answers (docs/tasks.md)."""

    solved: Annotated[float, Field(gt=0, le=1)] | Literal["off"] = "off"
    """Pass rate, such as 0.95, from which on a prompt is solved: epochs skip it. off skips none."""
    unsolved_last: bool = False
    """Whether prompts of which none of the newest answers passed come at the end of an epoch."""
    answers: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Number of newest answers that the pass rate of a prompt is taken over; one with fewer keeps its place."""
    pass_reward: float = 1.0
    """Reward from which on an answer passes."""
    revisit_every: Annotated[int, Field(ge=2)] = 4
    """A solved prompt is still visited in one of this many epochs, so that forgetting is noticed."""

    @property
    def is_on(self) -> bool:
        """Whether an epoch may skip or postpone prompts."""
        return self.solved != "off" or self.unsolved_last
