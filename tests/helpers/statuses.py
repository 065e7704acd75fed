"""A `Status` and its clients with ordinary values, of which a test changes what it is about."""

from typing import Any

import msgspec

from tba.common.wire.messages import ClientStatus, Status


def make_status(step: int = 0, **changes: Any) -> Status:
    """Return the status of a run; without changes no client is connected."""
    numbers = dict.fromkeys(
        ("uptime_seconds", "epoch", "prompts", "trajectories", "errors", "duplicates", "sampleable", "puts_per_second",
         "database_bytes", "queued_bytes", "commit_seconds", "batches_without_recent_data"), 0,
    )  # fmt: skip
    fields: dict[str, Any] = {"run_name": "r", "step": step, "finished": False, "rejected": {}, "clients": []}
    texts = dict.fromkeys(("trainer_waits_for", "no_recent_data"), "")
    return msgspec.convert(numbers | fields | texts | changes, Status)


def make_client(role: str, name: str = "", **changes: Any) -> ClientStatus:
    """Return a living client of this role and name; without changes it is training, and was just seen."""
    fields: dict[str, Any] = {
        "role": role,
        "sender": f"{name or role}.1",
        "host": "h",
        "silent_seconds": 0.1,
        "activity": "training",
        "reason": "",
        "weights_version": None,
        "metrics": {},
        "trajectories": 0,
        "duplicates": 0,
        "leases": 0,
    }
    return msgspec.convert(fields | changes, ClientStatus)
