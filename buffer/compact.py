"""Dropping the tokens of trajectories that can no longer be sampled. Their rows, and who trained on them, stay."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.buffer.service import BufferService
from tba.buffer.store import Store
from tba.buffer.tables.runs import Run
from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import StorageError, UsageError

_ROWS = 1000  # dropped in one transaction


@dataclass(frozen=True, slots=True)
class Plan:
    """What compaction would drop."""

    trajectories: list[int]
    kept: int
    payload_bytes: int


def compact(config: Config, clock: Clock, *, keep_steps: int, dry_run: bool) -> dict[str, Any]:
    """Drop what has left sampling under the configured limits, then give the space back to the file system.

    Kept are the tokens of everything that can be sampled, of batches not trained on yet, and of the batches of the
    last `keep_steps` steps, which a trainer may repeat on resume. Raises LockTaken if a server has the database,
    UsageError if it or the run is not there, StorageError if the disk is too full for the rebuilt file.
    """
    path = config.database
    if not path.exists():
        raise UsageError(f"{path} does not exist: nothing to compact")
    store = Store(path, durability=config.buffer.durability)
    try:
        run = _run(store, config)
        plan = make_plan(store, run, BufferService(store, run, config, clock).sampleable(), keep_steps)
        before = store.database.size_bytes()
        if not dry_run and plan.trajectories:
            _check_disk(path, before)
            for start in range(0, len(plan.trajectories), _ROWS):
                with store.transaction():
                    store.trajectories.drop_payloads(plan.trajectories[start : start + _ROWS], clock.wall())
            store.database.shrink()
        after = store.database.size_bytes()
    finally:
        store.close()
    return {
        "run": run.name,
        "trajectories_compacted": len(plan.trajectories),
        "trajectories_kept": plan.kept,
        "token_bytes": plan.payload_bytes,
        "file_bytes_before": before,
        "file_bytes_after": after,
        "dry_run": dry_run,
    }


def make_plan(store: Store, run: Run, sampleable: set[int], keep_steps: int) -> Plan:
    """Which payloads nothing needs any more."""
    needed = sampleable | store.batches.trajectories(run, since_step=max(0, store.batches.steps_done(run) - keep_steps))
    drop, kept, size = [], 0, 0
    for trajectory, payload_bytes in store.trajectories.payload_sizes(run):
        if trajectory in needed:
            kept += 1
        else:
            drop.append(trajectory)
            size += payload_bytes
    return Plan(drop, kept, size)


def _run(store: Store, config: Config) -> Run:
    runs = {run.name: run for run in store.runs.all()}
    if config.run.name not in runs:
        raise UsageError(
            f"{store.path} has no run {config.run.name}, it has {', '.join(runs) or 'none'}: set run.name, and the "
            "buffer settings that the run is served with"
        )
    return runs[config.run.name]


def _check_disk(path: Path, size: int) -> None:
    """SQLite builds the smaller file in the write-ahead log: at worst that is as large again."""
    free = shutil.disk_usage(path.absolute().parent).free
    if free < size:
        raise StorageError(
            f"{path.absolute().parent} has {free >> 20} MiB free and rebuilding the file may take {size >> 20} MiB: "
            "make room first; nothing was dropped"
        )
