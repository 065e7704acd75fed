"""Find why a run stands still.

    facts ──► the buffer, its disk ──► failing processes ──► the trainer ──► what its batch lacks: the searchers

The first rule that applies wins: each looks for a cause that explains those after it. A wait is a stall only if nothing
resolves it: a trainer that waits for searchers at work is healthy, and so are searchers that are ahead of the trainer.
"""

from dataclasses import replace

from tba.common.quantity import lasting
from tba.common.stall.facts import (
    LOADING_SECONDS,
    RESTART_SECONDS,
    SILENT_SECONDS,
    Facts,
    Stall,
    are,
    at_work,
    enumerated,
    last_trainer,
    live_trainer,
    living,
    waits,
)
from tba.common.stall.starvation import starving, unpublished, without_weights
from tba.common.terminal import printable
from tba.common.wire.status_messages import Status

# A step that takes this many times as long as usual, and at least so long, hangs; so does a first step.
_STEP_FACTOR = 10.0
_STEP_SECONDS = 120.0
_FIRST_STEP_SECONDS = 1800.0
_PUBLISH_SECONDS = 60.0
_SAVE_SECONDS = 600.0
_SENTENCE_CHARACTERS = 2000
# A supervisor that has been silent for longer is gone, and its report with it.
_REPORT_SECONDS = 60.0
_READ_LOGS = "; correct what the error names, and read the logs in run.dir/logs for more"


def find_stall(facts: Facts) -> Stall | None:
    """Return why the run stands still, None if it does not, has finished, or has only begun to wait."""
    stall = _stall(facts)
    # Names and reasons come from the network.
    return stall and replace(stall, sentence=printable(stall.sentence[:_SENTENCE_CHARACTERS]))


def _stall(facts: Facts) -> Stall | None:
    status = facts.status
    if status is None:
        return _without_buffer(facts)
    if status.finished:
        return None
    for rule in (_refused_puts, _failing, _no_trainer, _trainer_at_work, without_weights, starving):
        if (stall := rule(facts, status)) is not None:
            return stall
    return None


# ---------------------------------------------------------------- the buffer


def _without_buffer(facts: Facts) -> Stall | None:
    if facts.failing:
        return Stall("process_fails", f"{'; '.join(facts.failing)}{_READ_LOGS}")
    if facts.unanswered_seconds < SILENT_SECONDS:
        return None
    return Stall(
        "buffer_silent",
        f"the buffer at {facts.address} has not answered for {lasting(facts.unanswered_seconds)}: searchers write to "
        "their spools and the trainer waits; read the buffer's log, and start it again with `tba buffer serve`",
    )


def _refused_puts(_: Facts, status: Status) -> Stall | None:
    if not status.refuses_puts:
        return None
    paused = [client for client in living(status) if client.metrics.get("paused")]
    pausing = f"{are(paused, status)} paused: {paused[0].reason}; " if paused else ""
    free = f"{status.free_bytes / status.disk_bytes:.0%} of its disk is free: " if status.disk_bytes else ""
    return Stall("buffer_refuses", f"{pausing}the buffer refuses puts: {free}{status.refuses_puts}")


# ---------------------------------------------------------------- processes


def _failing(facts: Facts, status: Status) -> Stall | None:
    """A supervisor says that processes fail, and what they do is not done by others."""
    supervisors = [client for client in status.clients if client.role == "monitor" and client.activity == "failing"]
    reports = [client.reason for client in supervisors if client.silent_seconds < _REPORT_SECONDS]
    # A supervisor's own sentences are newer than those it has reported.
    failing = list(facts.failing or dict.fromkeys(reports))
    others = live_trainer(status) is not None and any(map(at_work, living(status)))
    if not failing or (others and not waits(status)):
        return None
    waiting = f"the trainer waits: {status.trainer_waits_for}; " if status.trainer_waits_for else ""
    return Stall("process_fails", f"{waiting}{enumerated(failing)}{_READ_LOGS}")


def _no_trainer(facts: Facts, status: Status) -> Stall | None:
    last = last_trainer(status)
    if last is None or last.activity == "gone":
        since = min(status.uptime_seconds, last.activity_seconds if last else status.uptime_seconds)
        # Without one since the server's start it may still load its model.
        patience = LOADING_SECONDS if "trainer" in facts.loading or last is None else RESTART_SECONDS
        if since < patience:
            return None
        how = "`tba train --resume`" if status.step else "`tba train`"
        left = f"the trainer on {last.host} left {lasting(since)} ago, after step {status.step}" if last else ""
        which = left or f"no trainer has connected for {lasting(since)}"
        return Stall("no_trainer", f"{which}: start it with {how}, or read its log")
    if last.silent_seconds > SILENT_SECONDS:
        return Stall(
            "trainer_silent",
            f"the trainer on {last.host} has been silent for {lasting(last.silent_seconds)}: it was killed, suspended "
            "or cut off from the buffer; start it again with `tba train --resume`",
        )
    return None


def _trainer_at_work(_: Facts, status: Status) -> Stall | None:
    """The trainer does one thing for too long."""
    trainer = live_trainer(status)
    if trainer is None or status.trainer_waits_for:
        return None
    since = min(trainer.activity_seconds, status.last_step_seconds)
    usual = status.usual_step_seconds
    if trainer.activity == "training" and since > (
        max(_STEP_SECONDS, _STEP_FACTOR * usual) if usual else _FIRST_STEP_SECONDS
    ):
        compared = f", and the last ones took {lasting(usual)} each" if usual else ""
        return Stall(
            "trainer_hangs",
            f"the trainer on {trainer.host} has been at work on step {status.step} for {lasting(since)}{compared}: "
            "it may hang; inspect it with `py-spy dump`, or end it and start it again with `tba train --resume`",
        )
    if trainer.activity == "publishing" and trainer.activity_seconds > _PUBLISH_SECONDS:
        return unpublished(trainer)
    if trainer.activity == "saving" and trainer.activity_seconds > _SAVE_SECONDS:
        return Stall(
            "checkpoint",
            f"the trainer on {trainer.host} has been saving a checkpoint for {lasting(trainer.activity_seconds)}: the "
            "disk of run.dir is slow or does not answer: check it, or save less often (train.checkpoint_every)",
        )
    return None
