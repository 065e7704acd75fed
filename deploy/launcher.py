"""`tba run`: buffer, searchers and trainer as child processes of this machine under one supervisor."""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tba.common import run_files
from tba.common.config import Config, LaunchSection
from tba.common.config.paths import asked_gpus, hub_models
from tba.common.errors import EXIT_CONFIG, TaskError, TbaError
from tba.common.evaluations import Row, is_measured, read_evaluations
from tba.common.run_status import Facts, ask_status, monitor
from tba.common.system.devices import Gpu, list_gpus, shared_gpus
from tba.common.weights.model_files import check_hub, model_directory
from tba.common.wire.client import BufferClient
from tba.deploy.child import Child, RestartPolicy, drain_seconds, ending
from tba.deploy.display import Display
from tba.deploy.fleet import evaluator_child, one_thread_each, searcher_children
from tba.deploy.plot import draw_curves, read_curve
from tba.deploy.run_directory import ENDING, EVALUATES, FAILED, holds_run, mark
from tba.deploy.supervisor import Supervisor

_STATUS_SECONDS = 0.5
_STATUS = "STATUS="
_PICTURE = "run.png"


class Roles(NamedTuple):
    buffer: Child
    searchers: list[Child]
    evaluators: list[Child]
    trainer: Child

    @property
    def all(self) -> list[Child]:
        """Every child, in the order of their start."""
        return [self.buffer, *self.searchers, *self.evaluators, self.trainer]


def children_of(
    config: Config, arguments: Sequence[str], *, resume: bool, present: Sequence[Gpu] | None = None
) -> Roles:
    """Return the children of a run, none of them started. `present` as in `searcher_groups`, with the same errors."""

    def child(name: str, command: Sequence[str]) -> Child:
        return Child(name, name, command, logs / f"{name}.log", environment=one_thread_each(config))

    logs = config.run.dir / run_files.LOGS
    searchers = searcher_children(config, arguments, with_trainer=True, present=present)
    for searcher in searchers:
        searcher.name = f"search-{searcher.name.removeprefix('cpu').removeprefix('gpu')}"
        searcher.log_file = logs / f"{searcher.name}.log"
    trainer = child("trainer", ["train", *arguments, *(["--resume"] if resume else [])])
    trainer.restart_arguments = [] if resume else ["--resume"]
    trainer.gpus = config.train.gpu
    evaluators = [evaluator_child(config, arguments, logs / "evaluator.log")] if config.eval.gpu else []
    if config.search.engine == "vllm" and asked_gpus(config):
        # Those on one GPU start one after the other, the trainer last: vLLM takes what others allocate during its start
        # for its own, and fails if they free memory (docs/decisions/0046-engines-measure-alone.md).
        engines, gpus = [*searchers, *evaluators], list_gpus() if present is None else present
        for number, one in enumerate([*engines, trainer]):
            one.behind = [engine for engine in engines[:number] if shared_gpus(engine.gpus, one.gpus, gpus)]
    return Roles(child("buffer", ["buffer", "serve", *arguments]), searchers, evaluators, trainer)


class Launcher:
    """Buffer, searchers, trainer and an evaluator, all with these `arguments`.

    The others start when the buffer is ready: another one may answer at its address until then.
    """

    def __init__(self, config: Config, arguments: Sequence[str], *, resume: bool) -> None:
        self._config = config
        self._roles = roles = children_of(config, arguments, resume=resume)
        for child in roles.all[1:]:
            child.after = roles.buffer
        self._supervisor = Supervisor(roles.all, config.launch)

    def run(self, stop: Callable[[], bool], display: Display) -> bool:
        """Run until the last step (True) or `stop()` (False); no child outlives this. Raises TbaError if one fails."""
        client = monitor(self._config, "launcher")
        with closing(client), self._supervisor:
            evaluates = False
            try:
                finished = self._work(client, stop, display)
                evaluates = finished and self._config.eval.at_end
                return finished
            except TbaError as error:
                mark(self._config, FAILED, str(error))
                raise
            finally:
                told = (EVALUATES, "`tba run` evaluates the kept snapshots") if evaluates else (ENDING,)
                mark(self._config, *told)
                self._end()

    def _work(self, client: BufferClient, stop: Callable[[], bool], display: Display) -> bool:
        with display.live:
            self._watch(client, stop, display)
            if (failed := self._supervisor.failed()) is not None:
                raise failed.failure()
            facts = self._facts(client)
            display.show(facts, last=True)
            if stop():
                saves = (
                    "the trainer saves a checkpoint" if self._roles.trainer.ready else "there is nothing new to save"
                )
                display.note(f"stopping: {saves if holds_run(self._config) else 'nothing was trained yet'}")
        return facts.status is not None and facts.status.finished and not stop()

    def _watch(self, client: BufferClient, stop: Callable[[], bool], display: Display) -> None:
        asked_at = 0.0
        for _ in self._supervisor.rounds(lambda: stop() or self._roles.trainer.ended or self._supervisor.failed()):
            if self._roles.buffer.exit_code == 0:
                raise TbaError(
                    f"the buffer was stopped before the run was done; its log is {self._roles.buffer.log_file}"
                )
            if time.monotonic() - asked_at >= _STATUS_SECONDS:
                asked_at = time.monotonic()
                # First, so that the status holds it.
                if self._roles.buffer.ready:
                    self._supervisor.report_troubles(client)
                display.show(self._facts(client))

    def _facts(self, client: BufferClient) -> Facts:
        # Until the buffer is ready, another one may answer at its address.
        status = ask_status(client) if self._roles.buffer.ready else None
        silent, failing = client.silent_seconds, self._supervisor.troubles()
        return Facts(status, client.address, silent, failing, starting=not self._roles.buffer.ready)

    def _end(self) -> None:
        """Stop the trainer first (it saves a checkpoint), the buffer last (it stores what the others deliver).

        What is still loading has nothing to save, and may not react to SIGTERM: it is killed.
        """
        drain, roles = drain_seconds(self._config), self._roles
        self._supervisor.kill([child for child in roles.all[1:] if not child.ready])
        self._supervisor.stop([roles.trainer], drain_seconds=drain_seconds(self._config, trains=True))
        for children in (roles.evaluators, roles.searchers, [roles.buffer]):
            self._supervisor.stop(children, drain_seconds=drain)


def evaluate_at_end(config: Config, arguments: Sequence[str], stop: Callable[[], bool], terminal: Console) -> None:
    """Evaluate the kept snapshots, draw the run, and print the accuracy before and after; less if `stop()`."""
    terminal.print("evaluating the kept snapshots on the held-out prompts")

    def tell(doing: str) -> None:
        mark(config, EVALUATES, f"`tba run` {doing}")
        terminal.print(doing)

    failure = None
    try:
        if not evaluate_in_child(config, arguments, stop, tell):
            return
    except TbaError as error:
        failure = error
    rows = read_evaluations(config.run.dir, config.run.name)
    # A judge that is down leaves a run whose picture is worth seeing.
    if failure is None or not all(map(is_measured, rows)):
        picture = draw_curves([read_curve(config.run.dir, config.run.name)], config.run.dir / _PICTURE)
        terminal.print(before_and_after(rows), soft_wrap=True)
        terminal.print(f"picture: {picture}", soft_wrap=True)
    if failure is not None:
        raise failure


def before_and_after(rows: Sequence[Row]) -> str:
    """Return one line on the first and the last evaluation of a run."""
    ends = rows[0], rows[-1]
    has_accuracy = any("accuracy" in row for row in ends)
    name, what, form = ("accuracy", "greedy accuracy", ".1%") if has_accuracy else ("reward", "reward", ".4g")
    before, after = (
        format(row[name], form) if name in row else f"not measured ({row.get('not_measured', 'unknown')})"
        for row in ends
    )
    return f"held-out {what}: {before} before, {after} after"


def evaluate_in_child(
    config: Config, arguments: Sequence[str], stop: Callable[[], bool], tell: Callable[[str], None]
) -> bool:
    """Run `tba eval --all` as a child. `tell` receives which snapshot is evaluated, of how many.

    Returns False if stopped. Raises TbaError if the child fails.
    """
    log_file, command = config.run.dir / run_files.LOGS / "eval.log", ["eval", "--all", *arguments]
    child = Child("eval", "eval", command, log_file, RestartPolicy.NEVER, environment=one_thread_each(config))
    _run_once(child, stop, partial(mark, config, ENDING), tell)
    if child.last_code:
        raise child.failure()
    return not stop()


def _run_once(
    child: Child,
    stop: Callable[[], bool],
    at_end: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a child to its end or until `stop()`, then call `at_end` and stop it. `tell` receives its status."""
    with Supervisor([child], LaunchSection()) as supervisor:
        for _ in supervisor.rounds(lambda: stop() or child.ended):
            for notice in child.notices:
                if notice.startswith(_STATUS):
                    tell(notice.removeprefix(_STATUS))
        at_end()
        supervisor.stop([child], drain_seconds=1.0)


def download_models(config: Config, report: Callable[[str], None]) -> None:
    """Download the hub's models of a run, telling `report`. Raises ConfigError before any download."""
    models = hub_models(config)
    for key, path in models.items():
        report(check_hub(path, setting=key))
    for key, path in models.items():
        model_directory(path, setting=key)


def check_task_in_child(config: Config, arguments: Sequence[str], stop: Callable[[], bool]) -> None:
    """Load the task in a child, or until `stop()`: its code may end or fill the process.

    Raises TaskError if the task does not load, TbaError for another failure.
    """
    with tempfile.TemporaryDirectory(prefix="tba-check-") as directory:
        # Unbuffered, so that output of the task comes before the error sentence, which must be the last line.
        command, environment = ["doctor", "--only", "task", "--strict", *arguments], {"PYTHONUNBUFFERED": "1"}
        log_file = Path(directory, "check.log")
        child = Child("check", "check", command, log_file, RestartPolicy.NEVER, environment=environment)
        _run_once(child, stop)
        if code := child.last_code:
            last = child.log_tail().rpartition("\n")[2] or "it wrote nothing"
            ended = f"task.name {config.task.name}: the process that loaded it {ending(code)}: {last}"
            # A lack of memory may pass by itself.
            error = TaskError if code == EXIT_CONFIG else TbaError
            raise error((child.last_error() if code > 0 else "") or ended)
