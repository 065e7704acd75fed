"""The table `snapshots`: every one that was announced."""

from tba.buffer.database import DatabaseFile
from tba.buffer.tables.runs import Run
from tba.common.wire import AnnounceSnapshot, WeightsRef


class Snapshots:
    """The snapshots of the runs of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def add(self, run: Run, message: AnnounceSnapshot, now: float) -> None:
        """Record an announced snapshot; a version that is there stays."""
        ref = message.weights
        self._database.execute(
            "INSERT INTO snapshots (run, version, step, path, manifest_sha256, bytes, announced_at, address) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (run.id, ref.version, ref.step, ref.path, ref.manifest_sha256, message.bytes, now, ref.address or None),
        )

    def all(self, run: Run) -> list[WeightsRef]:
        """All announced snapshots, oldest first."""
        rows = self._database.all(
            "SELECT version, step, path, manifest_sha256, coalesce(address, '') FROM snapshots WHERE run = ? "
            "ORDER BY version",
            run.id,
        )
        return [WeightsRef(version=v, step=s, path=p, manifest_sha256=h, address=a) for v, s, p, h, a in rows]
