"""Asynchronous checkpoints: the training thread copies the state to the host, another thread writes it.

    training thread     begin ──► copy to the host ──► the next step
    checkpoint thread              metrics to disk ──► write ──► fsync ──► rename ──► delete old ones

At most one is in progress. One that comes due meanwhile is skipped: waiting would slow training down to the pace of the
disk, and the next one saves more steps. The last one waits for the one in progress, and must succeed.
"""

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tba.common.errors import CheckpointError
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.trainer.checkpoints import checkpoint
from tba.trainer.model.host_buffers import HostBuffers, HostCopy
from tba.trainer.step.learner import Learner

log = get_logger(__name__)


class CheckpointWriter:
    """Saves one learner. `before` is called before each write and makes durable what no checkpoint may be ahead of.

    `gather` is called before the tensors are read, so that other ranks take part.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        keep: int,
        device: torch.device,
        before: Callable[[], None],
        min_free: int = 0,
        gathered: bool = False,
        gather: Callable[[], None] = lambda: None,
        saved_step: int | None = None,
    ) -> None:
        # Of the newest checkpoint on disk.
        self.saved_step = saved_step
        self.copies = HostBuffers(device, gathered=gathered)
        self._directory = directory
        self._run = run
        self._keep = keep
        self._before = before
        self._min_free = min_free
        self._gather = gather
        self._thread: Background | None = None
        # Of the last write, if the disk refused it.
        self._refusal: CheckpointError | None = None
        # Leftovers of a trainer that was killed.
        for unfinished in directory.glob(".step_????????.tmp"):
            shutil.rmtree(unfinished)

    def begin(self, learner: Learner) -> None:
        """Save the current learner, every step of which was reported, unless a checkpoint is still being written.

        A disk that refuses the write is a warning, since older checkpoints exist. Raises any other failure of the
        previous write.
        """
        if self._thread is not None and self._thread.running:
            log.warning("checkpoint left out", step=learner.steps_done, reason="the one before is still being written")
            return
        # A disk that refused the previous checkpoint, which is in the log, may accept this one.
        with contextlib.suppress(CheckpointError):
            self.wait()
        self._start(learner, None)

    def save(self, learner: Learner, unreported: dict[str, Any] | None = None) -> None:
        """Write the current learner to disk and wait for it. Raises CheckpointError if the disk refuses."""
        # A failure of the one in progress is in the log; this one is tried all the same.
        self.close()
        self._thread = self._refusal = None
        if self.saved_step != learner.steps_done:
            self._start(learner, unreported)
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint in progress. Raises its failure, once."""
        self.close()
        (thread, self._thread), (refusal, self._refusal) = (self._thread, None), (self._refusal, None)
        if thread is not None:
            thread.check()
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Wait for the checkpoint in progress; a failure is only in the log."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, learner: Learner, unreported: dict[str, Any] | None) -> None:
        manifest = checkpoint.manifest_of(learner, run=self._run, unreported=unreported)
        self._gather()
        copied = self.copies.copy(checkpoint.tensors_of(learner))
        self._thread = Background("checkpoint", partial(self._write, manifest, copied))
        self._thread.start()

    def _write(self, manifest: dict[str, Any], copied: HostCopy) -> None:
        try:
            self._before()
            path = checkpoint.write(self._directory, manifest, copied.wait(), keep=self._keep, min_free=self._min_free)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint not written", step=manifest["step"], reason=str(error))
            self._refusal = CheckpointError(str(error))
        else:
            self.saved_step = manifest["step"]
            log.info("checkpoint saved", path=path)
        finally:
            self.copies.release(copied)
