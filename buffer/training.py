"""What the trainer asks and tells: batches, steps that are done, snapshots, the end of the run."""

from itertools import chain

import numpy as np

from tba.buffer.answer import Answer
from tba.buffer.batches import check_size, recorded_batch
from tba.buffer.policy import Shortage, sample_groups
from tba.buffer.served_run import ServedRun, refuse_beyond
from tba.common import wire
from tba.common.errors import Refused


class Training:
    """Handles SampleBatch, ReportStep, AnnounceSnapshot and FinishRun."""

    def __init__(self, served: ServedRun) -> None:
        self._served = served
        self._store = served.store
        self._run = served.run
        self._clock = served.clock
        self._rules = served.rules
        self._rate = served.rate
        self.waits_for = ""  # why the trainer has no batch

    def sample_batch(self, message: wire.SampleBatch, _: str) -> Answer | None:
        """The batch of a step, recorded if it is new; None if there is too little data for it."""
        return self.read_batch(message) if self.record_batch(message) else None

    def record_batch(self, message: wire.SampleBatch) -> bool:
        """Record the batch of a step if it is new; False if there is too little data for it."""
        refuse_beyond("step", message.step)
        is_new = not self._store.batches.has(self._run, message.step)
        if is_new and (shortage := self._served.history.batch(message, self._choose_batch)):
            # A trainer that asks ahead is still at work on the step before.
            self.waits_for = shortage.reason if message.step <= self._served.steps_done else ""
            return False
        self.waits_for = ""
        return True

    def prepare_batches(self) -> None:
        """Bring up to date what batches are drawn from: the last one has taken its trajectories."""
        if (board := self._served.index.board) is not None:
            board.catch_up()

    def read_batch(self, message: wire.SampleBatch) -> Answer:
        """The recorded batch of a step."""
        return Answer(*recorded_batch(self._store, self._run, message))

    def _choose_batch(self, message: wire.SampleBatch) -> Shortage | None:
        """Sample a batch and record it, or say what is missing."""
        # Not the largest: a trainer may come back from an earlier step than the record, or ours may be an old copy.
        self._served.next_step = message.step
        inserted, sampled = self._served.trajectories, self._served.sampled
        if reason := self._rate.shortage(inserted, sampled, message.prompts * message.samples):
            return Shortage(reason)
        now = self._served.history.step(message.step)
        rng = np.random.default_rng([self._run.seed, message.step])
        groups = sample_groups(
            self._served.index,
            self._rules,
            step=now,
            groups=message.prompts,
            samples=message.samples,
            rng=rng,
            train_step=message.step,
        )
        self._served.too_little_data = isinstance(groups, Shortage)
        if isinstance(groups, Shortage):
            return groups
        entries = list(chain.from_iterable(groups))
        check_size(self._store, entries)
        self._store.batches.record(self._run, message.step, groups, self._clock.wall(), stale_from=now)
        self._served.index.mark_taken(entry.id for entry in entries)
        self._served.next_step = message.step + 1
        self._served.sampled += len(entries)
        return None

    def report_step(self, message: wire.ReportStep, _: str) -> Answer:
        """The optimiser step was made."""
        if not self._store.batches.has(self._run, message.step):
            raise Refused("unknown_step", f"no batch was handed out for step {message.step}")
        self._store.batches.report(self._run, message, self._clock.wall())
        self._served.steps_done = max(self._served.steps_done, message.step + 1)
        return Answer(wire.Done())

    def announce_snapshot(self, message: wire.AnnounceSnapshot, _: str) -> Answer:
        """There are newer weights."""
        refuse_beyond("snapshot", message.weights.version, message.weights.step)
        known = self._served.versions.get(message.weights.version)
        if known is not None and known != message.weights:
            raise Refused("version_taken", f"snapshot v{known.version} was announced before, with other content")
        self._store.snapshots.add(self._run, message, self._clock.wall())
        self._served.versions[message.weights.version] = message.weights
        self._served.newest = self._served.versions[max(self._served.versions)]
        return Answer(wire.Done())

    def finish_run(self, message: wire.FinishRun, _: str) -> Answer:
        """The last step was made."""
        self._store.runs.finish(self._run, message.step)
        self._served.finished = True
        return Answer(wire.Done())
