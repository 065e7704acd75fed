"""What `tba run` and `tba status` show: one table for people on a terminal, lines for pipes."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba.common.clock import Clock, SystemClock
from tba.common.quantity import quantity
from tba.common.wire import ClientStatus, Status

_LINE_SECONDS = 5.0
_SAME_LINE_SECONDS = 60.0


class Display:
    """Shows the newest status: live on a terminal, else a line every few seconds while something changes."""

    def __init__(self, console: Console, *, steps: int, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._steps = steps
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._eta = Eta(steps)
        self._line, self._line_at = "", -math.inf

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """A line for people, above or after what is shown."""
        self._console.print(sentence, highlight=False)

    def show(self, status: Status, *, starting: Collection[str] = (), last: bool = False) -> None:
        """Replace what is shown; on a pipe, print a line now and then, and the `last` one in any case.

        `starting` are the roles of which a process is known to load its model.
        """
        step = status.step
        remaining = self._eta.remaining(step, self._clock.monotonic())
        if self._live:
            self._live.update(
                Group(
                    _progress(step, self._steps, remaining),
                    _numbers(status),
                    Text(explain(status, starting), style="dim"),
                    clients_table(status),
                )
            )
        else:
            self._print(summary_line(status, self._steps, remaining, starting), last=last)

    def _print(self, line: str, *, last: bool) -> None:
        """A line that says what the one before said is printed once a minute: the run lives."""
        now = self._clock.monotonic()
        if last or now - self._line_at >= (_SAME_LINE_SECONDS if line == self._line else _LINE_SECONDS):
            self._line, self._line_at = line, now
            self._console.print(line, highlight=False, soft_wrap=True)


class Eta:
    """Remaining time from the rate since the first step that was seen."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def remaining(self, step: int, now: float) -> float | None:
        """Seconds, None before there is a rate."""
        if step == 0:
            return None
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        done = step - self._first[0]
        return (now - self._first[1]) / done * (self._steps - step) if done else None


def client_of(status: Status, role: str) -> ClientStatus | None:
    """The most recently heard client of a role."""
    clients = [client for client in status.clients if client.role == role]
    return min(clients, key=lambda client: client.silent_seconds, default=None)


def explain(status: Status, starting: Collection[str] = ()) -> str:
    """One sentence: who waits for what. `starting` are the roles of which a process is known to load its model."""
    trainer = client_of(status, "trainer")
    if status.finished:
        return f"finished after {quantity(status.step, 'step')}"
    if "trainer" in starting or trainer is None:
        return _without_trainer(status, starting)
    if trainer.activity == "gone":
        return f"the trainer left after step {status.step}"
    if status.trainer_waits_for:
        waiting = [f"{c.sender}: {c.reason}" for c in searchers(status) if c.activity == "waiting"]
        meanwhile = "; ".join(waiting) or _connected(status, starting)
        return f"the trainer waits for data ({status.trainer_waits_for}); {meanwhile}"
    if trainer.silent_seconds > 30:
        return f"the trainer is silent for {trainer.silent_seconds:.0f} s"
    return f"the trainer is {trainer.activity}" + (f": {trainer.reason}" if trainer.reason else "")


def _without_trainer(status: Status, starting: Collection[str]) -> str:
    if "trainer" in starting:
        return "the trainer is loading the model"
    return (
        "no trainer is connected" if status.step else "no trainer has connected yet: it does when its model is loaded"
    )


def _connected(status: Status, starting: Collection[str]) -> str:
    if clients := searchers(status):
        return f"{quantity(len(clients), 'searcher')} connected"
    return "the searchers are loading the model" if "searcher" in starting else "no searcher is connected"


def searchers(status: Status) -> list[ClientStatus]:
    """The searchers that have not left."""
    return [client for client in status.clients if client.role == "searcher" and client.activity != "gone"]


def summary_line(status: Status, steps: int, remaining: float | None, starting: Collection[str] = ()) -> str:
    """Everything that matters in one line, for logs and pipes."""
    trainer = client_of(status, "trainer")
    metrics = trainer.metrics if trainer else {}
    parts = [f"step {status.step}/{steps}"]
    parts += [f"{name} {metrics[key]:.3g}" for name, key in _SHOWN if key in metrics]
    parts += [f"{status.puts_per_second:.0f} trajectories/s", _searchers_at(status), f"left {duration(remaining)}"]
    at_work = status.step and not status.trainer_waits_for and "trainer" not in starting
    return "  ".join(parts) if at_work else f"{parts[0]}  {explain(status, starting)}"


def _searchers_at(status: Status) -> str:
    clients = searchers(status)
    serving = [_version(client) for client in clients if client.weights_version is not None]
    if not clients:
        return "no searcher is connected"
    without = f"{quantity(len(clients) - len(serving), 'searcher')} without weights yet"
    parts = [f"searchers at {','.join(serving)}"] if serving else []
    return ", ".join(parts if len(serving) == len(clients) else [*parts, without])


_SPOOL_SHOWN_BYTES = 1 << 20  # less is on its way at any time
_SHOWN = (("loss", "loss"), ("reward", "reward"), ("staleness", "staleness"))


@dataclass(frozen=True)
class SearcherState:
    """One searcher as its supervisor sees it. `sender` is what the buffer calls it, without the part after the dot."""

    label: str
    sender: str
    running: bool
    ready: bool
    done: bool
    failures: int
    broken: bool
    last_code: int | None
    starts_in: float  # seconds

    def trouble(self) -> str:
        """Why it does not search, empty if it does or is done."""
        if self.done or (self.running and not self.broken):
            return ""
        how = "broken, " if self.broken else ""
        when = "is tried again now" if self.running else f"starts again in {self.starts_in:.0f} s"
        return f"{self.label} {how}{when} (failed {quantity(self.failures, 'time')}, last exit code {self.last_code})"


def fleet_line(states: Sequence[SearcherState], status: Status | None) -> str:
    """The searchers of one machine in one line; their figures as they told the buffer, None if it is away."""
    up = sum(state.running and state.ready for state in states)
    starting = sum(state.running and not state.ready for state in states)
    parts = [f"{up}/{quantity(len(states), 'searcher')} up" + (f", {starting} starting" if starting else "")]
    parts += [trouble for state in states if (trouble := state.trouble())]
    if status is None:
        return "; ".join([*parts, "the buffer does not answer"])
    told = {client.sender.rpartition(".")[0]: client for client in searchers(status)}
    ours = {state.label: told[state.sender] for state in states if state.sender in told}
    return "; ".join([*parts, _fleet_figures(list(ours.values())), *_fleet_waits(ours)])


def _fleet_figures(clients: Sequence[ClientStatus]) -> str:
    def total(key: str) -> float:
        return sum(client.metrics.get(key, 0.0) for client in clients)

    versions = sorted({client.weights_version for client in clients if client.weights_version is not None})
    newest = "none" if not versions else f"v{versions[0]}" + (f" to v{versions[-1]}" if len(versions) > 1 else "")
    return (
        f"{total('tokens_per_second'):,.0f} tokens/s, {total('trajectories_per_second'):.1f} trajectories/s, "
        f"{total('in_flight'):.0f} in flight, weights {newest}, {quantity(int(total('errors')), 'error')}"
    )


def _fleet_waits(clients: dict[str, ClientStatus]) -> list[str]:
    """`waiting: REASON (gpu0, gpu2)`, one for each reason."""
    reasons: dict[str, list[str]] = {}
    for label, client in clients.items():
        if client.activity == "waiting":
            reasons.setdefault(client.reason, []).append(label)
    return [f"waiting: {reason} ({', '.join(labels)})" for reason, labels in reasons.items()]


def clients_table(status: Status) -> Table:
    """One row for each client."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("role", "name", "activity", "weights", "tokens/s", "trajectories", "heard"):
        table.add_column(heading, justify="left" if heading in ("role", "name", "activity") else "right")
    for client in sorted(status.clients, key=lambda client: (client.role, client.sender)):
        if client.role in ("searcher", "trainer"):
            activity = f"{client.activity}: {client.reason}" if client.reason else client.activity
            if (spooled := client.metrics.get("spool_bytes", 0.0)) >= _SPOOL_SHOWN_BYTES:
                activity += f" ({spooled / 2**20:,.1f} MiB in its spool)"
            rate = client.metrics.get("tokens_per_second")
            table.add_row(
                client.role,
                client.sender.rpartition(".")[0],
                Text(activity, style="yellow" if client.activity == "waiting" else ""),
                _version(client),
                f"{rate:,.0f}" if rate is not None else "",
                f"{client.trajectories:,}" if client.role == "searcher" else "",
                f"{client.silent_seconds:.0f} s ago",
            )
    return table


def _numbers(status: Status) -> Text:
    trainer = client_of(status, "trainer")
    metrics = trainer.metrics if trainer else {}
    parts = [f"{name} {metrics[key]:.3g}" for name, key in _SHOWN if key in metrics]
    parts += [
        f"{status.puts_per_second:.0f} trajectories/s",
        f"{status.trajectories:,} in the buffer",
        f"{status.database_bytes / 2**20:.1f} MiB",
        f"epoch {status.epoch}",
        *([f"{status.errors:,} with an error"] if status.errors else []),
    ]
    return Text("   ".join(parts))


def _progress(step: int, steps: int, remaining: float | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"step {step}/{steps}", ProgressBar(total=steps, completed=step, width=40), f"left {duration(remaining)}"
    )
    return table


def _version(client: ClientStatus) -> str:
    return "none" if client.weights_version is None else f"v{client.weights_version}"


def duration(seconds: float | None) -> str:
    """`1:02:03`, `2:03`, or a dash if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
