"""Drop the tokens of trajectories that can no longer be sampled. Their rows and their training history stay."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import StorageError, UsageError

# Trajectories per transaction.
_ROWS = 1000


def compact(config: Config, clock: Clock, *, keep_steps: int, dry_run: bool) -> dict[str, Any]:
    """Drop the payloads that cannot be sampled under the configured limits, then shrink the file.

    Payloads are kept if they can be sampled, belong to a batch that is not trained yet, or to a batch of the last
    `keep_steps` steps, which a resumed trainer may repeat. Raises LockTaken if a server has the database open,
    UsageError if the database or the run does not exist, StorageError if the disk is too full for the rebuilt file.
    """
    path = config.database
    if not path.exists():
        raise UsageError(f"{path} does not exist: nothing to compact")
    with contextlib.closing(Store(path, durability=config.buffer.durability)) as store:
        runs = {run.name: run for run in store.runs.all()}
        if config.run.name not in runs:
            raise UsageError(
                f"{path} has no run {config.run.name}, it has {', '.join(runs) or 'none'}: set run.name, and the "
                "buffer settings that the run is served with"
            )
        run = runs[config.run.name]
        first_kept = max(0, store.batches.steps_done(run) - keep_steps)
        needed = BufferService(store, run, config, clock).sampleable()
        needed |= store.batches.trajectories(run, since_step=first_kept)
        sizes = store.trajectories.payload_sizes(run)
        drop = [trajectory for trajectory in sizes if trajectory not in needed]
        before = store.database.size_bytes()
        if not dry_run and drop:
            check_disk(path, before)
            for start in range(0, len(drop), _ROWS):
                with store.transaction():
                    store.trajectories.drop_payloads(drop[start : start + _ROWS], clock.wall())
            store.database.shrink()
        after = store.database.size_bytes()
    return {
        "run": run.name,
        "trajectories_compacted": len(drop),
        "trajectories_kept": len(sizes) - len(drop),
        "token_bytes": sum(sizes[trajectory] for trajectory in drop),
        "file_bytes_before": before,
        "file_bytes_after": after,
        "dry_run": dry_run,
    }


def check_disk(path: Path, size: int) -> None:
    """Raise StorageError unless VACUUM fits: it writes the rebuilt file to the WAL, at worst the same size again."""
    free = shutil.disk_usage(path.absolute().parent).free
    if free < size:
        raise StorageError(
            f"{path.absolute().parent} has {free >> 20} MiB free and rebuilding the file may need {size >> 20} MiB: "
            "make room first; nothing was changed"
        )
