"""Checkpoints beside training: the training thread copies, another thread writes.

    training thread     begin ──► copy to the host ──► the next step
    checkpoint thread              metrics to disk ──► write ──► fsync ──► name ──► delete old ones

At most one is under way. One that comes due before it is on disk is left out: waiting would hold training back at the
pace of the disk, and the next turn saves more steps. The last one waits for the one under way, and has to succeed.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tba.common.errors import CheckpointError
from tba.common.log import get_logger
from tba.trainer import checkpoint
from tba.trainer.host_copies import HostCopies, HostCopy
from tba.trainer.step import Learner

log = get_logger(__name__)


class CheckpointWriter:
    """Saves one learner. `before` is called before each write: what it makes durable is never behind a checkpoint.

    `gather` is called before the tensors are read: other ranks have to take part.
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
        self.saved_step = saved_step  # of the newest one on disk
        self.copies = HostCopies(device, gathered=gathered)
        self._directory = directory
        self._run = run
        self._keep = keep
        self._before = before
        self._min_free = min_free
        self._gather = gather
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        for unfinished in directory.glob(".step_????????.tmp"):  # of a trainer that was killed
            shutil.rmtree(unfinished)

    def begin(self, learner: Learner) -> None:
        """Save the learner as it is now, with every step reported, unless the checkpoint before is still being written.

        A disk that refuses is a warning: the older checkpoints are there. Raises what else the thread failed on.
        """
        if self._thread is not None and self._thread.is_alive():
            log.warning("checkpoint left out", step=learner.steps_done, reason="the one before is still being written")
            return
        self._forget_refusal()
        self._start(learner, None)

    def save(self, learner: Learner, unreported: dict[str, Any] | None = None) -> None:
        """Have the learner as it is now on disk. Raises CheckpointError if the disk refuses."""
        self.close()
        self._failure = None  # whatever it was: it is in the log, and this one is to be tried
        if self.saved_step != learner.steps_done:
            self._start(learner, unreported)
            self.wait()

    def wait(self) -> None:
        """Wait for the one under way. Raises what it failed on."""
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Let the one under way be finished; what it failed on is in the log."""
        if self._thread is not None:
            self._thread.join()

    def _forget_refusal(self) -> None:
        """A disk that refused the one before may take the next."""
        with contextlib.suppress(CheckpointError):  # it is in the log
            self.wait()

    def _start(self, learner: Learner, unreported: dict[str, Any] | None) -> None:
        manifest = checkpoint.manifest_of(learner, run=self._run, unreported=unreported)
        self._gather()
        copied = self.copies.copy(checkpoint.tensors_of(learner))
        self._thread = threading.Thread(target=self._write, args=(manifest, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, manifest: dict[str, Any], copied: HostCopy) -> None:
        try:
            self._before()
            path = checkpoint.write(self._directory, manifest, copied.wait(), keep=self._keep, min_free=self._min_free)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint not written", step=manifest["step"], reason=str(error))
            self._failure = CheckpointError(str(error))
        except Exception as error:  # kept, and raised again in the training thread
            log.exception("checkpoint failed", step=manifest["step"])
            self._failure = error
        else:
            self.saved_step = manifest["step"]
            log.info("checkpoint saved", path=path)
        finally:
            self.copies.give_back(copied)
