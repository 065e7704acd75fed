"""`tba run` and `tba search` with several searchers: child processes of this machine under one supervisor."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba.common.client import BufferClient
from tba.common.config import Config, LaunchSection, TaskSection
from tba.common.cores import Core, share_cores, threads_of, usable_cores
from tba.common.devices import CPU, check_free, choose_gpus, group_gpus, label, list_gpus
from tba.common.errors import EXIT_CONFIG, TaskError, TbaError, UsageError
from tba.common.log import get_logger
from tba.common.paths import check_paths
from tba.common.probe import ask_status, check_address
from tba.common.process import notify_systemd, signal_name
from tba.common.terminal import need
from tba.common.wire import Status
from tba.deploy.display import Display, SearcherState, client_of, fleet_line
from tba.deploy.run_directory import holds_run, tell_ending
from tba.deploy.supervisor import HOPELESS, Child, Supervisor

log = get_logger(__name__)

_TEND_SECONDS = 0.1
_STATUS_SECONDS = 0.5


class Launcher:
    """Buffer, searchers and trainer of one configuration. `arguments` are passed on to every child.

    The others start when our own buffer is ready: until then another buffer may answer at its address, which they
    would join.
    """

    def __init__(self, config: Config, arguments: Sequence[str], *, resume: bool) -> None:
        self._config = config
        self._buffer = self._child("buffer", "buffer", ["buffer", "serve", *arguments])
        log_files = config.run.dir / "logs"
        self._searchers = searcher_children(config, arguments, always=True)
        for child in self._searchers:
            child.name = f"search-{child.name.removeprefix('cpu').removeprefix('gpu')}"
            child.log_file = log_files / f"{child.name}.log"
        first, later = (["--resume"], []) if resume else ([], ["--resume"])
        self._trainer = self._child("trainer", "trainer", ["train", *arguments, *first], after_first=later)
        for child in (*self._searchers, self._trainer):
            child.after = self._buffer
        self._supervisor = Supervisor([self._buffer, *self._searchers, self._trainer], config.launch)
        self._heard_start = 0  # the number of the trainer's start that the buffer has heard last

    def run(self, stop: Callable[[], bool], display: Display) -> bool:
        """Run until the trainer has made its last step (True) or `stop()` (False). No child outlives this call.

        Raises TbaError with the end of its log if a child fails for good.
        """
        client = BufferClient(self._config.buffer.address, role="monitor", name="launcher")
        try:
            with self._supervisor:
                evaluates = False
                try:
                    finished = self._work(client, stop, display)
                    evaluates = finished and self._config.eval.at_end
                    return finished
                finally:
                    if not evaluates:
                        tell_ending(self._config)
                    self._end()
        finally:
            client.close()

    def _work(self, client: BufferClient, stop: Callable[[], bool], display: Display) -> bool:
        with display:
            self._watch(client, stop, display)
            _raise_if_failed(self._supervisor)
            if (status := self._ask_status(client)) is not None:
                display.show(status, starting=self._starting(), last=True)
            if stop():
                display.say(f"stopping: {self._left_to_do()}")
        return status is not None and status.finished and not stop()

    def _watch(self, client: BufferClient, stop: Callable[[], bool], display: Display) -> None:
        asked_at = 0.0
        while not (stop() or self._trainer.ended or self._supervisor.failed()):
            self._supervisor.tend()
            if self._buffer.exit_code == 0:
                raise TbaError(f"the buffer was stopped before the run was done; its log is {self._buffer.log_file}")
            if time.monotonic() - asked_at >= _STATUS_SECONDS:
                asked_at = time.monotonic()
                if (status := self._ask_status(client)) is not None:
                    display.show(status, starting=self._starting())
            time.sleep(_TEND_SECONDS)

    def _ask_status(self, client: BufferClient) -> Status | None:
        """The status of our own buffer; None also while another one may answer in its place."""
        since_start = time.monotonic() - self._trainer.started_at
        status = ask_status(client) if self._buffer.ready else None
        trainer = client_of(status, "trainer") if status is not None else None
        if trainer is not None and trainer.activity != "gone" and trainer.silent_seconds < since_start:
            self._heard_start = self._trainer.starts
        return status

    @property
    def _trainer_is_there(self) -> bool:
        """It has loaded its model. A buffer that has just been restarted need not have heard it yet."""
        return self._trainer.process is not None and self._heard_start == self._trainer.starts

    def _starting(self) -> set[str]:
        """The roles whose processes run and are not at work yet: they load a model."""
        roles = set()
        if self._trainer.process is not None and not self._trainer_is_there:
            roles.add("trainer")
        if any(child.process is not None and not child.ready for child in self._searchers):
            roles.add("searcher")
        return roles

    def _left_to_do(self) -> str:
        if not holds_run(self._config):
            return "nothing was trained yet"
        return "the trainer saves a checkpoint" if self._trainer_is_there else "there is nothing new to save"

    def _end(self) -> None:
        """The trainer first (it saves a checkpoint), the buffer last (it takes what the others hand over).

        What is still starting has nothing to save or to hand over, and may not listen before its model is loaded.
        """
        drain = self._config.launch.drain_seconds
        unneeded = [] if self._trainer_is_there else [self._trainer]
        self._supervisor.kill([*unneeded, *(child for child in self._searchers if not child.ready)])
        for children in ([self._trainer], self._searchers, [self._buffer]):
            self._supervisor.stop(children, drain_seconds=drain)

    def _child(
        self, name: str, kind: str, arguments: Sequence[str], *, after_first: Sequence[str] = (), always: bool = False
    ) -> Child:
        log_file = self._config.run.dir / "logs" / f"{name}.log"
        return Child(name, kind, arguments, log_file, after_first, always, environment=_threads(self._config))


def evaluate_in_child(config: Config, arguments: Sequence[str], stop: Callable[[], bool]) -> bool:
    """`tba eval --all` as a child, its output in a log: the last that `tba run` does.

    False if stopped; raises TbaError if it fails.
    """
    log_file = config.run.dir / "logs" / "eval.log"
    child = Child("eval", "eval", ["eval", "--all", *arguments], log_file, once=True, environment=_threads(config))
    _run_once(child, stop, at_end=lambda: tell_ending(config))
    if child.last_code:
        raise _failure(child)
    return not stop()


def _run_once(child: Child, stop: Callable[[], bool], at_end: Callable[[], None] = lambda: None) -> None:
    """Run a child, that is to run `once`, to its end or until `stop()`; then call `at_end`.

    Nothing of it outlives this call.
    """
    with Supervisor([child], LaunchSection()) as supervisor:
        while not (stop() or child.ended):
            supervisor.tend()
            time.sleep(_TEND_SECONDS)
        at_end()
        supervisor.stop([child], drain_seconds=1.0)


class Fleet:
    """The searchers of this machine under one supervisor, with a summary line every now and then."""

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        self._config = config
        self._children = searcher_children(config, arguments, always=False)
        self._supervisor = Supervisor(self._children, config.launch)
        self._summary_at = time.monotonic() + config.launch.summary_seconds
        self._ready = False

    def run(self, stop: Callable[[], bool]) -> None:
        """Until all searchers are done or `stop()`. No child outlives this call.

        Raises TbaError if the configuration is wrong for one of them, or all of them are broken.
        """
        client = BufferClient(self._config.buffer.address, role="monitor", name="fleet")
        try:
            with self._supervisor:
                while not (stop() or all(child.ended for child in self._children)):
                    self._supervisor.tend()
                    _raise_if_failed(self._supervisor)
                    self._tell_systemd()
                    self._summarise(client)
                    time.sleep(_TEND_SECONDS)
                self._supervisor.stop(self._children, drain_seconds=self._config.launch.drain_seconds)
        finally:
            client.close()

    def _tell_systemd(self) -> None:
        if not self._ready and any(child.ready for child in self._children):
            self._ready = True
            notify_systemd("READY=1")

    def _summarise(self, client: BufferClient) -> None:
        if time.monotonic() < self._summary_at:
            return
        self._summary_at = time.monotonic() + self._config.launch.summary_seconds
        line = fleet_line([self._state(child) for child in self._children], ask_status(client))
        log.info(line)
        notify_systemd(f"STATUS={line}")

    def _state(self, child: Child) -> SearcherState:
        return SearcherState(
            label=child.name,
            sender=f"{socket.gethostname()}-{child.name}",
            running=child.process is not None,
            ready=child.ready,
            done=child.ended,
            failures=child.failures,
            broken=self._supervisor.broken(child),
            last_code=child.last_code,
            starts_in=max(child.start_at - time.monotonic(), 0.0),
        )


def check_start(config: Config, *, resume: bool) -> None:
    """Refuse what would fail later, and leave nothing behind.

    Raises UsageError if a new run would overwrite an old one, or none is there; ConfigError for a path that is not, and
    MissingExtra.
    """
    check_paths(config)
    if config.lora.rank:
        need("peft", "lora")
    if config.search.gpus != CPU:
        searcher_groups(config)  # names missing and busy GPUs
    if config.train.gpu != CPU:
        choose_gpus(config.train.gpu, list_gpus(), "train.gpu")
    if not resume and holds_run(config):
        raise UsageError(
            f"{config.run.dir} holds a run already: add --resume to go on with it, or choose another run.dir"
        )
    if resume and not config.database.exists():
        raise UsageError(f"{config.run.dir} holds no run to resume: leave --resume away, or name its run.dir")


def check_task(config: Config, arguments: Sequence[str], stop: Callable[[], bool]) -> None:
    """Load a task of the user's own as the children will, in one of them, or until `stop()`.

    Raises TaskError with its sentence, TbaError if it was not the configuration, as where memory is short;
    AddressInUse before all that, for loading may take minutes.
    """
    if not config.task.is_own:
        return
    check_address(config.buffer.address)
    with tempfile.TemporaryDirectory(prefix="tba-check-") as directory:
        # What the task prints stands before the sentence: else it might be all that is left at the log's end.
        ordered = {"PYTHONUNBUFFERED": "1"}
        log_file = Path(directory, "check.log")
        child = Child("check", "check", ["config", "check", *arguments], log_file, once=True, environment=ordered)
        _run_once(child, stop)
        if child.last_code:
            raise _task_failure(config.task, child.last_code, child.log_tail())


def _task_failure(task: TaskSection, code: int, said: str) -> TbaError:
    """Only what the check calls a bad configuration is one: to run out of memory passes."""
    sentence = _error_in(said) if code > 0 else ""
    if not sentence:
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        last = said.rpartition("\n")[2] or "it said nothing"
        sentence = f"task.name {task.name}: the process that loaded it {how}: {last}"
    return (TaskError if code == EXIT_CONFIG else TbaError)(sentence)


def searcher_groups(config: Config, flag: str = "") -> list[list[str]]:
    """The GPUs of each searcher; `flag` as in `choose_gpus`.

    Raises UsageError for a missing GPU, DeviceBusy for one without free memory.
    """
    present = list_gpus()
    chosen = choose_gpus(config.search.gpus, present, "search.gpus", flag)
    if config.search.engine == "vllm":  # which takes its part of the memory at once
        check_free(chosen, present, utilization=config.search.gpu_memory_utilization)
    return group_gpus(chosen, config.search.tensor_parallel)


def searcher_children(config: Config, arguments: Sequence[str], *, always: bool) -> list[Child]:
    """A child for each engine: one per group of GPUs, or `cpu_searchers` on the CPU, each with its share of cores."""
    if config.search.gpus != CPU:
        return [
            Child(
                label(group),
                "search",
                ["search", *arguments, "--gpus", ",".join(group), "--tp", str(len(group))],
                log_file=None,
                always=always,
                environment=_threads(config),
            )
            for group in searcher_groups(config)
        ]
    count = config.search.cpu_searchers
    others = int(always and config.train.gpu == CPU)
    return [
        Child(
            f"cpu{n}",
            "search",
            ["search", *arguments, "--cpu", "1", "--index", str(n)],
            log_file=None,
            always=always,
            environment={"OMP_NUM_THREADS": str(threads)} if "OMP_NUM_THREADS" not in os.environ else {},
            cores=share,
        )
        for n, (share, threads) in enumerate(_cpu_shares(count, others=others))
    ]


def _cpu_shares(searchers: int, *, others: int) -> list[tuple[list[Core], int]]:
    """Cores and OpenMP threads of each searcher, with room for `others` that compute on the CPU too."""
    shares = share_cores(usable_cores(), searchers + others)
    return [(share, threads_of(share, shared_by=shares.count(share))) for share in shares[:searchers]]


def _threads(config: Config) -> dict[str, str]:
    # On a CPU the children share the cores: one OpenMP thread each, or they slow each other down.
    uses_cpu = CPU in (config.search.gpus, config.train.gpu)
    return {"OMP_NUM_THREADS": "1"} if uses_cpu and "OMP_NUM_THREADS" not in os.environ else {}


def _raise_if_failed(supervisor: Supervisor) -> None:
    if (failed := supervisor.failed()) is not None:
        raise _failure(failed)


def _failure(failed: Child) -> TbaError:
    code, tail = failed.last_code, failed.log_tail()
    sentence = _error_in(tail)
    if code in HOPELESS and sentence:
        error = TbaError(f"{failed.name}: {sentence}")
    else:
        where = f" of {failed.log_file}" if failed.log_file else ""
        error = TbaError(f"{failed.name} failed with exit code {code}; the end{where}:\n{tail}")
    if code in HOPELESS:
        error.exit_code = code
    return error


def _error_in(said: str) -> str:
    """The last sentence in which `tba` has told an error; empty if there is none."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""
