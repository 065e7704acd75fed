"""Delete from a buffer file what a run no longer needs, and shrink the file.

    tokens          those of trajectories that can no longer be sampled; their rows and training history stay
    before step N   trajectories that had arrived when the batch of step N was sampled, and are in no batch from N on;
                    the batches of the steps before N
    a whole run     all of its rows

What stays: everything that a trainer may ask for when it resumes (the newest `keep_steps` steps, and all steps from the
oldest checkpoint next to the file on), prompts, visits, senders and snapshots.
Ids of rows before step N are never used again; those of a whole run may be.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.buffer.service.service import BufferService
from tba.buffer.store.starts import choose_run
from tba.buffer.store.store import Store
from tba.buffer.store.tables.runs import Run
from tba.buffer.tools.export import export
from tba.common import run_files
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import StorageError, UsageError
from tba.common.wire.messages import Archive, Movable

# Trajectories per transaction.
_ROWS = 1000
_OF_TRAJECTORIES = {"payloads": "trajectory", "kept_tokens": "trajectory", "reference_logprobs": "trajectory",
    "rescored_logprobs": "trajectory", "trajectory_rows": "id"}  # fmt: skip
# Children first.
_OF_RUNS = ("batches", "visits", "curriculum_rows", "held_out_rows", "evaluation_rows", "prompts", "snapshots",
    "senders", "starts", "archives")  # fmt: skip


def prune_tokens(config: Config, *, keep_steps: int, dry_run: bool) -> dict[str, Any]:
    """Drop the payloads that cannot be sampled under the configured limits.

    Payloads are kept if they can be sampled, belong to a batch that is not trained yet, or to one that a resumed
    trainer may repeat: of the last `keep_steps` steps, or since the oldest checkpoint. Raises LockTaken if a server has
    the database open, UsageError if the database or the run does not exist, StorageError if the disk is too full for
    the rebuilt file.
    """
    with _opened(config.database) as store:
        run = _run_of(store, config.database, config.run.name)
        sizes = store.trajectories.payload_sizes(run)
        kept = first_kept(config.database, store.batches.steps_done(run), keep_steps)
        service, found, drop = BufferService(store, run, config, clock := SystemClock()), Movable([], 0), list[int]()
        while found.after is not None:
            found = service.movable(Archive(since_step=kept, after=found.after))
            drop += found.trajectories
        before = store.database.size_bytes()
        if not dry_run and drop:
            _check_disk(config.database, before)
            for start in range(0, len(drop), _ROWS):
                with store.transaction():
                    store.trajectories.drop_payloads(drop[start : start + _ROWS], clock.wall())
            store.database.shrink()
        return {
            "run": run.name,
            "trajectories_compacted": len(drop),
            "trajectories_kept": len(sizes) - len(drop),
            "token_bytes": sum(sizes[trajectory] for trajectory in drop),
            "file_bytes_before": before,
            "file_bytes_after": store.database.size_bytes(),
            "dry_run": dry_run,
        }


def prune_rows(
    path: Path, run_name: str | None, before_step: int | None, *, keep_steps: int, archive: Path | None, dry_run: bool
) -> dict[str, Any]:
    """Delete what is older than a step, or without one a whole run, after an export to `archive` if that is given.

    Raises LockTaken, UsageError for what is not there or may still be needed or for the only run of the file,
    StorageError for a full disk.
    """
    with _opened(path) as store:
        run = _run_of(store, path, run_name)
        old, batches = f"SELECT t.id FROM trajectory_rows t WHERE t.run = {run.id}", f"run = {run.id}"  # noqa: S608
        if before_step is None:
            if len(store.runs.all()) == 1:
                raise UsageError(f"{run.name} is the only run of {path}: delete the file")
        else:
            _refuse_needed(store, run, before_step, keep_steps, path)
            query = "SELECT newest_trajectory FROM batches WHERE run = ? AND step = ?"
            if not (newest := store.database.all(query, run.id, before_step)):
                raise UsageError(f"run {run.name} in {path} has no batch of step {before_step}")
            old += f""" AND t.id <= {newest[0][0] or 0}
                AND NOT EXISTS (SELECT 1 FROM consumption_rows c JOIN batches b ON b.id = c.batch
                                WHERE c.trajectory = t.id AND b.step >= {before_step})"""  # noqa: S608
            batches += f" AND step < {before_step}"
        return _prune(store, run, old, batches, archive=archive, dry_run=dry_run, whole=before_step is None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Store]:
    if not path.exists():
        raise UsageError(f"{path} does not exist: nothing to prune")
    with contextlib.closing(Store(path, durability="power")) as store:
        yield store


def _run_of(store: Store, path: Path, name: str | None) -> Run:
    runs = {run.name: run for run in store.runs.all()}
    return runs[choose_run(path, runs, name, "--run")]


def first_kept(path: Path, steps_done: int, keep_steps: int) -> int:
    """Return the first step whose batch a trainer that resumes may ask for, by the checkpoints next to a database."""
    checkpoints = (path.resolve().parent / run_files.CHECKPOINTS).glob("step_????????")
    return max(0, min([steps_done - keep_steps, *(int(name.name[5:]) for name in checkpoints)]))


def _refuse_needed(store: Store, run: Run, before_step: int, keep_steps: int, path: Path) -> None:
    """Raise UsageError if a trainer that resumes may ask for a batch that would be deleted."""
    done = store.batches.steps_done(run)
    first = first_kept(path, done, keep_steps)
    if before_step > first:
        recent, oldest = f"--keep-steps {keep_steps} of {done} that were trained", "the oldest checkpoint next to it"
        why = recent if first >= done - keep_steps else oldest
        remedy = "lower --before-step" if first > 0 else "nothing can be deleted unless --keep-steps is lower"
        raise UsageError(f"of run {run.name} in {path} the steps from {first} on stay ({why}): {remedy}")


def _check_disk(path: Path, size: int) -> None:
    """Raise StorageError unless VACUUM fits: it writes the rebuilt file to the WAL, at worst the same size again."""
    free = shutil.disk_usage(path.absolute().parent).free
    if free < size:
        raise StorageError(
            f"{path.absolute().parent} has {free >> 20} MiB free and rebuilding the file may need {size >> 20} MiB: "
            "make room first; nothing was changed"
        )


def _prune(
    store: Store, run: Run, old: str, batches: str, *, archive: Path | None, dry_run: bool, whole: bool
) -> dict[str, Any]:
    """Delete the trajectories that the query `old` selects, and the batches of the condition `batches`."""
    database = store.database
    ids = [id_ for (id_,) in database.all(old)]
    slots = f"batch IN (SELECT id FROM batches WHERE {batches})"  # noqa: S608
    done = {
        "run": run.name,
        "trajectories": len(ids),
        "trajectories_kept": database.one("SELECT COUNT(*) FROM trajectory_rows WHERE run = ?", run.id)[0] - len(ids),
        "batches": database.one(f"SELECT COUNT(*) FROM batches WHERE {batches}")[0],  # noqa: S608
        "exported": 0,
        "file_bytes_before": database.size_bytes(),
    }
    if not dry_run:
        _check_disk(store.path, done["file_bytes_before"])
        if archive is not None:
            where = f"id IN ({old})"
            done["exported"] = export(store.path, archive, where=where, format_=None, force=False)["trajectories"]
        # Before their batches: if it is interrupted, no trajectory looks as if no batch had ever used it.
        for start in range(0, len(ids), _ROWS):
            rows = [(id_,) for id_ in ids[start : start + _ROWS]]
            with store.transaction():
                for table, column in _OF_TRAJECTORIES.items():
                    database.execute_many(f"DELETE FROM {table} WHERE {column} = ?", rows)  # noqa: S608
                database.execute("UPDATE runs SET pruned = pruned + ? WHERE id = ?", (len(rows), run.id))
        with store.transaction():
            trained = database.one(f"SELECT COUNT(*) FROM consumption_rows WHERE {slots}")[0]  # noqa: S608
            database.execute(f"DELETE FROM consumption_rows WHERE {slots}")  # noqa: S608
            database.execute(f"DELETE FROM batches WHERE {batches}")  # noqa: S608
            database.execute("UPDATE runs SET pruned_slots = pruned_slots + ? WHERE id = ?", (trained, run.id))
        if whole:
            with store.transaction():
                for table in _OF_RUNS:
                    database.execute(f"DELETE FROM {table} WHERE run = ?", (run.id,))  # noqa: S608
                database.execute("DELETE FROM runs WHERE id = ?", (run.id,))
        database.shrink()
    return {**done, "file_bytes_after": database.size_bytes(), "dry_run": dry_run}
