"""What keeps searchers from filling the batch that the trainer waits for."""

from collections.abc import Callable, Sequence

from tba.common.quantity import lasting, quantity
from tba.common.stall.facts import (
    LOADING_SECONDS,
    RESTART_SECONDS,
    WAIT_SECONDS,
    Facts,
    Stall,
    all_idle,
    are,
    every_searcher,
    is_silent,
    live_trainer,
    living,
    total,
    waits,
    who,
)
from tba.common.wire.status_messages import ClientStatus, Status

# Searchers are at work, and nothing arrives: longer than most responses take.
_NO_DATA_SECONDS = 900.0
# Rows arrive, and the batch that the trainer waits for does not come closer.
_FRUITLESS_SECONDS = 60.0
# What to do if a key of [buffer] keeps rows from a batch.
_REMEDIES = {
    "dedup": "set buffer.dedup = false, raise search.temperature or lower buffer.min_fill",
    "prompt_cap": "raise buffer.prompt_cap or lower buffer.min_fill",
    "max_trajectories": "raise buffer.max_trajectories",
    "max_payload_bytes": "raise buffer.max_payload_bytes",
}
# A transaction takes milliseconds.
_SLOW_COMMIT_SECONDS = 2.0
_CHECK_PATH = "check how they get there: search.weights_from, the network, the space in search.weights_dir"

# ---------------------------------------------------------------- weights


def without_weights(_: Facts, status: Status) -> Stall | None:
    """No searcher can serve the newest weights, or any."""
    searchers = [client for client in living(status) if not is_silent(client)]
    refusing = _refusing(status, searchers)
    if refusing and len(refusing) == len(searchers):
        return _refused_weights(refusing, len(searchers))
    without = [client for client in searchers if client.weights_version is None]
    if not without or len(without) < len(searchers):
        return None
    longest = min(client.activity_seconds for client in without)
    is_due = _first_snapshot_due(status)
    if longest < (LOADING_SECONDS if status.newest_version is None or is_due else RESTART_SECONDS):
        return None
    if is_due:
        return _without_first_snapshot(without, status)
    if status.newest_version is None:
        what = f"the trainer has published no weights in {lasting(longest)}: read its log"
    else:
        published = f"weights v{status.newest_version} are published"
        what = f"{published}, and no searcher has them: {without[0].reason}; {_CHECK_PATH}"
    return Stall("weights_missing", f"{are(without, status)} waiting for weights; {what}")


def _earlier_version(status: Status) -> int:
    """Return the newest version of an earlier start of the trainer, whose files may be gone; -1 if there is none."""
    trainer = live_trainer(status)
    published = None if trainer is None else trainer.weights_version
    if status.earlier_version is None:
        return -1
    # A server that was restarted does not know that the trainer had announced it.
    is_own = published is not None and published <= status.earlier_version
    return -1 if is_own else status.earlier_version


def _first_snapshot_due(status: Status) -> bool:
    """Whether the newest snapshot is of an earlier start of the trainer."""
    return status.newest_version is not None and status.newest_version <= _earlier_version(status)


def _without_first_snapshot(searchers: Sequence[ClientStatus], status: Status) -> Stall:
    return Stall(
        "weights_missing",
        f"{are(searchers, status)} waiting for the first snapshot since the trainer's start: read its log if it does "
        f"not come; v{status.newest_version} is of an earlier start: {searchers[0].reason}",
    )


def _refusing(status: Status, searchers: Sequence[ClientStatus]) -> list[ClientStatus]:
    """Return the searchers that refuse a snapshot of this start of the trainer."""
    earlier = _earlier_version(status)
    return [client for client in searchers if client.metrics.get("refused_version", -1) > earlier]


def _refused_weights(refusing: Sequence[ClientStatus], count: int) -> Stall:
    version = max(int(client.metrics["refused_version"]) for client in refusing)
    return Stall(
        "weights_refused",
        f"weights: snapshot {version} refused by {len(refusing)} of {quantity(count, 'searcher')}: "
        f"{refusing[0].reason}; compare the model and the package versions of both sides",
    )


def unpublished(trainer: ClientStatus) -> Stall:
    """Return the stall of a trainer that does not get its weights published."""
    slow = "the disk of run.dir or search.weights_dir is slow or does not answer: check it"
    why = f"{trainer.reason}; free some space" if trainer.reason else slow
    return Stall(
        "publication",
        f"the trainer on {trainer.host} has not published its weights for {lasting(trainer.activity_seconds)}: {why}",
    )


# ---------------------------------------------------------------- what a batch lacks


def starving(facts: Facts, status: Status) -> Stall | None:
    """The trainer waits for a batch: name what keeps the searchers from filling it."""
    # One that has left does not wait any more, also while the others are being stopped.
    if not waits(status) or live_trainer(status) is None:
        return None
    searchers = living(status)
    for culprit in _CULPRITS:
        if (stall := culprit(facts, status, searchers)) is not None:
            return Stall(stall.reason, f"the trainer waits: {status.trainer_waits_for}; {stall.sentence}")
    return None


def _without_searchers(facts: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    if searchers:
        return None
    left = [client for client in status.clients if client.role == "searcher"]
    # Without one since the server's start they may still load their model.
    is_loading = "searcher" in facts.loading or not left
    if status.trainer_waits_seconds < (LOADING_SECONDS if is_loading else WAIT_SECONDS):
        return None
    what = f"{every_searcher(len(left))} left" if left else "no searcher is connected"
    return Stall("no_searcher", f"{what}: start them with `tba search`, or read their logs")


def _silent_searchers(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    silent = sorted(filter(is_silent, searchers), key=lambda client: -client.leases)
    if not silent:
        return None
    held = sum(client.leases for client in silent)
    leases = f" and holds {quantity(held, 'prompt')}, which others get after buffer.lease_seconds" if held else ""
    have = "has" if len(silent) == 1 else "have"
    return Stall(
        "searcher_silent",
        f"{who(silent, status)} {have} been silent for {lasting(silent[0].silent_seconds)}{leases}: check that "
        "the process is alive and its network works, or start it again",
    )


def _refusing_searchers(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    refusing = _refusing(status, searchers)
    return _refused_weights(refusing, len(searchers)) if refusing else None


def _old_weights(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """Searchers wait for newer weights, which are not published or do not arrive."""
    newest = status.newest_version
    if not all_idle(searchers):
        return None
    trainer = live_trainer(status)
    if trainer is not None and trainer.activity == "publishing" and trainer.reason:
        return unpublished(trainer)
    behind = [client for client in searchers if newest is not None and client.weights_version != newest]
    if len(behind) < len(searchers):
        return None
    if _first_snapshot_due(status):
        return _without_first_snapshot(behind, status)
    versions = ", ".join(sorted({_version(client) for client in behind}))
    return Stall(
        "weights_old",
        f"{are(behind, status)} at {versions} and v{newest} is published: {behind[0].reason}; {_CHECK_PATH}",
    )


def _only_errors(_: Facts, status: Status, __: Sequence[ClientStatus]) -> Stall | None:
    arrived, errors = status.rows_since_step, status.errors_since_step
    if not errors or 2 * errors < arrived:
        return None
    most = f", most often: {status.common_error}" if status.common_error else ""
    remedy = "correct what fails: `tba task check` runs the reward function by itself"
    if status.common_error.startswith("not trained on: cut off"):
        remedy = "raise search.max_tokens, or set another task.truncated"
    return Stall(
        "only_errors",
        f"{errors} of {quantity(arrived, 'trajectory', 'trajectories')} since the last step have an error{most}; "
        f"{remedy}",
    )


def _paused(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    paused = [client for client in searchers if client.metrics.get("paused")]
    if not paused:
        return None
    return Stall("spool", f"{are(paused, status)} paused: {paused[0].reason}{_why_slow(status)}")


def _scoring(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """All searchers wait for the same stage after generation."""
    if not all_idle(searchers):
        return None
    if waiting := round(total(searchers, "rewards_waiting")):
        slowest = max(client.metrics.get("reward_seconds", 0.0) for client in searchers)
        timeouts = quantity(round(total(searchers, "reward_timeouts")), "timeout")
        return Stall(
            "rewards",
            f"{are(searchers, status)} waiting for {quantity(waiting, 'reward')}; the last one came after "
            f"{lasting(slowest)}, queue included, with {timeouts}: the reward function is slow or hangs; raise "
            "task.reward_workers or lower task.reward_seconds",
        )
    if waiting := round(total(searchers, "references_waiting")):
        return Stall(
            "references",
            f"{are(searchers, status)} waiting for the reference log-probabilities of {quantity(waiting, 'response')}: "
            "set search.reference_logprobs = false, so that the trainer computes them",
        )
    if waiting := round(total(searchers, "unacknowledged_groups")):
        return Stall(
            "unacknowledged",
            f"the buffer has not acknowledged {quantity(waiting, 'group')} of {who(searchers, status)}"
            f"{_why_slow(status)}",
        )
    return None


def _limited(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """Both sides wait for each other."""
    if not all_idle(searchers):
        return None
    return Stall(
        "limits",
        f"{are(searchers, status)} waiting: {searchers[0].reason}; trainer and searchers wait for each other: raise "
        "buffer.max_staleness or lower train.prompts_per_step; if that does not help, report it with the output of "
        "`tba status --json`",
    )


def _no_growth(_: Facts, status: Status, __: Sequence[ClientStatus]) -> Stall | None:
    """Rows arrive, and what the batch needs does not grow: limits, duplicates or errors take them away."""
    if status.fruitless_seconds < _FRUITLESS_SECONDS or not status.fruitless_rows:
        return None
    causes = sorted(status.left_sampling, key=lambda key: -status.left_sampling[key])
    left = [f"{status.left_sampling[key]} left sampling by buffer.{key}" for key in causes]
    errors = f"{status.errors_since_step} have an error" if status.errors_since_step else ""
    why = ", ".join(filter(None, [*left, errors])) or "none of them is of use for it"
    remedy = _REMEDIES.get(causes[0] if causes else "", "lower train.prompts_per_step or buffer.min_fill")
    arrived = quantity(status.fruitless_rows, "trajectory", "trajectories")
    return Stall(
        "no_growth",
        f"{arrived} arrived in {lasting(status.fruitless_seconds)}, and what the batch needs has not grown: {why}; "
        f"{remedy}",
    )


def _nothing_arrives(_: Facts, status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    if min(status.last_put_seconds, status.trainer_waits_seconds) < _NO_DATA_SECONDS:
        return None
    in_flight = round(total(searchers, "in_flight"))
    return Stall(
        "no_data",
        f"{are(searchers, status)} generating {quantity(in_flight, 'response')}, and none has arrived for "
        f"{lasting(status.last_put_seconds)}: lower search.max_tokens or search.samples_per_prompt, or check "
        "whether the engines hang",
    )


_CULPRITS: tuple[Callable[[Facts, Status, Sequence[ClientStatus]], Stall | None], ...] = (
    _without_searchers,
    _silent_searchers,
    _refusing_searchers,
    _paused,
    _only_errors,
    _scoring,
    _old_weights,
    _limited,
    _no_growth,
    _nothing_arrives,
)


def _version(client: ClientStatus) -> str:
    return "no weights" if client.weights_version is None else f"v{client.weights_version}"


def _why_slow(status: Status) -> str:
    """Return why the buffer does not acknowledge what searchers send, and what to do."""
    if status.commit_seconds < _SLOW_COMMIT_SECONDS:
        return "; check the network between them and the log of the buffer"
    return (
        f"; a transaction of the buffer takes {status.commit_seconds:.1f} s: its disk is slow or busy, put "
        "buffer.database on a faster one"
    )
