"""The output of `tba run` and `tba status`: a live table on a terminal, lines in a pipe."""

import contextlib
import math
import socket
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba.common.clock import Clock, SystemClock
from tba.common.errors import format_duration, quantity
from tba.common.run_status import Facts, connected, describe, last_trainer, living, name_of, stall_of, total
from tba.common.terminal import printable
from tba.common.wire.messages import ClientStatus, Status
from tba.deploy.child import Child

_LINE_SECONDS = 5.0
_SAME_LINE_SECONDS = 60.0


class Display:
    """Shows the newest status: live on a terminal that can redraw, else a line every few seconds while it changes."""

    def __init__(self, console: Console, *, steps: int, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._steps = steps
        # A context manager: the display is live while it runs.
        redraws = console.is_terminal and not console.is_dumb_terminal
        self.live = Live(console=console, refresh_per_second=4) if redraws else contextlib.nullcontext()
        # The step and the time of the first status with a step.
        self._first: tuple[int, float] | None = None
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
        state = describe(facts)
        text = Text(state.sentence, style="bold yellow" if state.name == "stalled" else "dim")
        if status is None:
            return self.live.update(text) if isinstance(self.live, Live) else self._print(state.sentence, last=last)
        remaining = self._remaining(status.step)
        if isinstance(self.live, Live):
            numbers = _numbers(status, self._console.width)
            progress = _progress(status.step, self._steps, remaining)
            return self.live.update(Group(progress, numbers, text, clients_table(status)))
        return self._print(summary_line(facts, status, self._steps, remaining), last=last)

    def _remaining(self, step: int) -> float | None:
        """Return the remaining seconds by the rate since the first step shown, None if there is no rate yet."""
        now = self._clock.monotonic()
        if step and (self._first is None or step < self._first[0]):
            self._first = (step, now)
        if self._first is None or step <= self._first[0]:
            return None
        return (now - self._first[1]) / (step - self._first[0]) * (self._steps - step)

    def _print(self, line: str, *, last: bool) -> None:
        """Print a line, at most every few seconds; an unchanged line once a minute, to show that the run is alive."""
        now, changed = self._clock.monotonic(), line != self._line
        if (last and changed) or now - self._line_at >= (_LINE_SECONDS if changed else _SAME_LINE_SECONDS):
            self._line, self._line_at = line, now
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def summary_line(facts: Facts, status: Status, steps: int, remaining: float | None) -> str:
    """Return step, metrics, rate and remaining time in one line, or the reason why no step is made."""
    parts = [f"step {status.step}/{steps}", *_trainer_metrics(status)]
    rate = status.puts_per_second
    arriving = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
    parts += [f"{arriving} trajectories/s" if rate else "no new trajectories", _searchers_at(status)]
    if remaining is not None:
        parts.append(f"left {format_duration(remaining)}")
    trainer = last_trainer(status)
    if trainer is not None:
        parts += filter(None, [status.no_recent_data, trainer.reason, trainer.warning])
    state = describe(facts)
    if not status.step or status.trainer_waits_for or state.name != "running" or facts.status is None:
        return f"{parts[0]}  {state.sentence}"
    return printable("  ".join(parts))


def _trainer_metrics(status: Status) -> list[str]:
    metrics = trainer.metrics if (trainer := last_trainer(status)) else {}
    return [f"{name} {metrics[name]:.3g}" for name in _SHOWN if name in metrics]


def _searchers_at(status: Status) -> str:
    clients = living(status)
    serving = [_version(client) for client in clients if client.weights_version is not None]
    if not clients:
        return connected(status)
    without = f"{quantity(len(clients) - len(serving), 'searcher')} without weights yet"
    parts = [f"searchers at {','.join(serving)}"] if serving else []
    return ", ".join(parts if len(serving) == len(clients) else [*parts, without])


# A smaller spool is normal: it holds the puts that wait for their acknowledgement.
_SPOOL_SHOWN_BYTES = 1 << 20
_SHOWN = ("loss", "reward", "staleness")
_ERROR_CHARACTERS = 120


def fleet_line(children: Sequence[Child], facts: Facts) -> str:
    """Return one line about the searchers of this machine, and why the run stands still, if it does."""
    status, stall = facts.status, stall_of(facts)
    up = sum(child.process is not None and child.ready for child in children)
    starting = sum(child.process is not None and not child.ready for child in children)
    parts = [f"{up}/{quantity(len(children), 'searcher')} up" + (f", {starting} starting" if starting else "")]
    if status is None:
        return printable("; ".join([*parts, describe(facts).sentence]))
    parts += facts.failing
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


def status_view(status: Status, address: str, here: Mapping[str, Any] | None = None) -> Group:
    """Return what `tba status` shows; `here` is the state of the run by the files of this machine, if they have it."""
    found = describe(Facts(status, address))
    name, sentence = (here["state"], here["explanation"]) if here else found
    stands = f" (for {format_duration(status.stalled_seconds)})" if status.stalled_seconds else ""
    style = "bold yellow" if name == "stalled" else ""
    about = Text(f"run {printable(status.run_name)} at {address}: {sentence}{stands}", style=style)
    return Group(about, *([Text(_errors(status))] if status.errors else []), clients_table(status))


def clients_table(status: Status) -> Table:
    """Return a table with one row per evaluator, searcher and trainer; equal names get the number of the start."""
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
    # Lines do not break at the spaces within a figure.
    whole = "   ".join(part.replace(" ", "\xa0") for part in parts)
    return Text(textwrap.fill(whole, width, break_long_words=False).replace("\xa0", " "))


def _epoch(status: Status) -> str:
    by_curriculum = {"skipped": status.skipped_prompts, "postponed": status.postponed_prompts}
    parts = [f"{quantity(count, 'prompt')} {what}" for what, count in by_curriculum.items() if count]
    return f"epoch {status.epoch}" + (f" ({', '.join(parts)})" if parts else "")


def _errors(status: Status) -> str:
    most = printable(status.common_error[:_ERROR_CHARACTERS])
    return f"{status.errors:,} with an error" + (f", most often: {most}" if most else "")


def _progress(step: int, steps: int, remaining: float | None) -> Table:
    table = Table.grid(padding=(0, 2))
    left = "" if remaining is None else f"left {format_duration(remaining)}"
    table.add_row(f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), left)
    return table


def _version(client: ClientStatus) -> str:
    return "none" if client.weights_version is None else f"v{client.weights_version}"
