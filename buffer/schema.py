"""Tables and indexes of the buffer database, as sqlite-utils migrations.

A migration and the record of it commit together. Migrations are never edited once released: add one.
Column by column, the tables are described in `docs/database.md`.
"""

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from tba.buffer.views import VIEWS
from tba.common.errors import StorageError

migrations = Migrations("tba")


@migrations(name="0001_runs")
def _runs(db: Database) -> None:
    db.table("runs").create(
        {
            "id": int,
            "uuid": str,
            "name": str,
            "created_at": float,
            "seed": int,
            "task": str,
            "fingerprint": str,
            "prompts": int,
            "finished_step": int,
        },
        pk="id",
        not_null={"uuid", "name", "created_at", "seed"},
        strict=True,
    )
    db.table("runs").create_index(["name"], unique=True)
    db.table("starts").create(
        {"id": int, "run": int, "started_at": float, "config": str, "software": str}, pk="id", strict=True
    )
    db.table("senders").create({"id": int, "run": int, "sender": str, "role": str, "host": str, "pid": int}, pk="id")
    db.table("senders").create_index(["sender"], unique=True)


@migrations(name="0002_prompts")
def _prompts(db: Database) -> None:
    db.table("prompts").create({"id": int, "run": int, "position": int, "key": str}, pk="id", strict=True)
    db.table("prompts").create_index(["run", "key"], unique=True)
    db.table("prompts").create_index(["run", "position"], unique=True)
    db.table("visits").create(
        {
            "id": int,
            "run": int,
            "epoch": int,
            "place": int,
            "prompt": int,
            "sender": str,
            "leased_at": float,
            "done_at": float,
        },
        pk="id",
        strict=True,
    )
    db.table("visits").create_index(["run", "epoch", "place"], unique=True)
    db.execute("CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL")


@migrations(name="0003_trajectories")
def _trajectories(db: Database) -> None:
    # Metadata apart from token blobs: a query over rewards reads no tokens.
    db.table("trajectories").create(
        {
            "id": int,
            "run": int,
            "prompt": int,
            "visit": int,
            "sender": int,
            "sequence": int,
            "policy_version": int,
            "reward": float,
            "reward_parts": str,
            "stop_reason": str,
            "prompt_tokens": int,
            "response_tokens": int,
            "dedup_hash": int,
            "sampling": str,
            "created_at": float,
            "received_at": float,
            "generation_seconds": float,
            "text": str,
            "error": str,
            "metadata": str,
        },
        pk="id",
        not_null={"run", "prompt", "sender", "sequence", "policy_version", "reward", "received_at"},
        strict=True,
    )
    db.table("trajectories").create_index(["sender", "sequence"], unique=True)
    db.table("trajectories").create_index(["run", "reward"])
    db.table("trajectories").create_index(["run", "received_at"])
    db.table("trajectories").create_index(["prompt", "policy_version"])
    db.table("payloads").create(
        {
            "trajectory": int,
            "prompt_ids": bytes,
            "response_ids": bytes,
            "logprobs": bytes,
            "version_runs": bytes,
            "loss_mask": bytes,
        },
        pk="trajectory",
        strict=True,
    )


@migrations(name="0004_training")
def _training(db: Database) -> None:
    db.table("snapshots").create(
        {
            "run": int,
            "version": int,
            "step": int,
            "path": str,
            "manifest_sha256": str,
            "bytes": int,
            "announced_at": float,
        },
        pk=("run", "version"),
        strict=True,
    )
    db.table("batches").create(
        {
            "run": int,
            "step": int,
            "prompts": int,
            "samples": int,
            "handed_out_at": float,
            "trained_at": float,
            "metrics": str,
        },
        pk=("run", "step"),
        strict=True,
    )
    db.table("consumption").create(
        {"run": int, "step": int, "slot": int, "trajectory": int, "staleness": int},
        pk=("run", "step", "slot"),
        strict=True,
    )
    db.table("consumption").create_index(["trajectory"])
    db.table("reference_logprobs").create(
        {"trajectory": int, "reference": str, "logprob": float}, pk=("trajectory", "reference"), strict=True
    )


@migrations(name="0005_names_and_history")
def _names_and_history(db: Database) -> None:
    # The friendly names are for views that join; a table says that it is rows.
    db.rename_table("trajectories", "trajectory_rows")
    db.rename_table("consumption", "consumption_rows")
    # Bytes of the payload; and when `tba buffer compact` dropped it: such a row is history, and is not sampled.
    db.table("trajectory_rows").add_column("payload_bytes", int)
    db.table("trajectory_rows").add_column("compacted_at", float)
    # The newest trajectory that was there when the batch was sampled: what time travel goes back to.
    db.table("batches").add_column("newest_trajectory", int)


@migrations(name="0006_views")
def _views(db: Database) -> None:
    for view in VIEWS:
        db.execute(view)


@migrations(name="0007_snapshot_address")
def _snapshot_address(db: Database) -> None:
    # Where the trainer serves the snapshot's files; empty where only its path leads to them.
    db.table("snapshots").add_column("address", str)


def migrate(db: Database) -> None:
    """Bring a database to this release's schema. Raises StorageError if a newer release wrote it."""
    check_not_newer({migration.name for migration in migrations.applied(db)})
    migrations.apply(db)


def schema_names() -> list[str]:
    """The migrations of this release, oldest first; the last one names its schema."""
    return [migration.name for migration in migrations.pending(Database(memory=True))]


def check_not_newer(applied: set[str]) -> None:
    """Raise StorageError if a newer release has migrated the database."""
    if newer := sorted(applied - set(schema_names())):
        raise StorageError(f"the database has schema {newer[-1]}, which this release does not know: upgrade tba")
