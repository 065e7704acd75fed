"""The output of `tba run` and `tba status`: a live table on a terminal, lines in a pipe."""

import contextlib
import math
import socket
from collections import Counter
from collections.abc import Collection, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba.common.clock import Clock, SystemClock
from tba.common.errors import format_duration, quantity
from tba.common.run_status import Facts, find_stall, last_trainer, live_trainer, living, name_of, total
from tba.common.terminal import printable
from tba.common.wire.messages import ClientStatus, Status
from tba.deploy.child import Child

_LINE_SECONDS = 5.0
_SAME_LINE_SECONDS = 60.0


class Display:
    """Shows the newest status: live on a terminal, otherwise a line every few seconds while it changes."""

    def __init__(self, console: Console, *, steps: int, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._steps = steps
        # A context manager: the display is live while it runs.
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else contextlib.nullcontext()
        self._eta = Eta(steps)
        self._line, self._line_at = "", -math.inf
        self._status: Status | None = None

    def note(self, sentence: str) -> None:
        """Print a sentence above or after the display."""
        self._console.print(printable(sentence, keep="\n"), highlight=False, markup=False)

    def show(self, facts: Facts, *, last: bool = False) -> None:
        """Replace the display. In a pipe, print a line every few seconds, and the `last` one if it is new.

        While the buffer does not answer, its last status stays, with why it does not.
        """
        self._status = status = facts.status or self._status
        if status is None:
            return
        remaining = self._eta.remaining(status.step, self._clock.monotonic())
        if isinstance(self.live, Live):
            self.live.update(
                Group(
                    _progress(status.step, self._steps, remaining),
                    _numbers(status, self._console.width),
                    _explained(facts, status),
                )
            )
        else:
            self._print(summary_line(facts, status, self._steps, remaining), last=last)

    def _print(self, line: str, *, last: bool) -> None:
        """Print a line, at most every few seconds; an unchanged line once a minute, to show that the run is alive."""
        now, changed = self._clock.monotonic(), line != self._line
        if (last and changed) or now - self._line_at >= (_LINE_SECONDS if changed else _SAME_LINE_SECONDS):
            self._line, self._line_at = line, now
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class Eta:
    """Estimates the remaining time from the rate since the first step it received."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int, now: float) -> float | None:
        """Return the remaining seconds, None if there is no rate yet."""
        if step == 0:
            return None
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        done = step - self._first[0]
        return (now - self._first[1]) / done * (self._steps - step) if done else None


def explain(facts: Facts) -> str:
    """Return one sentence: why the run stands still, or else what it does or waits for."""
    stall, status = find_stall(facts), facts.status
    if status is None:
        return stall.sentence if stall is not None else "the buffer does not answer"
    doing = stall.sentence if stall is not None else _explanation(status, facts.loading)
    # Names and reasons come from the network.
    return printable("; ".join(filter(None, [doing, _warning(status)])))


def _warning(status: Status) -> str:
    """Return what is wrong with the training, as the living trainer says."""
    trainer = live_trainer(status)
    return trainer.warning if trainer is not None and not status.finished else ""


def _explained(facts: Facts, status: Status) -> Group:
    """Return the sentence, marked if the run stands still, and the clients."""
    style = "bold yellow" if find_stall(facts) is not None else "dim"
    return Group(Text(explain(facts), style=style), clients_table(status))


def _explanation(status: Status, starting: Collection[str]) -> str:
    trainer = last_trainer(status)
    # A finished run that is resumed is so until its trainer has connected.
    if status.finished and "trainer" not in starting:
        return f"finished after {quantity(status.step, 'step')}"
    if "trainer" in starting or trainer is None:
        return _without_trainer(status, starting)
    if trainer.activity == "gone":
        return f"the trainer left after step {status.step}"
    if status.trainer_waits_for:
        waiting = [f"{c.sender}: {c.reason}" for c in living(status) if c.activity == "waiting"]
        meanwhile = "; ".join(waiting) or _connected(status, starting)
        return f"the trainer waits for data ({status.trainer_waits_for}); {meanwhile}"
    doing = f"the trainer is {trainer.activity}" + (f": {trainer.reason}" if trainer.reason else "")
    return "; ".join(filter(None, [doing, status.no_recent_data]))


def _without_trainer(status: Status, starting: Collection[str]) -> str:
    if "trainer" in starting:
        return "the trainer is loading the model"
    return (
        "no trainer is connected"
        if status.step
        else "no trainer has connected yet: it connects after loading its model"
    )


def _connected(status: Status, starting: Collection[str]) -> str:
    if clients := living(status):
        return f"{quantity(len(clients), 'searcher')} connected"
    return "the searchers are loading the model" if "searcher" in starting else "no searcher is connected"


def summary_line(facts: Facts, status: Status, steps: int, remaining: float | None) -> str:
    """Return step, metrics, rate and remaining time in one line, or the reason why no step is made."""
    parts = [f"step {status.step}/{steps}", *_trainer_metrics(status)]
    parts += [
        f"{status.puts_per_second:,.0f} trajectories/s",
        _searchers_at(status, facts.loading),
        f"left {duration(remaining)}",
    ]
    trainer = last_trainer(status)
    parts += filter(None, [status.no_recent_data, trainer.reason if trainer is not None else "", _warning(status)])
    at_work = status.step and not status.trainer_waits_for and "trainer" not in facts.loading
    if status.finished or not at_work or find_stall(facts) is not None:
        return f"{parts[0]}  {explain(facts)}"
    return printable("  ".join(parts))


def _trainer_metrics(status: Status) -> list[str]:
    trainer = last_trainer(status)
    return [f"{name} {trainer.metrics[name]:.3g}" for name in _SHOWN if trainer and name in trainer.metrics]


def _searchers_at(status: Status, starting: Collection[str]) -> str:
    clients = living(status)
    serving = [_version(client) for client in clients if client.weights_version is not None]
    if not clients:
        return _connected(status, starting)
    without = f"{quantity(len(clients) - len(serving), 'searcher')} without weights yet"
    parts = [f"searchers at {','.join(serving)}"] if serving else []
    return ", ".join(parts if len(serving) == len(clients) else [*parts, without])


# A smaller spool is normal: it holds the puts that wait for their acknowledgement.
_SPOOL_SHOWN_BYTES = 1 << 20
_SHOWN = ("loss", "reward", "staleness")
_ERROR_CHARACTERS = 120


def fleet_line(children: Sequence[Child], facts: Facts) -> str:
    """Return one line about the searchers of this machine, and why the run stands still, if it does."""
    status, stall = facts.status, find_stall(facts)
    up = sum(child.process is not None and child.ready for child in children)
    starting = sum(child.process is not None and not child.ready for child in children)
    parts = [f"{up}/{quantity(len(children), 'searcher')} up" + (f", {starting} starting" if starting else "")]
    parts += facts.failing
    if status is None:
        return printable("; ".join([*parts, "the buffer does not answer"]))
    standing = [f"the run stands still: {stall.sentence}"] if stall is not None else []
    reported = {name_of(client): client for client in living(status)}
    senders = {child.name: f"{socket.gethostname()}-{child.name}" for child in children}
    ours = {name: reported[sender] for name, sender in senders.items() if sender in reported}
    return printable("; ".join([*parts, _fleet_figures(list(ours.values())), *_fleet_waits(ours), *standing]))


def _fleet_figures(clients: Sequence[ClientStatus]) -> str:
    versions = sorted({client.weights_version for client in clients if client.weights_version is not None})
    newest = "none" if not versions else f"v{versions[0]}" + (f" to v{versions[-1]}" if len(versions) > 1 else "")
    return (
        f"{total(clients, 'tokens_per_second'):,.0f} tokens/s, "
        f"{total(clients, 'trajectories_per_second'):.1f} trajectories/s, {total(clients, 'in_flight'):.0f} in flight, "
        f"weights {newest}, {quantity(round(total(clients, 'errors')), 'error')}"
    )


def _fleet_waits(clients: dict[str, ClientStatus]) -> list[str]:
    """Return `waiting: REASON (gpu0, gpu2)` for each reason."""
    reasons: dict[str, list[str]] = {}
    for label, client in clients.items():
        if client.activity == "waiting":
            reasons.setdefault(client.reason, []).append(label)
    return [f"waiting: {reason} ({', '.join(labels)})" for reason, labels in reasons.items()]


def status_view(status: Status, address: str) -> Group:
    """Return what `tba status` shows."""
    facts = Facts(status, address)
    stands = f" (for {format_duration(status.stalled_seconds)})" if status.stalled_seconds else ""
    style = "bold yellow" if find_stall(facts) is not None else ""
    about = Text(f"run {printable(status.run_name)} at {address}: {explain(facts)}{stands}", style=style)
    return Group(about, *([Text(_errors(status))] if status.errors else []), clients_table(status))


def clients_table(status: Status) -> Table:
    """Return a table with one row per evaluator, searcher and trainer.

    Processes of the same name, such as two searchers on the CPU of one machine, are shown with the number of the start.
    """
    names = Counter(map(name_of, status.clients))
    trainer = last_trainer(status)
    trains = trainer is not None and trainer.activity == "training" and not status.trainer_waits_for
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("role", "name", "activity", "weights", "tokens/s", "trajectories", "last seen"):
        table.add_column(heading, justify="left" if heading in ("role", "name", "activity") else "right")
    for client in sorted(status.clients, key=lambda client: (client.role, client.sender)):
        if client.role in ("evaluator", "searcher", "trainer"):
            activity = f"{client.activity}: {client.reason}" if client.reason else client.activity
            # All leave a finished run. "gone" would look like a failure.
            activity = "finished" if status.finished and client.activity == "gone" else activity
            waiting = client.activity == "waiting"
            ahead = client.role == "searcher" and waiting and trains
            activity += ", which is normal while the trainer trains" if ahead else ""
            idle = ahead or client.role == "evaluator"
            if (spooled := client.metrics.get("spool_bytes", 0.0)) >= _SPOOL_SHOWN_BYTES:
                activity += f" ({spooled / 2**20:,.1f} MiB in its spool)"
            rate = client.metrics.get("tokens_per_second")
            table.add_row(
                client.role,
                Text(printable(name_of(client) if names[name_of(client)] == 1 else client.sender)),
                Text(printable(activity), style="yellow" if waiting and not idle else ""),
                _version(client),
                f"{rate:,.0f}" if rate is not None and client.activity != "gone" else "",
                f"{client.trajectories:,}" if client.role == "searcher" else "",
                f"{client.silent_seconds:.0f} s ago",
            )
    return table


def _numbers(status: Status, width: int) -> Text:
    """Return the figures of a run, in lines of at most `width` characters that break between two figures."""
    parts = [
        *_trainer_metrics(status),
        f"{status.puts_per_second:,.0f} trajectories/s",
        f"{status.trajectories:,} in the buffer",
        f"{status.database_bytes / 2**20:.1f} MiB",
        _epoch(status),
        *([_errors(status)] if status.errors else []),
    ]
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}   {part}".strip()
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return Text("\n".join(filter(None, lines)))


def _epoch(status: Status) -> str:
    by_curriculum = {"skipped": status.skipped_prompts, "postponed": status.postponed_prompts}
    parts = [f"{quantity(count, 'prompt')} {what}" for what, count in by_curriculum.items() if count]
    return f"epoch {status.epoch}" + (f" ({', '.join(parts)})" if parts else "")


def _errors(status: Status) -> str:
    most = printable(status.common_error[:_ERROR_CHARACTERS])
    return f"{status.errors:,} with an error" + (f", most often: {most}" if most else "")


def _progress(step: int, steps: int, remaining: float | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), f"left {duration(remaining)}"
    )
    return table


def _version(client: ClientStatus) -> str:
    return "none" if client.weights_version is None else f"v{client.weights_version}"


def duration(seconds: float | None) -> str:
    """Return `1:02:03`, `2:03`, or a dash if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
