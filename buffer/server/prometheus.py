"""What the buffer shows to Prometheus: the status of the run, once a second, as `tba status` has it."""

from collections import Counter

from tba.common.clock import Clock
from tba.common.prometheus import Sample
from tba.common.stall.facts import REASONS, Stall, is_silent
from tba.common.wire.fields import Role
from tba.common.wire.status_messages import ClientStatus, Status

_STATES = ("present", "silent", "gone")
# Those whose absence stops a run have a sample even if none has ever connected.
_ROLES: tuple[Role, ...] = ("searcher", "trainer")


def samples_of(status: Status, stall: Stall | None, clock: Clock) -> list[Sample]:
    """Return the samples of a status and of the stall that it shows, if any."""
    return [*_of_data(status, clock.wall()), *_of_server(status), *_of_clients(status), *_of_stall(status, stall)]


def _of_data(status: Status, now: float) -> list[Sample]:
    return [
        Sample("buffer_steps_total", status.step, "Optimiser steps that the trainer reported."),
        Sample("buffer_finished", status.finished, "1 if the run is finished."),
        Sample("buffer_epoch", status.epoch, "Epoch of the prompts that are handed out."),
        *_newest_version(status),
        Sample("buffer_prompts", status.prompts, "Prompts of the task."),
        Sample("buffer_skipped_prompts", status.skipped_prompts, "Prompts that the curriculum skips in this epoch."),
        Sample("buffer_postponed_prompts", status.postponed_prompts, "Prompts that it puts at the end of this epoch."),
        Sample("buffer_trajectories_total", status.trajectories, "Trajectories of the run."),
        Sample("buffer_failed_trajectories_total", status.errors, "Trajectories of the run with an error."),
        Sample("buffer_duplicate_trajectories_total", status.duplicates, "Trajectories that were sent again."),
        Sample("buffer_sampleable_trajectories", status.sampleable, "Trajectories that a batch may draw."),
        Sample(
            "buffer_batches_without_recent_data_total",
            status.batches_without_recent_data,
            "Batches that found no data within the recency window.",
        ),
        Sample(
            "buffer_last_step_timestamp_seconds",
            now - status.last_step_seconds,
            "When a step was last reported, or the server started.",
        ),
        Sample(
            "buffer_last_put_timestamp_seconds",
            now - status.last_put_seconds,
            "When a trajectory was last stored, or the server started.",
        ),
        Sample(
            "buffer_trainer_wait_seconds", status.trainer_waits_seconds, "How long the trainer has waited for a batch."
        ),
    ]


def _newest_version(status: Status) -> list[Sample]:
    if status.newest_version is None:
        return []
    return [Sample("buffer_newest_version", status.newest_version, "Version of the newest announced weights.")]


def _of_server(status: Status) -> list[Sample]:
    rejected = [
        Sample("buffer_rejected_requests_total", count, "Requests that got an error reply.", {"code": code})
        for code, count in status.rejected.items()
    ]
    return [
        *rejected,
        Sample("buffer_refuses_puts", bool(status.refuses_puts), "1 if trajectories cannot be stored."),
        Sample("buffer_queued_bytes", status.queued_bytes, "Size of the requests that wait for a transaction."),
        Sample("buffer_commit_seconds", status.commit_seconds, "Mean duration of the last 100 transactions."),
        Sample("buffer_database_bytes", status.database_bytes, "Size of the database."),
        Sample("buffer_disk_bytes", status.disk_bytes, "Size of the disk of the database."),
        Sample("buffer_disk_free_bytes", status.free_bytes, "Free space on the disk of the database."),
    ]


def _of_clients(status: Status) -> list[Sample]:
    counts = Counter((client.role, _state(client)) for client in status.clients)
    roles = dict.fromkeys((*_ROLES, *(client.role for client in status.clients)))
    return [
        Sample(
            "buffer_clients",
            counts[role, state],
            "Clients by role; silent: no message for 10 s; gone: it said goodbye.",
            {"role": role, "state": state},
        )
        for role in roles
        for state in _STATES
    ]


def _state(client: ClientStatus) -> str:
    if client.activity == "gone":
        return "gone"
    return "silent" if is_silent(client) else "present"


def _of_stall(status: Status, stall: Stall | None) -> list[Sample]:
    gauges = [
        Sample(
            "stalled",
            stall is not None and stall.reason == reason,
            "1 for the reason for which the run stands still (docs/operations.md).",
            {"reason": reason},
        )
        for reason in REASONS
    ]
    return [*gauges, Sample("stalled_seconds", status.stalled_seconds, "How long the run has stood still.")]
