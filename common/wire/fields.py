"""The types of message fields, and their limits: no list, map, name or text of a message is unbounded."""

import sys
from typing import Annotated, Literal, TypeVar, get_args

from msgspec import Meta

# The rows of a batch, and of a chunk of prompts.
MAX_ROWS = 1 << 16
# The rows of a put. A put is one transaction, which others wait for.
MAX_PUT_ROWS = 1 << 12
MAX_TOKENS = 1 << 24
# Of one searcher. Each request for more lists them, and may stay parked for up to a minute.
MAX_LEASES = 1 << 12
# Characters of a prompt's text: a longer one is cut, since people read it and nothing is computed from it.
MAX_PROMPT_TEXT = 1 << 16
MAX_REWARD_PARTS = 64
MAX_PHASES = 64
MAX_METRICS = 64
MAX_REASON = 1000
MAX_CLIENTS = 1024
# Of an episode, with the messages of the environment that answer one, and the characters of each. People read these.
MAX_TURNS = 1 << 10
MAX_TURN_MESSAGES = 64
MAX_TURN_TEXT = 1 << 16
# The ancestors of a node in a tree of 31.
MAX_SOURCES = 4

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
PromptText = Annotated[str, Meta(max_length=MAX_PROMPT_TEXT)]
Sentence = Annotated[str, Meta(max_length=4000)]
# A comparison with NaN is false, so the limits of a float also exclude NaN and infinity.
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
# Seconds since 1970, before the year 10000, so that every value is a valid date.
UnixTime = Annotated[float, Meta(ge=0, lt=253_402_300_800)]
LONGEST_WAIT_SECONDS = 60
Wait = Annotated[float, Meta(ge=0, le=LONGEST_WAIT_SECONDS)]
Role = Literal["searcher", "trainer", "publisher", "monitor", "importer", "evaluator"]
# The version of a trajectory that no policy of this run generated, such as an imported one.
NO_POLICY = -1
# The lease of a trajectory without a visit: imported, or generated while the buffer was unavailable.
NO_VISIT = 0
# The initial reference policy: the model at `model.path` before training.
INITIAL_REFERENCE = "initial"
LARGEST_REWARD = 1e9
PolicyVersion = Annotated[int, Meta(ge=NO_POLICY, le=(1 << 63) - 1)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
StopReason = Literal[
    "eos",
    "length",
    # Outcomes of an episode, which are trained on.
    "completed",
    "max_turns",
    "max_tokens",
    "context_overflow",
    "parse_error",
    # The row has an error and is not trained on.
    "turn_timeout",
    "episode_timeout",
    "environment_error",
    "error",
]
ERROR_STOPS = frozenset(("turn_timeout", "episode_timeout", "environment_error", "error"))
# What an error is about: each row with an error has one.
ErrorKind = Literal[
    "generation",
    "decoding",
    "reward",
    "reward_timeout",
    "worker",
    "reward_model",
    "masked",
    "environment",
    "turn_timeout",
    "episode_timeout",
    "group",
    "imported",
]
# Why a run stands still.
StallReason = Literal[
    "buffer_silent",
    "buffer_refuses",
    "process_fails",
    "no_trainer",
    "trainer_silent",
    "trainer_hangs",
    "publication",
    "checkpoint",
    "no_searcher",
    "searcher_silent",
    "weights_refused",
    "weights_missing",
    "weights_old",
    "only_errors",
    "spool",
    "rewards",
    "unacknowledged",
    "limits",
    "no_growth",
    "no_data",
]
STALL_REASONS: tuple[StallReason, ...] = get_args(StallReason)
Column = Annotated[list[T], Meta(max_length=MAX_ROWS)]
PutColumn = Annotated[list[T], Meta(max_length=MAX_PUT_ROWS)]
Temperature = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
RewardParts = Annotated[dict[Annotated[str, Meta(max_length=100)], Finite], Meta(max_length=MAX_REWARD_PARTS)]
Metrics = Annotated[dict[Annotated[str, Meta(max_length=64)], Finite], Meta(max_length=MAX_METRICS)]
