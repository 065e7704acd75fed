"""The reward of a response: the task's, plus the reward model's if there is one; or the answers of an environment.

submit ──┬──► task's workers ──┬──► both results ──► done
         └──► reward model ────┘

The reward model has one worker per searcher, in which responses of all groups are batched together. It has the model,
and cuts what it is sent into batches by length; or it asks the HTTP server that has it. Once there was a first score,
no failure of the model ends the searcher: while there is no worker or no server, a response fails after
`time_limit_seconds`, and generation, which is at most two loads of requests ahead, continues at that pace.
"""

import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tba.common.config import RewardModelSection, TaskSection
from tba.common.config.task import MODEL_PART
from tba.common.errors import ConfigError, WorkerLost
from tba.common.log import get_logger
from tba.common.weights.model_files import model_directory
from tba.common.wire.fields import LARGEST_REWARD
from tba.searcher.scoring.scoring import Call, Item, Scored, failed
from tba.searcher.scoring.task_scorer import TaskScorer
from tba.searcher.scoring.worker_pool import LOAD_SECONDS, PoolSettings, Result, WorkerPool
from tba.searcher.tasks.task import Prompt, Reward, Task

log = get_logger(__name__)

# Enough pairs to sort them by length, few enough that results come back soon.
_BATCH = 256
_GATHER_SECONDS = 0.05
_POLL_SECONDS = 0.05
# A worker that asks a server keeps its limits itself, and is replaced if it has not done so this much later.
_GRACE_SECONDS = 5.0


class ModelScorer(WorkerPool):
    """Scores by the classifier of `[reward_model]`.

    `device` is the searcher's own: `cpu` or `cuda`. The constructor returns when the model is loaded, so that an
    engine on the same GPU finds its memory taken, or after `stop()`: then it scores nothing and must be closed. Raises
    ConfigError if it is not a reward model, WorkerLost if it was not loaded or reached for another reason.
    """

    def __init__(self, config: RewardModelSection, device: str, stop: Callable[[], bool] = lambda: False) -> None:
        self.config = config
        super().__init__(_pool(config, device))
        try:
            while not (self.ready or stop()):
                self.poll()
                if self.refusal:
                    raise ConfigError(self.refusal)
                if self.failed_starts:
                    what = "url does not answer" if config.url else f"path {config.path} is not loaded"
                    raise WorkerLost(f"reward_model.{what}: {self.last_error}")
                multiprocessing.connection.wait(self.channels, _POLL_SECONDS)
        except BaseException:
            self.close()
            raise
        log.info("reward model", model=config.source, ready=self.ready)


def _pool(config: RewardModelSection, device: str) -> PoolSettings:
    """Return what runs the model, or asks the server that has it."""
    seconds = config.time_limit_seconds
    common = partial(PoolSettings, name="reward model", workers=1, max_wait_seconds=seconds)
    settings: dict[str, Any] = {"config": config.model_dump(mode="json", exclude={"api_key"})}
    if config.url:
        return common(
            module="tba.searcher.scoring.http_model",
            settings=settings | {"key": config.api_key.get_secret_value(), "load_seconds": LOAD_SECONDS},
            batch=max(_BATCH, config.concurrency),
            load_seconds=LOAD_SECONDS + _GRACE_SECONDS,
            work_seconds=seconds + _GRACE_SECONDS,
        )
    device, environment = _placement(config.device, device)
    directory = model_directory(config.path, setting="reward_model.path")
    return common(
        module="tba.searcher.scoring.classifier",
        settings=settings | {"directory": str(directory), "device": device},
        batch=_BATCH,
        load_seconds=LOAD_SECONDS,
        work_seconds=seconds,
        gather_seconds=_GATHER_SECONDS,
        environment=environment,
    )


def _placement(configured: str, own: str) -> tuple[str, dict[str, str]]:
    """The device as torch names it in the worker, and the environment that shows the worker only that device.

    A configured GPU number is the one of nvidia-smi, whichever GPU the searcher itself sees.
    """
    kind, _, number = (own if configured == "auto" else configured).partition(":")
    if kind == "cpu":
        return "cpu", {}
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": number} if number else {}
    return "cuda:0", visible


class Rewards:
    """Scores responses in other processes, by the task and `weight` times the `model`, which it closes with itself."""

    def __init__(
        self, task: Task, config: TaskSection, model: ModelScorer | None = None, *, weight: float = 1.0
    ) -> None:
        self._task = TaskScorer(task, config)
        self._model = model
        self._pools: list[WorkerPool] = [self._task, *([model] if model is not None else [])]
        self._weight = weight
        # By ticket: monotonic time of submission, and with a model the results that have arrived.
        self._submitted_at: dict[int, float] = {}
        self._by_task: dict[int, Scored] = {}
        self._by_model: dict[int, Result] = {}
        self.errors = 0
        # Latency of the last response.
        self.latency_seconds = 0.0

    @property
    def waiting(self) -> int:
        """Number of responses submitted and not yet returned by `wait`."""
        return len(self._submitted_at)

    @property
    def timeouts(self) -> int:
        return sum(pool.timeouts for pool in self._pools)

    def submit(self, ticket: int, prompt: Prompt, text: str, finished: bool) -> None:
        """Queue a response; `text` has no lone surrogates."""
        item = Item(ticket, prompt, text, finished, time.monotonic())
        self._submit(item)
        if self._model is not None:
            self._model.submit(item)

    def play(
        self,
        ticket: int,
        prompt: Prompt,
        replies: Sequence[tuple[str, bool]],
        *,
        last: bool = False,
        close: bool = False,
    ) -> None:
        """Queue a call of an episode's environment, which `wait` returns as a Scored with a `turn`.

        `ticket` is the episode's for its whole life, and it has at most one call at a time. `replies` are all so far,
        as (decoded text, whether it was finished); none makes the environment and resets it. The environment is closed
        after a turn that is done or the `last`, after an error, or with `close`, instead of a step. So an episode of
        two turns is `play(1, prompt, [])`, `play(1, prompt, [one])`, `play(1, prompt, [one, two], last=True)`.

        It goes to the worker that holds the episode. If that was replaced, another one repeats the replies, unless the
        task is `random`; an environment that answers differently then fails.
        """
        told = self._task.told[ticket]
        self._submit(Item(ticket, prompt, "", True, time.monotonic(), Call(replies, last, close, told)))

    def _submit(self, item: Item) -> None:
        self._submitted_at[item.ticket] = item.submitted_at
        self._task.submit(item)

    def wait(self, seconds: float) -> list[Scored]:
        """The responses scored since the last call. Waits at most `seconds` for a worker to send something.

        What a worker sends need not be a result, so the list may be empty before the time is over.

        Raises TaskError and WorkerLost as `TaskScorer`.
        """
        if channels := [channel for pool in self._pools for channel in pool.channels]:
            # What was submitted since the last call must not wait for another result.
            for pool in self._pools:
                pool.send()
            multiprocessing.connection.wait(channels, seconds)
        scored = self._task.done()
        if self._model is not None:
            self._by_task |= {one.ticket: one for one in scored}
            self._by_model |= {result.item.ticket: result for result in self._model.poll()}
            both = sorted(self._by_task.keys() & self._by_model.keys())
            scored = [_sum(self._by_task.pop(one), self._by_model.pop(one), self._weight) for one in both]
        for one in scored:
            self.latency_seconds = time.monotonic() - self._submitted_at.pop(one.ticket)
            self.errors += one.error is not None
        return scored

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _sum(scored: Scored, by_model: Result, weight: float) -> Scored:
    if scored.error is not None:
        return scored
    total, error = 0.0, by_model.error
    if error is None:
        total = scored.reward.total + weight * by_model.value
        error = None if abs(total) <= LARGEST_REWARD else f"the reward would be {total}"
    if error is not None:
        return Scored(scored.ticket, scored.text, *failed(f"model: {error}"), error_kind="reward_model")
    return Scored(scored.ticket, scored.text, Reward(total, {**scored.reward.parts, MODEL_PART: by_model.value}), None)
