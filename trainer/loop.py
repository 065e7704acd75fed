"""The trainer process: sample a batch, make a step, report it, publish and save when due, repeat.

`step` s is the number of updates made before a batch; the batch of step s makes update s + 1, and weights
published then are of step s + 1.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from tba.common import wire
from tba.common.clock import Clock, SystemClock
from tba.common.config import Config
from tba.common.durable import exclusive_lock
from tba.common.errors import (
    BufferUnavailable,
    CheckpointError,
    ConfigError,
    Refused,
    TrainingBroken,
    UsageError,
)
from tba.common.log import get_logger
from tba.common.model_files import model_directory
from tba.common.process import keep_freed_memory, objects_frozen
from tba.common.quantity import quantity
from tba.trainer import checkpoint
from tba.trainer.batch import TrainBatch
from tba.trainer.batches import Batches
from tba.trainer.build import build
from tba.trainer.checkpoint import Checkpoint
from tba.trainer.checkpoint_writer import CheckpointWriter
from tba.trainer.connection import Connection, Dial, network
from tba.trainer.flops import Throughput
from tba.trainer.follow import END, PUBLISH, SAVE, STEP, follow, pack_batch, step_in_memory
from tba.trainer.host_copies import HostCopies
from tba.trainer.metrics import MetricsLog
from tba.trainer.publish import Publisher
from tba.trainer.ranks import ALONE, Ranks, join, until_lost
from tba.trainer.sign_of_life import SignOfLife
from tba.trainer.sinks.choose import open_sinks
from tba.trainer.step import StepResult
from tba.trainer.stopwatch import Stopwatch

log = get_logger(__name__)

_FLUSH_WAIT_SECONDS = 1.0
_STOP_FLUSH_SECONDS = 5.0


def train(
    config: Config,
    *,
    resume: bool,
    device: str,
    stop: Callable[[], bool],
    dial: Dial | None = None,
    last_step: int | None = None,
) -> None:
    """Train until `train.steps`, or until `stop()`: then save a checkpoint and return.

    `dial` says who answers as the buffer, by default the server at `buffer.address`. `last_step` ends training
    earlier than the schedules do. Raises ConfigError if another trainer works in the run's directory, RankLost if
    another process of this trainer ends.
    """
    prepare(config, device)
    keep_freed_memory()
    with until_lost():
        ranks = join(torch.device(device))
        if ranks.rank == 0:
            _lead(config, torch.device(device), ranks, stop, resume=resume, dial=dial, last_step=last_step)
        else:
            _follow(config, torch.device(device), ranks)


def _lead(
    config: Config,
    device: torch.device,
    ranks: Ranks,
    stop: Callable[[], bool],
    *,
    resume: bool,
    dial: Dial | None,
    last_step: int | None,
) -> None:
    """Train as rank 0, or alone."""
    with exclusive_lock(config.run.dir / "trainer.lock", f"another trainer works in {config.run.dir}: stop it first"):
        found = find_checkpoint(config, resume=resume)
        log.info("starting", model=config.model.path, buffer=config.buffer.address if dial is None else "offline")
        ranks.send(str(found.path) if found else "")
        trainer = Trainer(config, found, device, stop, dial=dial, last_step=last_step, ranks=ranks)
        try:
            with objects_frozen():
                trainer.run()
        finally:
            trainer.close()


def _follow(config: Config, device: torch.device, ranks: Ranks) -> None:
    """Train as one of the others."""
    path, _ = ranks.receive()
    learner, _ = build(config, model_directory(config.model.path), device, ranks)
    if path:
        checkpoint.restore(checkpoint.read(Path(path)), learner)
    with objects_frozen():
        follow(learner, ranks, micro_batch_tokens=config.train.micro_batch_tokens)
    ranks.close()


def find_checkpoint(config: Config, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from. Raises UsageError if there is one and `--resume` was not said."""
    if not resume:
        if existing := checkpoint.list_checkpoints(config.checkpoints):
            raise UsageError(
                f"{existing[-1]} is a checkpoint of an earlier start: pass --resume to go on from it, "
                "or set another run.dir"
            )
        return None
    found = checkpoint.newest(config.checkpoints)
    if found is not None and found.run != config.run.name:
        raise ConfigError(f"{found.path} belongs to run {found.run}, not to {config.run.name}: set another run.dir")
    return found


def prepare(config: Config, device: str) -> None:
    """The seed, the threads, the GPU of this process, and on a CPU only operations that repeat bit for bit."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError('train.gpu names a GPU, but torch sees none: set train.gpu = "cpu" or pass --cpu')
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(device == "cpu")
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


class Trainer:
    """One start of the trainer. `found` is the checkpoint to go on from."""

    def __init__(
        self,
        config: Config,
        found: Checkpoint | None,
        device: torch.device,
        stop: Callable[[], bool],
        clock: Clock | None = None,
        *,
        dial: Dial | None = None,
        last_step: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._steps = config.train.steps if last_step is None else min(last_step, config.train.steps)
        self._stop = stop
        self._clock = clock or SystemClock()
        self._model_files = model_directory(config.model.path)
        self.learner, self._plain = build(config, self._model_files, device, ranks)
        self._watch = self.learner.watch = Stopwatch(self._clock, _settler(device))
        self._throughput = Throughput(self.learner.policy, config.metrics.peak_tflops, devices=ranks.size)
        self._skipped = 0  # steps in a row, of this start
        self._unreported: dict[str, Any] | None = None
        saved_step = None
        if found is not None:
            checkpoint.restore(found, self.learner)
            self._unreported, saved_step = found.unreported, found.step
            log.info("resumed", checkpoint=found.path, step=found.step)
        self._metrics = MetricsLog(
            config.run.dir, first_step=self.learner.steps_done, sinks=open_sinks(config, self.learner.steps_done)
        )
        self._dial = dial or network(config.buffer.address)
        self._connection = Connection(self._dial, stop, self._clock)
        self._life = SignOfLife(self._dial)
        self._publisher: Publisher | None = None
        self._batches = Batches(
            self._connection, config, reference_at=self.learner.reference.name_at, last=self._steps, watch=self._watch
        )
        self._checkpoints = CheckpointWriter(
            config.checkpoints,
            run=config.run.name,
            keep=config.train.keep_checkpoints,
            device=device,
            before=self._metrics.sync,
            min_free=config.train.min_free_mib << 20,
            gathered=ranks.size > 1,
            gather=lambda: ranks.send(SAVE),
            saved_step=saved_step,
        )
        self._copies = HostCopies(device, gathered=self._plain is not self.learner.policy)
        self.learner.before_writing = self._before_writing

    def _before_writing(self) -> None:
        """Weights that are still being copied to the host must not change."""
        self._copies.before_update()
        self._checkpoints.copies.before_update()

    def run(self) -> None:
        """The life of a trainer. Returns after the last step, or after a checkpoint when `stop()`."""
        try:
            self.connect()
            self.publish()
            while not self._stop() and self.learner.steps_done < self._steps:
                self._one_step()
            self.save()
            self.finish()
        except BufferUnavailable:  # raised only when asked to stop while waiting for the buffer
            self.save()
        self._ranks.send(END)
        self._ranks.close()
        log.info("trainer stopped", step=self.learner.steps_done, steps=self._steps)

    def close(self) -> None:
        """Close everything, whatever happened."""
        if self._publisher is not None:
            self._publisher.close()
        self._life.close()  # what it said after the goodbye would be a trainer at work
        self._connection.close()
        self._checkpoints.close()
        self._metrics.close()

    def connect(self) -> None:
        welcome = self._connection.hello()
        self._life.start()
        if welcome.run_name != self._config.run.name:
            raise ConfigError(
                f"the buffer at {self._config.buffer.address} serves run {welcome.run_name}, "
                f"this configuration is of run {self._config.run.name}"
            )
        if self._unreported is not None:
            self._report(wire.ReportStep.model_validate(self._unreported))
        self._compare_history(welcome.recorded_steps)
        self._publisher = Publisher(
            self._config,
            self.learner.policy,
            self._model_files,
            plain=self._plain,
            next_version=welcome.next_version,
            stop=self._stop,
            dial=self._dial,
            copies=self._copies,
        )

    def _compare_history(self, recorded: int) -> None:
        done = self.learner.steps_done
        if recorded > done:
            log.info("repeating recorded steps", first=done, recorded=recorded)
        if recorded < done:
            log.warning("the buffer knows fewer steps than the checkpoint: another database?", step=done)

    def publish(self) -> None:
        """Searchers are to serve what trains: also at the start, where a resume may be behind the newest."""
        assert self._publisher is not None
        self._life.show("publishing", self._publisher.trouble)  # it may wait for the snapshot before
        self._ranks.send(PUBLISH, " ".join(self._publisher.gathers).encode())
        self._life.weights_version = self._publisher.publish(self.learner.steps_done)

    def _one_step(self) -> None:
        with self._watch.phase("wait"):
            batch = self.sample()
        if batch is None:
            return
        self._batches.ask_ahead(batch.step + 1)
        self.learn(batch)
        done, train = self.learner.steps_done, self._config.train
        if done % train.publish_every == 0 or done == self._steps:
            with self._watch.phase("publish"):
                self.publish()
        if done % train.checkpoint_every == 0:
            with self._watch.phase("checkpoint"):
                self._checkpoints.begin(self.learner)

    def sample(self) -> TrainBatch | None:
        """The batch of this step; None when `stop()`."""
        while not self._stop():
            if self._publisher is not None:
                self._publisher.check()
            batch = self._batches.take(self.learner.steps_done)
            if isinstance(batch, TrainBatch):
                return batch
            trouble = self._publisher.trouble if self._publisher is not None else ""
            self._life.show("waiting", trouble or batch)
        return None

    def learn(self, batch: TrainBatch) -> None:
        """Make the update of a batch, and have it on record here and in the buffer.

        Raises TrainingBroken, after a checkpoint, if it is one skipped step too many; MemoryShort.
        """
        self._life.show("training")
        self._ranks.send(STEP, pack_batch(batch) if self._ranks.size > 1 else b"")
        result = step_in_memory(self.learner, batch, micro_batch_tokens=self._config.train.micro_batch_tokens)
        seconds = self._watch.take()
        metrics = result.metrics | seconds | self._throughput.metrics(batch, seconds["seconds_step"])
        # Metrics first: if the report is not acknowledged, the checkpoint keeps it for the next start.
        self._metrics.record(batch.step, self._clock.wall(), metrics, blamed=result.blamed)
        self._report(
            wire.ReportStep(
                step=batch.step,
                metrics=metrics,
                reference=self.learner.reference.name_at(batch.step),
                trajectory_ids=list(result.reference),
                reference_logprobs=list(result.reference.values()),
            )
        )
        self._show(batch.step, metrics)
        self._count_skipped(batch.step, result)

    def _count_skipped(self, step: int, result: StepResult) -> None:
        if not result.skipped:
            self._skipped = 0
            return
        self._skipped += 1
        log.warning("step skipped: no update was made", step=step, in_a_row=self._skipped, reason=result.skipped)
        if self._skipped >= self._config.train.max_skipped_steps:
            skipped = quantity(self._skipped, "step was", "steps in a row were")
            raise TrainingBroken(
                f"{skipped} skipped, the last is step {step}: {result.skipped}. {self._last_checkpoint()}: look at "
                "these trajectories, then pass --resume"
            )

    def _last_checkpoint(self) -> str:
        try:
            self.save()
        except CheckpointError as error:
            return str(error)
        return f"A checkpoint of step {self.learner.steps_done} is saved"

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        names = {"loss": "loss", "reward": "reward_mean", "staleness": "staleness_mean"}
        shown = {short: metrics[name] for short, name in names.items() if name in metrics}
        progress = {"step": float(self.learner.steps_done), "steps": float(self._steps)}
        self._life.show("training", metrics=shown | progress)
        kl = {"kl": metrics["kl"]} if "kl" in metrics else {}
        log.info("step", step=step, **shown, **kl, seconds=metrics["seconds_step"])

    def _report(self, report: wire.ReportStep) -> None:
        self._unreported = report.model_dump()
        try:
            self._connection.ask(report, wire.Done)
        except Refused as refusal:
            if refusal.code != "unknown_step":
                raise
            # The update is made, and no later start could report it either: what would another try be for?
            log.warning(
                "the buffer does not know this step: is its database an older copy? Training goes on, and the step "
                "stays missing in it",
                step=report.step,
            )
        self._unreported = None

    def save(self) -> None:
        """A checkpoint of the present step, unless there is one or nothing has been trained; it waits for it."""
        if self.learner.steps_done:
            self._life.show("saving")
            with self._watch.phase("checkpoint"):
                self._checkpoints.save(self.learner, self._unreported)

    def finish(self) -> None:
        """See the last snapshot announced, then tell everybody that the run is over."""
        assert self._publisher is not None
        if self._stop():
            self._publisher.flush(_STOP_FLUSH_SECONDS)
            return
        while not self._publisher.flush(_FLUSH_WAIT_SECONDS):
            if self._stop():
                return
            self._life.show("publishing", self._publisher.trouble)
        self._connection.ask(wire.FinishRun(step=self.learner.steps_done), wire.Done)


def _settler(device: torch.device) -> Callable[[], None]:
    """Waits for what computes, and not for copies to the host that are under way beside it."""
    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).synchronize()
