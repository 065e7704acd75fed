"""Find why the run stands still: the sentence that `tba status`, the display, the pages and the alerts show.

    status ──► the disk ──► failing processes ──► the trainer ──► what its batch lacks: the searchers

The first rule that applies wins: each looks for a cause that explains those after it. A wait is a stall only if nothing
resolves it: a trainer that waits for searchers at work is healthy, and so are searchers that are ahead of the trainer.
"""

from collections.abc import Callable, Sequence

from tba.common.clock import Clock
from tba.common.errors import format_duration, quantity
from tba.common.log import get_logger
from tba.common.run_status import (
    READ_LOGS,
    REPORT_SECONDS,
    SILENT_SECONDS,
    is_silent,
    last_trainer,
    live_trainer,
    living,
    loading,
    name_of,
    total,
)
from tba.common.terminal import printable
from tba.common.wire.messages import ClientStatus, Stall, Status

log = get_logger(__name__)

# Shorter waits are normal.
_WAIT_SECONDS = 10.0
# Loading a large model, and restarting a process, may take so long.
_LOADING_SECONDS = 600.0
_RESTART_SECONDS = 60.0
# Names in a sentence.
_NAMED = 3
# A step that takes this many times as long as usual, and at least so long, hangs; so does a first step.
_STEP_FACTOR = 10.0
_STEP_SECONDS = 120.0
_FIRST_STEP_SECONDS = 1800.0
_PUBLISH_SECONDS = 60.0
_SAVE_SECONDS = 600.0
_SENTENCE_CHARACTERS = 2000
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
# A stall that passes sooner is not logged, and a pause of a stall that is shorter does not end it.
_SETTLE_SECONDS = 5.0


def find_stall(status: Status) -> Stall | None:
    """Return why the run stands still, None if it does not, has finished, or has only begun to wait."""
    if status.finished:
        return None
    for rule in (_refused_puts, _failing, _no_trainer, _trainer_at_work, _without_weights, _starving):
        if (stall := rule(status)) is not None:
            # Names and reasons come from the network.
            return Stall(stall.reason, printable(stall.sentence)[:_SENTENCE_CHARACTERS])
    return None


class StallWatch:
    """Takes the stall of each moment, None while the run moves. A stall may change its reason while it lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seen_at = 0.0
        self._logged = ""

    @property
    def seconds(self) -> float:
        """How long the run has stood still, 0 while it moves."""
        return 0.0 if self._since is None else self._clock.monotonic() - self._since

    def update(self, stall: Stall | None) -> None:
        """Take the stall of this moment. Call it about once a second."""
        now = self._clock.monotonic()
        if stall is None:
            if self._since is not None and now - self._seen_at >= _SETTLE_SECONDS:
                if self._logged:
                    log.info("the run moves again", stall=self._logged, seconds=self._seen_at - self._since)
                self._since, self._logged = None, ""
            return
        self._seen_at = now
        if self._since is None:
            self._since = now
        if now - self._since < _SETTLE_SECONDS:
            return
        if stall.reason != self._logged:
            self._logged = stall.reason
            log.warning("the run stands still", stall=stall.reason, reason=stall.sentence)


# ---------------------------------------------------------------- the buffer and the processes


def _refused_puts(status: Status) -> Stall | None:
    if not status.refuses_puts:
        return None
    paused = [client for client in living(status) if client.metrics.get("paused")]
    pausing = f"{_names_with_verb(paused, status)} paused: {paused[0].reason}; " if paused else ""
    free = f"{status.free_bytes / status.disk_bytes:.0%} of its disk is free: " if status.disk_bytes else ""
    return Stall("buffer_refuses", f"{pausing}the buffer refuses puts: {free}{status.refuses_puts}")


def _failing(status: Status) -> Stall | None:
    """A supervisor says that processes fail, and what they do is not done by others."""
    supervisors = [client for client in status.clients if client.role == "monitor" and client.activity == "failing"]
    reports = [client.reason for client in supervisors if client.silent_seconds < REPORT_SECONDS]
    failing = list(dict.fromkeys(reports))
    others = live_trainer(status) is not None and not all(map(is_silent, living(status)))
    if not failing or (others and not _waits(status)):
        return None
    waiting = f"the trainer waits: {status.trainer_waits_for}; " if status.trainer_waits_for else ""
    return Stall("process_fails", f"{waiting}{_join_names(failing)}{READ_LOGS}")


def _no_trainer(status: Status) -> Stall | None:
    last = last_trainer(status)
    if last is None or last.activity == "gone":
        since = min(status.uptime_seconds, last.activity_seconds if last else status.uptime_seconds)
        # Without one since the server's start it may still load its model.
        patience = _LOADING_SECONDS if last is None or "trainer" in loading(status) else _RESTART_SECONDS
        if since < patience:
            return None
        how = "`tba train --resume`" if status.step else "`tba train`"
        left = f"the trainer on {last.host} left {format_duration(since)} ago, after step {status.step}" if last else ""
        which = left or f"no trainer has connected for {format_duration(since)}"
        return Stall("no_trainer", f"{which}: start it with {how}, or read its log")
    if last.silent_seconds > SILENT_SECONDS:
        return Stall(
            "trainer_silent",
            f"the trainer on {last.host} has been silent for {format_duration(last.silent_seconds)}: it was killed, "
            "suspended or cut off from the buffer; start it again with `tba train --resume`",
        )
    return None


def _trainer_at_work(status: Status) -> Stall | None:
    """The trainer does one thing for too long."""
    trainer = live_trainer(status)
    if trainer is None or status.trainer_waits_for:
        return None
    since = min(trainer.activity_seconds, status.last_step_seconds)
    usual = status.usual_step_seconds
    patience = max(_STEP_SECONDS, _STEP_FACTOR * usual) if usual else _FIRST_STEP_SECONDS
    if trainer.activity == "training" and since > patience:
        compared = f", and the last ones took {format_duration(usual)} each" if usual else ""
        return Stall(
            "trainer_hangs",
            f"the trainer on {trainer.host} has been at work on step {status.step} for {format_duration(since)}"
            f"{compared}: it may hang; inspect it with `py-spy dump`, or end it and start it again with `tba train "
            "--resume`",
        )
    if trainer.activity == "publishing" and trainer.activity_seconds > _PUBLISH_SECONDS:
        return _unpublished(trainer)
    if trainer.activity == "saving" and trainer.activity_seconds > _SAVE_SECONDS:
        return Stall(
            "checkpoint",
            f"the trainer on {trainer.host} has been saving a checkpoint for "
            f"{format_duration(trainer.activity_seconds)}: the disk of run.dir is slow or does not answer: check it, "
            "or save less often (train.checkpoint_every)",
        )
    return None


# ---------------------------------------------------------------- weights


def _without_weights(status: Status) -> Stall | None:
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
    if longest < (_LOADING_SECONDS if status.newest_version is None or is_due else _RESTART_SECONDS):
        return None
    if is_due:
        return _without_first_snapshot(without, status)
    if status.newest_version is None:
        what = f"the trainer has published no weights in {format_duration(longest)}: read its log"
    else:
        published = f"weights v{status.newest_version} are published"
        what = f"{published}, and no searcher has them: {without[0].reason}; {_CHECK_PATH}"
    return Stall("weights_missing", f"{_names_with_verb(without, status)} waiting for weights; {what}")


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
        f"{_names_with_verb(searchers, status)} waiting for the first snapshot since the trainer's start: "
        f"read its log if it does not come; v{status.newest_version} is of an earlier start: {searchers[0].reason}",
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


def _unpublished(trainer: ClientStatus) -> Stall:
    """Return the stall of a trainer that does not get its weights published."""
    slow = "the disk of run.dir or search.weights_dir is slow or does not answer: check it"
    why = f"{trainer.reason}; free some space" if trainer.reason else slow
    return Stall(
        "publication",
        f"the trainer on {trainer.host} has not published its weights for "
        f"{format_duration(trainer.activity_seconds)}: {why}",
    )


# ---------------------------------------------------------------- what a batch lacks


def _starving(status: Status) -> Stall | None:
    """The trainer waits for a batch: name what keeps the searchers from filling it."""
    # One that has left does not wait any more, also while the others are being stopped.
    if not _waits(status) or live_trainer(status) is None:
        return None
    searchers = living(status)
    for culprit in _CULPRITS:
        if (stall := culprit(status, searchers)) is not None:
            return Stall(stall.reason, f"the trainer waits: {status.trainer_waits_for}; {stall.sentence}")
    return None


def _without_searchers(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    if searchers:
        return None
    left = [client for client in status.clients if client.role == "searcher"]
    # Without one since the server's start they may still load their model.
    loads = not left or "search" in loading(status)
    if status.trainer_waits_seconds < (_LOADING_SECONDS if loads else _WAIT_SECONDS):
        return None
    what = f"{_every_searcher(len(left))} left" if left else "no searcher is connected"
    return Stall("no_searcher", f"{what}: start them with `tba search`, or read their logs")


def _silent_searchers(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    silent = sorted(filter(is_silent, searchers), key=lambda client: -client.leases)
    if not silent:
        return None
    held = sum(client.leases for client in silent)
    leases = f" and holds {quantity(held, 'prompt')}, which others get after buffer.lease_seconds" if held else ""
    have = "has" if len(silent) == 1 else "have"
    return Stall(
        "searcher_silent",
        f"{_names_of(silent, status)} {have} been silent for {format_duration(silent[0].silent_seconds)}{leases}: "
        "check that the process is alive and its network works, or start it again",
    )


def _refusing_searchers(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    refusing = _refusing(status, searchers)
    return _refused_weights(refusing, len(searchers)) if refusing else None


def _old_weights(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """Searchers wait for newer weights, which are not published or do not arrive."""
    newest = status.newest_version
    if not _all_idle(searchers):
        return None
    trainer = live_trainer(status)
    if trainer is not None and trainer.activity == "publishing" and trainer.reason:
        return _unpublished(trainer)
    behind = [client for client in searchers if newest is not None and client.weights_version != newest]
    if len(behind) < len(searchers):
        return None
    if _first_snapshot_due(status):
        return _without_first_snapshot(behind, status)
    served = {client.weights_version for client in behind}
    versions = ", ".join(sorted("no weights" if version is None else f"v{version}" for version in served))
    return Stall(
        "weights_old",
        f"{_names_with_verb(behind, status)} at {versions} and v{newest} is published: {behind[0].reason}; "
        f"{_CHECK_PATH}",
    )


def _only_errors(status: Status, _: Sequence[ClientStatus]) -> Stall | None:
    arrived, errors = quantity(status.rows_since_step, "trajectory", "trajectories"), status.errors_since_step
    if not errors or 2 * errors < status.rows_since_step:
        return None
    most = f", most often: {status.common_error}" if status.common_error else ""
    remedy = "correct what fails: `tba task check` runs the task by itself"
    if status.common_error.startswith("not trained on: cut off"):
        remedy = "raise search.max_tokens, or set another task.truncated"
    return Stall("only_errors", f"{errors} of {arrived} since the last step have an error{most}; {remedy}")


def _paused(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    paused = [client for client in searchers if client.metrics.get("paused")]
    if not paused:
        return None
    return Stall("spool", f"{_names_with_verb(paused, status)} paused: {paused[0].reason}{_why_slow(status)}")


def _scoring(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """All searchers wait for the same stage after generation."""
    if not _all_idle(searchers):
        return None
    if waiting := round(total(searchers, "rewards_waiting")):
        slowest = max(client.metrics.get("reward_seconds", 0.0) for client in searchers)
        timeouts = quantity(round(total(searchers, "reward_timeouts")), "timeout")
        return Stall(
            "rewards",
            f"{_names_with_verb(searchers, status)} waiting for {quantity(waiting, 'reward')}; the last one came after "
            f"{format_duration(slowest)}, queue included, with {timeouts}: the reward function is slow or hangs; raise "
            "task.reward_workers or lower task.reward_seconds",
        )
    if waiting := round(total(searchers, "unacknowledged_groups")):
        return Stall(
            "unacknowledged",
            f"the buffer has not acknowledged {quantity(waiting, 'put')} of {_names_of(searchers, status)}"
            f"{_why_slow(status)}",
        )
    return None


def _limited(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    """Both sides wait for each other."""
    if not _all_idle(searchers):
        return None
    return Stall(
        "limits",
        f"{_names_with_verb(searchers, status)} waiting: {searchers[0].reason}; trainer and searchers wait for "
        "each other: raise buffer.max_staleness or lower train.prompts_per_step; if that does not help, report it with "
        "the output of `tba status --json`",
    )


def _no_growth(status: Status, _: Sequence[ClientStatus]) -> Stall | None:
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
        f"{arrived} arrived in {format_duration(status.fruitless_seconds)}, and what the batch needs has not grown: "
        f"{why}; {remedy}",
    )


def _nothing_arrives(status: Status, searchers: Sequence[ClientStatus]) -> Stall | None:
    if min(status.last_put_seconds, status.trainer_waits_seconds) < _NO_DATA_SECONDS:
        return None
    in_flight = round(total(searchers, "in_flight"))
    return Stall(
        "no_data",
        f"{_names_with_verb(searchers, status)} generating {quantity(in_flight, 'response')}, and none has arrived for "
        f"{format_duration(status.last_put_seconds)}: lower search.max_tokens or search.samples_per_prompt, or check "
        "whether the engines hang",
    )


_CULPRITS: tuple[Callable[[Status, Sequence[ClientStatus]], Stall | None], ...] = (
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


def _why_slow(status: Status) -> str:
    """Return why the buffer does not acknowledge what searchers send, and what to do."""
    if status.commit_seconds < _SLOW_COMMIT_SECONDS:
        return "; check the network between them and the log of the buffer"
    return (
        f"; a transaction of the buffer takes {status.commit_seconds:.1f} s: its disk is slow or busy, put "
        "buffer.database on a faster one"
    )


# ---------------------------------------------------------------- names and waits


def _waits(status: Status) -> bool:
    """Whether the trainer has waited for a batch for longer than is normal."""
    return bool(status.trainer_waits_for) and status.trainer_waits_seconds >= _WAIT_SECONDS


def _all_idle(searchers: Sequence[ClientStatus]) -> bool:
    """Whether there are searchers, and every one has waited for longer than is normal."""
    waits = [one.activity == "waiting" and one.activity_seconds >= _WAIT_SECONDS for one in searchers]
    return bool(waits) and all(waits)


def _every_searcher(count: int) -> str:
    """Return `the only searcher`, `both searchers`, or `all 7 searchers`."""
    return {1: "the only searcher", 2: "both searchers"}.get(count, f"all {count} searchers")


def _names_of(clients: Sequence[ClientStatus], status: Status) -> str:
    """Return `searcher gpu3`, `searchers gpu0 and gpu3`, `both searchers`, or `all 7 searchers`."""
    if len(clients) > 1 and len(clients) == len(living(status)):
        return _every_searcher(len(clients))
    return f"searcher{'s' if len(clients) > 1 else ''} {_join_names([name_of(client) for client in clients], ' and ')}"


def _names_with_verb(clients: Sequence[ClientStatus], status: Status) -> str:
    """Return `searcher gpu3 is`, or `searchers gpu0 and gpu3 are`."""
    return f"{_names_of(clients, status)} {'is' if len(clients) == 1 else 'are'}"


def _join_names(parts: Sequence[str], last: str = "; ") -> str:
    """Join the first few, and count the others. `last` is the separator of the last two."""
    separator = ", " if last != "; " else last
    if len(parts) > _NAMED:
        return f"{separator.join(parts[:_NAMED])} and {len(parts) - _NAMED} more"
    return last.join(filter(None, [separator.join(parts[:-1]), parts[-1]]))
