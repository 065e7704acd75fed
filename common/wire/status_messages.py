"""Messages of `tba status` and of the display of `tba run`: what the buffer knows of itself and of its clients."""

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct, field

from tba.common.wire.fields import MAX_CLIENTS, Id, Metrics, Name, Role, Seconds, Sentence
from tba.common.wire.messages import Message

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
    "references",
    "unacknowledged",
    "limits",
    "no_growth",
    "no_data",
]
STALL_REASONS: tuple[StallReason, ...] = get_args(StallReason)


class Stall(Struct, frozen=True):
    """Why a run stands still: a reason for machines and a sentence for people, printable on a terminal."""

    reason: StallReason
    sentence: Sentence


class GetStatus(Message, frozen=True):
    """Monitor -> buffer, at any time. Reply: Status."""

    TYPE = "get_status"


class ClientStatus(Message, frozen=True):
    """One client of the buffer in `tba status`. `trajectories` and `duplicates` are rows since the server started.

    `activity_seconds`: how long it has been in this activity. `warning`: what is wrong with the training, if this is
    the trainer.
    """

    role: Role
    sender: Name
    host: str
    silent_seconds: Seconds
    activity: str
    reason: str
    weights_version: Id | None
    metrics: Metrics
    trajectories: Id
    duplicates: Id
    leases: Id
    activity_seconds: Seconds = 0.0
    warning: str = ""


class Status(Message, frozen=True):
    """Reply to GetStatus. `step` counts reported optimiser steps; `queued_bytes` wait for a transaction;
    `commit_seconds` is the mean duration of the last transactions, including the work of their handlers.
    `batches_without_recent_data` counts those since the server started; `no_recent_data` is a sentence if the last
    batch was one.

    `stall` is why the run stands still, None while it moves; the other fields after `clients` are what it was found
    from. `stalled_seconds` is how long the run has stood still, 0
    while it moves, and `trainer_waits_seconds` how long the trainer has waited for a batch; `last_step_seconds` and
    `last_put_seconds` are the time since a step was reported and since a row was stored, or since the server started;
    `usual_step_seconds` is the mean time between the last steps, 0 if unknown. `newest_version` is the newest
    announced snapshot; `earlier_version` was the newest one when the trainer, or the server, started.
    `refuses_puts` is a sentence if trajectories cannot be stored now; `free_bytes` of `disk_bytes`
    are free on the disk of the database. `rows_since_step` arrived since the last step was reported,
    `errors_since_step` of them with an error; `common_error` is the most frequent of the last 1,000 errors since the
    server started. `fruitless_rows` arrived in `fruitless_seconds`, while the trainer waited, without more of what
    its batch needs; `left_sampling` counts those that left sampling since, by key of [buffer]. `skipped_prompts` and
    `postponed_prompts` are those of the epoch, by the curriculum.
    """

    TYPE = "status"
    run_name: Name
    step: Id
    finished: bool
    uptime_seconds: Seconds
    epoch: Id
    prompts: Id
    trajectories: Id
    errors: Id
    duplicates: Id
    sampleable: Id
    puts_per_second: Seconds
    database_bytes: Id
    queued_bytes: Id
    commit_seconds: Seconds
    rejected: dict[str, int]
    trainer_waits_for: str
    batches_without_recent_data: Id
    no_recent_data: str
    clients: Annotated[list[ClientStatus], Meta(max_length=MAX_CLIENTS)]
    stall: Stall | None = None
    stalled_seconds: Seconds = 0.0
    newest_version: Id | None = None
    earlier_version: Id | None = None
    trainer_waits_seconds: Seconds = 0.0
    last_step_seconds: Seconds = 0.0
    usual_step_seconds: Seconds = 0.0
    last_put_seconds: Seconds = 0.0
    refuses_puts: str = ""
    disk_bytes: Id = 0
    free_bytes: Id = 0
    rows_since_step: Id = 0
    errors_since_step: Id = 0
    common_error: str = ""
    fruitless_seconds: Seconds = 0.0
    fruitless_rows: Id = 0
    left_sampling: dict[str, int] = field(default_factory=dict)
    skipped_prompts: Id = 0
    postponed_prompts: Id = 0
