"""`tba run`: the whole system on this machine, as child processes with one live display."""

import os
import time
from collections.abc import Callable, Sequence

from tba.common.client import BufferClient
from tba.common.config import Config
from tba.common.devices import CPU, choose_gpus, list_gpus
from tba.common.errors import (
    EXIT_CONFIG,
    EXIT_USAGE,
    BufferUnavailable,
    ConfigError,
    Refused,
    TbaError,
    UsageError,
)
from tba.common.log import get_logger
from tba.common.wire import GetStatus, Status
from tba.deploy.display import Display
from tba.deploy.picture import METRICS_FILE
from tba.deploy.supervisor import Child, Supervisor

log = get_logger(__name__)

_TEND_SECONDS = 0.1
_STATUS_SECONDS = 0.5


class Launcher:
    """Buffer, searchers and trainer of one configuration. `arguments` are passed on to every child."""

    def __init__(self, config: Config, arguments: Sequence[str], *, resume: bool) -> None:
        self._config = config
        self._buffer = self._child("buffer", "buffer", ["buffer", "serve", *arguments])
        self._searchers = [
            self._child(name, "search", ["search", *arguments, *flags], always=True)
            for name, flags in searcher_flags(config)
        ]
        first, later = (["--resume"], []) if resume else ([], ["--resume"])
        self._trainer = self._child("trainer", "trainer", ["train", *arguments, *first], after_first=later)
        self._supervisor = Supervisor(
            [self._buffer, *self._searchers, self._trainer],
            max_restarts=config.launch.max_restarts,
            restart_delay=config.launch.restart_delay_seconds,
        )

    def run(self, stop: Callable[[], bool], display: Display) -> bool:
        """Run until the trainer has made its last step (True) or `stop()` (False). No child outlives this call.

        Raises ConfigError if somebody else serves the address, TbaError with the end of its log if a child
        fails for good.
        """
        client = BufferClient(self._config.buffer.address, role="monitor", name="launcher")
        try:
            self._refuse_foreign_buffer(client)
            with display:
                self._watch(client, stop, display)
                _raise_if_failed(self._supervisor)
                if (status := ask_status(client)) is not None:
                    display.show(status, last=True)
                if stop():
                    display.say("stopping: the trainer saves a checkpoint")
            return status is not None and status.finished and not stop()
        finally:
            self._end()
            client.close()

    def _refuse_foreign_buffer(self, client: BufferClient) -> None:
        """Our searchers would join it and put their trajectories into somebody else's run."""
        if (status := ask_status(client, deadline_seconds=0.5)) is not None:
            raise ConfigError(
                f"buffer.address {self._config.buffer.address} is in use: a buffer serves run {status.run_name} there; "
                "stop it or choose another port"
            )

    def _watch(self, client: BufferClient, stop: Callable[[], bool], display: Display) -> None:
        asked_at = 0.0
        while not (stop() or self._trainer.ended or self._supervisor.failed()):
            self._supervisor.tend()
            if self._buffer.exit_code == 0:
                raise TbaError(f"the buffer was stopped before the run was done; its log is {self._buffer.log_file}")
            if time.monotonic() - asked_at >= _STATUS_SECONDS:
                asked_at = time.monotonic()
                if (status := ask_status(client)) is not None:
                    display.show(status)
            time.sleep(_TEND_SECONDS)

    def _end(self) -> None:
        """The trainer first (it saves a checkpoint), the buffer last (it takes what the others hand over)."""
        drain = self._config.launch.drain_seconds
        for children in ([self._trainer], self._searchers, [self._buffer]):
            self._supervisor.stop(children, drain_seconds=drain)

    def _child(
        self, name: str, kind: str, arguments: Sequence[str], *, after_first: Sequence[str] = (), always: bool = False
    ) -> Child:
        log_file = self._config.run.dir / "logs" / f"{name}.log"
        return Child(name, kind, arguments, log_file, after_first, always, environment=_threads(self._config))


def evaluate_in_child(config: Config, arguments: Sequence[str], stop: Callable[[], bool]) -> bool:
    """`tba eval --all` as a child, its output in a log. False if stopped; raises TbaError if it fails."""
    log_file = config.run.dir / "logs" / "eval.log"
    child = Child("eval", "eval", ["eval", "--all", *arguments], log_file, environment=_threads(config))
    supervisor = Supervisor([child], max_restarts=0, restart_delay=0.0)
    try:
        while not (stop() or child.ended):
            supervisor.tend()
            time.sleep(_TEND_SECONDS)
    finally:
        supervisor.stop([child], drain_seconds=1.0)
    _raise_if_failed(supervisor)
    return not stop()


def run_searchers(config: Config, commands: Sequence[Sequence[str]], stop: Callable[[], bool]) -> None:
    """Several searchers under one supervisor, until all are done or `stop()`.

    Raises TbaError if one fails for good.
    """
    children = [
        Child(f"search-{n}", "search", command, log_file=None, environment=_threads(config))
        for n, command in enumerate(commands)
    ]
    supervisor = Supervisor(
        children, max_restarts=config.launch.max_restarts, restart_delay=config.launch.restart_delay_seconds
    )
    try:
        while not (stop() or all(child.ended for child in children)):
            supervisor.tend()
            _raise_if_failed(supervisor)
            time.sleep(_TEND_SECONDS)
    finally:
        supervisor.stop(children, drain_seconds=config.launch.drain_seconds)


def check_start(config: Config, *, resume: bool) -> None:
    """Refuse what would fail later. Raises UsageError if a new run would overwrite an old one, or none is there."""
    searcher_flags(config)  # names missing GPUs
    if config.train.gpu != CPU:
        choose_gpus(config.train.gpu, list_gpus())
    metrics = config.run.dir / METRICS_FILE  # made by the trainer: an attempt that failed before is no run
    if not resume and metrics.exists() and metrics.stat().st_size:
        raise UsageError(
            f"{config.run.dir} holds a run already: add --resume to go on with it, or choose another run.dir"
        )
    if resume and not config.database.exists():
        raise UsageError(f"{config.run.dir} holds no run to resume: leave --resume away, or name its run.dir")


def searcher_flags(config: Config) -> list[tuple[str, list[str]]]:
    """Name and device flags of each searcher process: one per GPU, or `cpu_searchers` on the CPU."""
    if config.search.gpus == CPU:
        return [(f"search-{n}", ["--cpu", "1", "--index", str(n)]) for n in range(config.search.cpu_searchers)]
    gpus = choose_gpus(config.search.gpus, list_gpus())
    return [(f"search-{gpu}", ["--gpus", gpu]) for gpu in gpus]


def ask_status(client: BufferClient, deadline_seconds: float = 1.0) -> Status | None:
    """The buffer's status, None if it does not answer in time."""
    try:
        return client.call(GetStatus(), Status, deadline_seconds=deadline_seconds)[0]
    except (BufferUnavailable, Refused):
        return None


def _threads(config: Config) -> dict[str, str]:
    # On a CPU the children share the cores: one OpenMP thread each, or they slow each other down.
    uses_cpu = CPU in (config.search.gpus, config.train.gpu)
    return {"OMP_NUM_THREADS": "1"} if uses_cpu and "OMP_NUM_THREADS" not in os.environ else {}


def _raise_if_failed(supervisor: Supervisor) -> None:
    if failed := supervisor.failed():
        what_it_said = f"; the end of {failed.log_file}:\n{failed.log_tail().rstrip()}" if failed.log_file else ""
        error = TbaError(f"{failed.name} failed with exit code {failed.exit_code}{what_it_said}")
        if failed.exit_code in (EXIT_CONFIG, EXIT_USAGE):
            error.exit_code = failed.exit_code
        raise error
