"""[buffer]: the replay buffer."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tba.common.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class BufferSection(Section):
    """The replay buffer: where it listens, how durable it is, how it samples."""

    address: Annotated[str, Field(pattern=r"^(tcp://\S+:(\d+|\*)|ipc://\S+)$")] = "tcp://127.0.0.1:5757"
    """ZeroMQ endpoint: the buffer binds it and everybody dials it (tcp://HOST:PORT or ipc://PATH)."""
    database: Path | None = None
    """SQLite file; by default `buffer.sqlite` in run.dir."""
    durability: Literal["power", "process"] = "power"
    """What an acknowledged write survives: a power cut (synchronous=FULL) or the death of the process."""
    queue_mib: Positive = 256
    """Requests that wait for a transaction, in MiB; at this limit the server reads no more, and producers wait."""
    min_free_mib: NonNegative = 128
    """Free disk space, in MiB, below which new trajectories are refused until there is more; 0 never refuses."""
    lease_seconds: PositiveFloat = 120.0
    """A searcher that is silent for so long, in seconds, loses its prompts to others."""
    recency_fraction: Fraction = 0.95
    """m: the probability that a group comes from the most recent data, else it is chosen by priority."""
    recency_fraction_final: Fraction | Literal["same"] = "same"
    """m from training step `recency_anneal_steps` on, linear in between; same keeps `recency_fraction`."""
    recency_anneal_steps: NonNegative = 0
    """Training steps over which m goes from `recency_fraction` to `recency_fraction_final`."""
    recency_window: NonNegative = 3
    """Data of at most so many optimiser steps of staleness counts as recent (the paper: 2k - 1)."""
    prompt_priority: Literal["uniform", "recency", "softmax", "rank"] = "uniform"
    """The priority rule across prompts. uniform: all alike; recency: those with recent data that no batch had yet,
    then those with recent data, then any; softmax: by inverse_temperature x score; rank: by rank_exponent and the
    rank of the score. The score of a prompt is the mean reward of its sampleable trajectories."""
    trajectory_priority: Literal["uniform", "recency", "softmax", "rank"] = "softmax"
    """The priority rule within a prompt. uniform: all alike; recency: the recent ones alike, or all if none is recent;
    softmax: by inverse_temperature x reward; rank: by rank_exponent and the rank of the reward."""
    inverse_temperature: NonNegativeFloat = 0.0
    """softmax draws with probability proportional to exp(this x reward); 0 is uniform."""
    rank_exponent: NonNegativeFloat = 1.0
    """rank draws the i-th best with probability proportional to 1 / i^this; 0 is uniform."""
    flat_group_weight: Fraction = 1.0
    """A factor on the chance of a prompt whose sampleable rewards are all equal (or whose only one it is): 1 is no
    preference, 0 takes such a prompt only when there is nothing else of the same recency. Under
    `prompt_priority = "rank"` anything below 1 ranks them behind all others."""
    replacement: Literal["if_needed", "never", "always"] = "if_needed"
    """Whether a group may hold a trajectory twice. if_needed: where a prompt has fewer than train.samples_per_prompt;
    never: such a prompt is not sampled. A prompt is at most once in a batch in any case."""
    max_staleness: NonNegative | Literal["unbounded"] = "unbounded"
    """Most optimiser steps between the policy that generated and the step that trains; 0 is synchronous."""
    min_fill: NonNegative = 0
    """Trajectories that must be sampleable before the first step."""
    samples_per_insert: PositiveFloat | Literal["unbounded"] = "unbounded"
    """How often a trajectory is trained on, on average: the trainer waits while it would be more often, and searchers
    wait while it is less often by more than `samples_per_insert_slack`."""
    samples_per_insert_slack: Positive | Literal["auto"] = "auto"
    """How many trajectories searchers may be ahead of `samples_per_insert`; auto is twice the least that works."""
    prompt_cap: Positive = 100
    """Trajectories kept for sampling per prompt; the others stay in history."""
    prompt_keep: Literal["newest", "best", "reservoir"] = "newest"
    """Which of a prompt's trajectories are kept: the newest; those with the highest reward, of equal ones the newer;
    or a uniform sample of all that came, drawn by run.seed."""
    max_trajectories: Positive | Literal["unbounded"] = "unbounded"
    """Trajectories kept for sampling in all; the oldest leave, and stay in history."""
    max_payload_bytes: Positive | Literal["unbounded"] = "unbounded"
    """Bytes of token ids, log-probabilities and masks kept for sampling in all; the oldest leave sampling."""
    dedup: bool = True
    """Sample only the newest of identical responses to a prompt; all of them stay in history."""
