"""`tba eval`: evaluate one snapshot, the newest, or all that a run has kept."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tba.common.config import Config
from tba.common.errors import SnapshotError
from tba.common.evaluations import Row
from tba.common.log import get_logger
from tba.common.system.durable import sha256_of
from tba.common.weights.node_store import PinnedSnapshot, pin_newest, weights_directory
from tba.common.weights.snapshot import MANIFEST, Snapshot, choose_snapshots, read
from tba.common.wire.messages import WeightsRef
from tba.searcher.evaluation.evaluator import Report, Subject, open_evaluator, read_subject
from tba.searcher.weights.assembly import SnapshotAssembler

log = get_logger(__name__)


def evaluate_snapshots(
    config: Config,
    named: Path | None,
    *,
    every: bool,
    device: str,
    known: Mapping[tuple[Any, ...], Row],
    report: Report,
) -> Iterator[tuple[Row, bool]]:
    """Evaluate the named snapshot, every snapshot that a run has kept, or its newest one, with a single engine.

    Yields each evaluation, and whether it is new: with `every` those in `known` are not repeated, and come first.
    Each snapshot is verified, and a delta is assembled to complete weights. The trainer may be running: snapshots that
    it deletes meanwhile are left out, and the newest one is chosen when the engine is ready. Raises UsageError if there
    is none, SnapshotError if one cannot be read, TaskError if the task has no held-out prompts.
    """
    # First, so that a mistake in the arguments is reported before the engine starts, which may take minutes.
    paths = choose_snapshots(config.snapshots, weights_directory(config), named, every=every)
    subject = read_subject(config)
    if every:
        found = {path: _known(known, subject, path) for path in paths}
        for row in found.values():
            if row is not None:
                yield row, False
        paths = [path for path, row in found.items() if row is None]
        if not paths:
            return
    with open_evaluator(config, subject, device=device, name="eval") as (evaluator, assembler):
        for snapshot, pinned in _prepared(config, assembler, named, paths if every else None):
            row = evaluator.evaluate(snapshot, pinned, report)
            if row is None:
                return
            yield row, True


def _known(known: Mapping[tuple[Any, ...], Row], subject: Subject, path: Path) -> Row | None:
    """Return the evaluation of a snapshot, if there is one and the snapshot can be read."""
    try:
        return known.get(subject.key(read(path).manifest))
    except SnapshotError:
        return None


def _prepared(
    config: Config, assembler: SnapshotAssembler, named: Path | None, paths: Sequence[Path] | None
) -> Iterator[tuple[Snapshot, PinnedSnapshot]]:
    """Yield the named snapshot; or those of `paths` that still exist; or the newest."""
    if named is not None:
        yield assembler.assemble(ref_of(named))
    elif paths is None:
        yield pin_newest(config, partial(unless_deleted, assembler))
    else:
        for path in paths:
            if prepared := unless_deleted(assembler, path):
                yield prepared
            else:
                log.warning("snapshot not evaluated: the trainer has deleted it", path=path)


def unless_deleted(assembler: SnapshotAssembler, path: Path) -> tuple[Snapshot, PinnedSnapshot] | None:
    """Assemble a snapshot. None if the trainer has deleted it, of which the manifest goes first."""
    try:
        return assembler.assemble(ref_of(path))
    except (SnapshotError, OSError):
        if (path / MANIFEST).is_file():
            raise
        return None


def ref_of(path: Path) -> WeightsRef:
    """Return the announcement of a snapshot on this machine."""
    manifest = read(path).manifest
    return WeightsRef(
        version=manifest.version, step=manifest.step, path=str(path), manifest_sha256=sha256_of(path / MANIFEST)
    )
