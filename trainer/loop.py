"""The trainer process: sample a batch, make a step, report it, publish and save when due, repeat.

Step s comes after s updates: its batch makes update s + 1, and weights published after it are those of step s + 1.
"""

import contextlib
import time
from collections.abc import Callable

import msgspec
import torch

from tba.common import errors, run_files
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.log import get_logger
from tba.common.run_identity import RunIdentity, refuse_other_run, refuse_other_server
from tba.common.system.durable import exclusive_lock
from tba.common.system.process import extend_start, keep_freed_memory, notify_systemd, objects_frozen
from tba.common.system.watchdog import Watchdog
from tba.common.weights.model_files import model_directory
from tba.common.wire import messages
from tba.common.wire.keys import buffer_client_keys
from tba.trainer import checkpoint
from tba.trainer.batch.batch import TrainBatch, pack_batch, unpack_batch
from tba.trainer.buffer_link import BatchFetcher, Dial, HeartbeatThread, goodbye, hello, network
from tba.trainer.checkpoint import Checkpoint, CheckpointWriter
from tba.trainer.distributed import ALONE, ASK, END, PUBLISH, SAVE, STEP, Ranks, join, until_lost
from tba.trainer.metrics.flops import Throughput
from tba.trainer.metrics.health import Health
from tba.trainer.metrics.metrics_log import MetricsLog, choose_answers, open_sinks
from tba.trainer.metrics.stopwatch import Stopwatch, wait_for_compute
from tba.trainer.model.adapters import gathered
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.preflight.check import Report
from tba.trainer.publishing.publisher import Publisher
from tba.trainer.step.build import build, prepare, require_memory
from tba.trainer.step.learner import Learner, StepResult

log = get_logger(__name__)

_FLUSH_WAIT_SECONDS = 1.0
_STOP_FLUSH_SECONDS = 5.0
# After this many skipped steps in a row the trainer saves a checkpoint and stops.
_MAX_SKIPPED_STEPS = 5


def train(
    config: Config,
    *,
    resume: bool,
    device: str,
    stop: Callable[[], bool],
    dial: Dial | None = None,
    last_step: int | None = None,
) -> None:
    """Train until `train.steps` or until `stop()`, then save a checkpoint and return.

    `dial` makes the clients of the buffer, by default of the server at `buffer.address`. `last_step` ends training
    early without changing the schedules. Raises ConfigError if another trainer works in the run's directory, RankLost
    if another process of this trainer ends.
    """
    prepare(config, device)
    keep_freed_memory()
    lock, holder = config.run.dir / run_files.TRAINER_LOCK, f"another trainer works in {config.run.dir}: stop it first"
    place = torch.device(device)
    with until_lost():
        ranks = join(place, stop)
        report = require_memory(config, place, ranks)
        if ranks.rank > 0:
            found = checkpoint.share(None, ranks)
            learner, _ = build(config, model_directory(config.model.path), place, ranks, report)
            if found is not None:
                checkpoint.restore(found, learner)
            notify_systemd("READY=1")
            with objects_frozen():
                run_other_rank(learner, ranks, stop)
            ranks.close()
            return
        with exclusive_lock(lock, holder):
            found = checkpoint.find(config.checkpoints, resume=resume, otherwise="set another run.dir")
            if found is not None:
                refuse_other_run(found.path, [RunIdentity(found.run)], RunIdentity(config.run.name))
            log.info("starting", model=config.model.path, buffer=config.address if dial is None else "offline")
            checkpoint.share(found, ranks)
            trainer = Trainer(config, found, place, stop, dial=dial, last_step=last_step, ranks=ranks, report=report)
            with contextlib.closing(trainer), objects_frozen():
                trainer.run()


def run_other_rank(learner: Learner, ranks: Ranks, stop: Callable[[], bool] = lambda: False) -> None:
    """Take part in what rank 0 commands until END.

    Ranks other than 0 have no connection to the buffer and write no files. Only rank 0 acts on `stop()`, of any of
    them. Raises RuntimeError if rank 0 is gone, RankLost if other ranks alone were told to stop, OutOfMemory.
    """
    while True:
        command, payload = ranks.receive()
        if command == STEP:
            try:
                learner.step_in_memory(unpack_batch(payload))
            except errors.OutOfMemory:
                # This rank alone is short of memory; the others would wait for it forever. Its end is noticed.
                raise
            except errors.TbaError as error:
                # Rank 0 has raised the same error and decides how to continue.
                log.debug("step failed", reason=str(error))
        elif command == PUBLISH:
            with torch.no_grad():
                for kind in payload.decode().split():
                    for _ in gathered(learner.policy, kind):
                        pass
        elif command == SAVE:
            for _ in checkpoint.tensors_of(learner):
                pass
        elif command == ASK:
            ranks.any(stop())
        elif command == END:
            _check_end(ranks, bool(payload), stop)
            return


def _check_end(ranks: Ranks, finished: bool, stop: Callable[[], bool]) -> None:
    """Raise RankLost at the end of an unfinished training if other ranks were told to stop, but not this one.

    Its supervisor then starts it again, and it waits for them.
    """
    if ranks.size > 1 and not finished and not stop():
        raise errors.RankLost("another node of this trainer was stopped: a checkpoint is saved, continue with --resume")


class Trainer:
    """One start of the trainer, on rank 0. `found` is the checkpoint to resume from."""

    def __init__(
        self,
        config: Config,
        found: Checkpoint | None,
        device: torch.device,
        stop: Callable[[], bool],
        *,
        dial: Dial | None = None,
        last_step: int | None = None,
        ranks: Ranks = ALONE,
        report: Report | None = None,
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._steps = config.train.steps if last_step is None else min(last_step, config.train.steps)
        self._should_stop, self._watchdog = stop, Watchdog()
        self._clock = SystemClock()
        self._watch = Stopwatch(self._clock, wait_for_compute(device))
        self._published = HostBuffers(device, gathered=bool(config.lora.rank) or ranks.size > 1)
        saved = HostBuffers(device, gathered=ranks.size > 1)
        self._model_files = model_directory(config.model.path)
        # After a download, and before the model is loaded.
        extend_start()
        self.learner, self._unwrapped = build(
            config, self._model_files, device, ranks, report, watch=self._watch, copies=(self._published, saved)
        )
        self._throughput = Throughput(self.learner.policy, devices=ranks.size)
        self._health, self._skipped_in_a_row = Health(config.objective, config.model.dtype), 0
        self._unreported = msgspec.convert(found and found.unreported, messages.ReportStep | None)
        if found is not None:
            checkpoint.restore(found, self.learner)
            log.info("resumed", checkpoint=found.path, step=found.step)
        self._metrics = MetricsLog(config.run.dir, first_step=self.learner.steps_done, sinks=open_sinks(config))
        self._checkpoints = CheckpointWriter(config, saved, self._metrics, ranks, found.step if found else None)
        self._dial = dial or network(config.address, buffer_client_keys(config.security.keys, config.address))
        self._client = self._dial("trainer", "trainer")
        # Not to the buffer of another run.
        self._is_known = True
        self._heartbeat = HeartbeatThread(self._dial)
        self._batches = BatchFetcher(
            self._client,
            config.train,
            stop=self._stop,
            last=self._steps,
            watch=self._watch,
            ahead=config.max_staleness != 0,
        )
        # From `connect` on.
        self._publisher: Publisher | None = None

    def _stop(self) -> bool:
        """Whether any rank is to stop. Every step and every wait of the training thread asks: it is alive."""
        self._watchdog.beat()
        # Each node has a supervisor, which may be stopped alone.
        self._ranks.send(ASK)
        return self._ranks.any(self._should_stop())

    def run(self) -> None:
        """Train to the last step, or until `stop()`, and save a checkpoint."""
        try:
            self.connect()
            self.publish()
            while not self._stop() and self.learner.steps_done < self._steps:
                self._one_step()
            self.save()
            self.finish()
        # Raised only if `stop()` becomes true while a request waits for the buffer.
        except errors.BufferUnavailable:
            self.save()
        finished = self.learner.steps_done >= self._steps
        self._ranks.send(END, b"finished" if finished else b"")
        self._ranks.close()
        how = "the run is finished: --resume with more train.steps extends it" if finished else "--resume continues it"
        log.info("trainer stopped", step=self.learner.steps_done, steps=self._steps, next=how)
        _check_end(self._ranks, finished, self._should_stop)

    def close(self) -> None:
        """Close everything, also after an error."""
        if self._publisher is not None:
            self._publisher.close()
        # Before the goodbye: after a later heartbeat the buffer would consider the trainer alive.
        self._heartbeat.close()
        goodbye(self._client) if self._is_known else self._client.close()
        self._checkpoints.close()
        self._metrics.close()

    def connect(self) -> None:
        """Introduce the trainer to the buffer, and send the report that the last start could not send."""
        name = self._config.run.name
        welcome = hello(self._client, name, self._stop, self._clock)
        self._is_known = welcome.run_name == name
        refuse_other_server(self._config.address, welcome.run_name, name)
        self._heartbeat.start()
        notify_systemd("READY=1")
        if self._unreported is not None:
            self._report(self._unreported)
        done, recorded = self.learner.steps_done, welcome.recorded_steps
        if recorded > done:
            log.info("repeating recorded steps", first=done, recorded=recorded)
        if recorded < done:
            log.warning("the buffer knows fewer steps than the checkpoint: another database?", step=done)
        self._publisher = Publisher(
            self._config,
            self.learner.policy,
            self._model_files,
            unwrapped=self._unwrapped,
            next_version=welcome.next_version,
            dial=self._dial,
            copies=self._published,
            ranks=self._ranks,
        )

    def publish(self) -> None:
        """Publish the current weights. At the start too: after a resume they may be older than the newest snapshot."""
        assert self._publisher is not None
        self._heartbeat.show("publishing", self._publisher.reason)
        version = self._publisher.publish(self.learner.steps_done)
        self._heartbeat.show("publishing", self._publisher.reason, weights_version=version)

    def _one_step(self) -> None:
        with self._watch.phase("wait"):
            batch = self.sample()
        if batch is None:
            return
        self._batches.prefetch(batch.step + 1, self.learner.reference.name_at(batch.step + 1))
        self.learn(batch)
        done, train = self.learner.steps_done, self._config.train
        if done % train.publish_every == 0 or done == self._steps:
            with self._watch.phase("publish"):
                self.publish()
        if done % train.checkpoint_every == 0:
            with self._watch.phase("checkpoint"):
                self._checkpoints.begin(self.learner)

    def sample(self) -> TrainBatch | None:
        """Wait for the batch of this step. Returns None when `stop()`."""
        assert self._publisher is not None
        step = self.learner.steps_done
        while not self._stop():
            self._publisher.check()
            batch = self._batches.fetch(step, self.learner.reference.name_at(step))
            if isinstance(batch, TrainBatch):
                return batch
            reason = self._publisher.reason
            self._heartbeat.show("publishing" if reason else "waiting", reason or batch)
            # The buffer may wait for newer weights, and there was no room for them.
            if self._publisher.missed:
                self.publish()
        return None

    def learn(self, batch: TrainBatch) -> None:
        """Make the update of a batch, and record it in metrics.jsonl and in the buffer.

        Raises OutOfMemory, and TrainingBroken, after a checkpoint, if too many steps in a row were skipped.
        """
        self._heartbeat.show("training")
        self._ranks.send(STEP, pack_batch(batch) if self._ranks.size > 1 else b"")
        result = self.learner.step_in_memory(batch)
        seconds = self._watch.take()
        metrics = result.metrics | seconds | self._throughput.metrics(batch, seconds["seconds_step"])
        # Metrics first: if the report is not acknowledged, the checkpoint keeps it for the next start.
        answers = choose_answers(batch, self._config.metrics.trace_answers)
        self._metrics.record(batch.step, self._clock.wall(), metrics, blamed=result.blamed, answers=answers)
        self._report(
            messages.ReportStep(
                step=batch.step,
                metrics=metrics,
                reference=self.learner.reference.name_at(batch.step),
                trajectory_ids=list(result.reference),
                reference_logprobs=list(result.reference.values()),
                rows=result.rows,
            )
        )
        at_temperature_1 = all(row.temperature == 1 and not (len(row.kept) or row.explored) for row in batch.rows)
        self._health.update(batch.step, metrics, float(batch.reward_BK.max()), at_temperature_1=at_temperature_1)
        self._show(batch.step, metrics)
        self._count_skipped(batch.step, result)

    def _count_skipped(self, step: int, result: StepResult) -> None:
        self._skipped_in_a_row = count = self._skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            log.warning("step skipped: no update was made", step=step, in_a_row=count, reason=result.skipped)
        if count >= _MAX_SKIPPED_STEPS:
            saved = f"A checkpoint of step {self.learner.steps_done} is saved"
            try:
                self.save()
            except errors.CheckpointError as error:
                saved = str(error)
            raise errors.TrainingBroken(
                f"{errors.quantity(count, 'step was', 'steps in a row were')} skipped, the last is step {step}: "
                f"{result.skipped}. {saved}: inspect these trajectories, then pass --resume"
            )

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        names = {"loss": "loss", "reward": "reward_mean", "staleness": "staleness_mean"}
        shown = {short: metrics[name] for short, name in names.items() if name in metrics}
        progress = {"step": float(self.learner.steps_done), "steps": float(self._steps)}
        self._heartbeat.show("training", metrics=shown | progress, warning=self._health.warning)
        kl = {"kl": metrics["kl"]} if "kl" in metrics else {}
        log.info("step", step=step, **shown, **kl, seconds=metrics["seconds_step"])

    def _report(self, report: messages.ReportStep) -> None:
        self._unreported = report
        try:
            self._client.call(report, messages.Done, stop=self._stop)
        except errors.Refused as refusal:
            if refusal.code != "unknown_step":
                raise
            # The update has been made, and a later start could not report it either, so retrying is of no use.
            log.warning(
                "the buffer does not know this step, which stays missing in it: is its database an older copy?",
                step=report.step,
            )
        self._unreported = None

    def save(self) -> None:
        """Save a checkpoint of the current step and wait for it, unless it exists or nothing has been trained."""
        if self.learner.steps_done:
            self._heartbeat.show("saving")
            with self._watch.phase("checkpoint"):
                self._checkpoints.save(self.learner, msgspec.to_builtins(self._unreported))

    def finish(self) -> None:
        """Wait until the last snapshot is announced, then declare the run finished."""
        assert self._publisher is not None
        if self._stop():
            self._publisher.flush(_STOP_FLUSH_SECONDS)
            return
        while not self._publisher.flush(_FLUSH_WAIT_SECONDS) or self._publisher.missed:
            if self._stop():
                return
            if self._publisher.missed:
                time.sleep(_FLUSH_WAIT_SECONDS)
                self.publish()
            self._heartbeat.show("publishing", self._publisher.reason)
        # `tba status` of a finished run shows the last heartbeat, and the thread sends only one a second.
        self._heartbeat.show("publishing")
        self._client.call(self._heartbeat.shown, messages.Done, stop=self._stop)
        self._client.call(messages.FinishRun(step=self.learner.steps_done), messages.Done, stop=self._stop)
        self._publisher.finish()
