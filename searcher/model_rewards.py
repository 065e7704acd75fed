"""The reward model's scores: one process per searcher, in which responses of all groups meet in batches.

submit ──► waiting ──► a round to the idle worker, which cuts it into batches by length ──► scores ──► done

The searcher never waits for the model. A worker that exceeds its time or dies is started again, after a pause that
doubles; the pairs of the forward pass that it died of get the error, the others go back to the front of the queue.
While there is no worker, a pair waits `reward_model.time_limit_seconds` before it gets the error: generation, which
is two loads ahead at most, then goes on at that pace. Once the model has been loaded, nothing that happens to it ends
the searcher.
"""

import multiprocessing.connection
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tba.common.config import Config, RewardModelSection
from tba.common.errors import ConfigError, WorkerLost
from tba.common.guard import SessionGuard
from tba.common.log import get_logger
from tba.common.model_files import model_directory
from tba.searcher.scores import Item
from tba.searcher.worker_process import WorkerProcess, pause_after

log = get_logger(__name__)

_ROUND = 256  # pairs: enough to sort by length, few enough to come back soon
_GATHER_SECONDS = 0.05  # an idle worker waits so long for more pairs
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ModelScore:
    """The logit of a response, or a sentence of why there is none."""

    ticket: int
    score: float
    error: str | None


class ModelScorer:
    """Scores by the classifier of `[reward_model]`. `device` is the searcher's own: `cpu` or `cuda`.

    Start it in the main thread (the worker dies with the thread that started it) and before the engine. Returns when
    the model is loaded, so that an engine on the same GPU finds its memory taken, or after `stop()`: then it scores
    nothing and is to be closed. Raises ConfigError if the files are no reward model, WorkerLost if it was not loaded
    for another reason.
    """

    def __init__(self, config: RewardModelSection, device: str, stop: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        self._directory = model_directory(config.path, setting="reward_model.path")
        self._device, self._environment = _placement(config.device, device)
        self._waiting: deque[Item] = deque()
        self._sent: dict[int, Item] = {}  # by ticket: what the worker has, in order
        self._running: list[int] = []  # of these, the tickets of the forward pass that it is at
        self._answers: list[ModelScore] = []
        self._guard = SessionGuard()
        self._worker: WorkerProcess | None = None
        self._ready = self._was_ready = False
        self._answered = False  # something of what was sent last
        self._failures = 0  # in a row, without a score in between
        self._trouble = ""  # the last one
        self._last_words = ""  # of a worker that does not load the model
        self._down_since = 0.0  # monotonic
        self._start_at = 0.0  # monotonic; not before this
        self.timeouts = 0
        self._await_first_start(stop)

    @property
    def channels(self) -> Sequence[socket.socket]:
        """Readable when there may be something for `done`."""
        return [self._worker.channel] if self._worker is not None else []

    def submit(self, item: Item) -> None:
        """Queue a response."""
        self._waiting.append(item)

    def done(self) -> list[ModelScore]:
        """What is scored by now. Never blocks, except to reap a worker that was killed."""
        self._tend()
        if self._ready:
            self._deal()
        elif self._failures:
            self._give_up_waiting()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        self._guard.close()

    def _await_first_start(self, stop: Callable[[], bool]) -> None:
        try:
            while not (self._ready or stop()):
                self._tend()
                multiprocessing.connection.wait(self.channels, _POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        log.info("reward model", path=self.config.path, device=self._device, ready=self._ready)

    def _tend(self) -> None:
        if self._worker is None:
            if time.monotonic() < self._start_at:
                return
            settings = {
                "config": self.config.model_dump(mode="json"), "directory": str(self._directory), "device": self._device
            }  # fmt: skip
            module = "tba.searcher.reward_model_worker"
            self._worker = WorkerProcess(module, settings, self._guard, self._environment)
        self._worker.flush()
        self._receive(self._worker)
        if trouble := self._trouble_of(self._worker):
            self._bury(self._worker, trouble)

    def _receive(self, worker: WorkerProcess) -> None:
        for kind, *content in worker.receive():
            if kind == "ready":
                self._ready = self._was_ready = True
            elif kind == "refused" and not self._was_ready:
                raise ConfigError(content[0])
            elif kind in ("refused", "failed"):
                self._last_words = content[0]
            elif kind == "begin":
                self._running = content[0]
            elif kind == "scores":
                self._answered = True
                self._take(content[0])

    def _take(self, scores: Sequence[tuple[int, float | None, str | None]]) -> None:
        self._running = []
        for ticket, score, error in scores:
            del self._sent[ticket]
            if error is None:
                self._failures = 0
            self._answers.append(ModelScore(ticket, score or 0.0, error))

    def _trouble_of(self, worker: WorkerProcess) -> str | None:
        """Why the worker must be replaced."""
        if death := worker.death():
            return death
        silent = worker.silent_seconds
        if self._sent and silent > self.config.time_limit_seconds:
            self.timeouts += 1
            return f"timed out after {self.config.time_limit_seconds:g} s"
        if not self._ready and silent > self.config.load_seconds:
            return f"not ready within reward_model.load_seconds = {self.config.load_seconds:g}"
        return None

    def _bury(self, worker: WorkerProcess, trouble: str) -> None:
        self._receive(worker)  # what it answered before its end counts
        trouble, self._last_words = self._last_words or trouble, ""
        if not self._was_ready:
            raise WorkerLost(f"reward_model.path {self.config.path} is not loaded: {trouble}")
        worker.kill()
        # One that ends before it begins may have died of any of them. One that has answered some made progress, and
        # what it had not begun goes back.
        self._fail(self._running or ([] if self._answered else list(self._sent)), trouble)
        self._waiting.extendleft(reversed(self._sent.values()))
        self._sent.clear()
        self._worker, self._ready = None, False
        self._failures += 1
        self._trouble, self._down_since = trouble, time.monotonic() if self._failures == 1 else self._down_since
        pause = pause_after(self._failures)
        self._start_at = time.monotonic() + pause
        log.warning("reward model replaced", reason=trouble, again_in_seconds=pause, failures=self._failures)

    def _fail(self, tickets: Sequence[int], trouble: str) -> None:
        self._take([(ticket, None, trouble) for ticket in tickets])

    def _deal(self) -> None:
        if self._worker is None or self._sent or not self._waiting:
            return
        waited = time.monotonic() - self._waiting[0].submitted_at
        if len(self._waiting) < _ROUND and waited < _GATHER_SECONDS:
            return
        for _ in range(min(_ROUND, len(self._waiting))):
            item = self._waiting.popleft()
            self._sent[item.ticket] = item
        self._answered = False
        self._worker.send([[item.ticket, item.prompt.text, item.text] for item in self._sent.values()])

    def _give_up_waiting(self) -> None:
        """Fail what has waited too long for a worker; the time when there was one does not count."""
        latest = time.monotonic() - self.config.time_limit_seconds
        while self._waiting and max(self._waiting[0].submitted_at, self._down_since) < latest:
            self._answers.append(ModelScore(self._waiting.popleft().ticket, 0.0, f"no worker: {self._trouble}"))


def make_model_scorer(config: Config, device: str, stop: Callable[[], bool]) -> ModelScorer | None:
    """The scorer of `[reward_model]`, None without one. Raises ConfigError, WorkerLost."""
    return ModelScorer(config.reward_model, device, stop) if config.reward_model.path else None


def _placement(wanted: str, own: str) -> tuple[str, dict[str, str]]:
    """The device as torch names it in the worker, and the environment that shows it that device.

    A GPU is named by its number in nvidia-smi, whichever the searcher itself sees.
    """
    kind, _, number = (own if wanted == "auto" else wanted).partition(":")
    if kind == "cpu":
        return "cpu", {}
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": number} if number else {}
    return "cuda:0", visible
