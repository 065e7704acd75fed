"""Writes the dump of a small database of this release's schema, for tests/unit/test_schema.py.

Run it once when a migration is added, and keep the file for ever:

    python -m tba.tests.data.dump 0007 > tests/data/schema-0007.sql

It speaks to the buffer service as searchers and trainers do, so it runs at older commits too.
"""

import sqlite3
import sys
import tempfile
from pathlib import Path

from tba.common.config import Config
from tba.tests.conftest import ServiceHarness, make_trajectory


def fill(path: Path) -> None:
    """Three prompts, eleven trajectories of two versions (one failed), two batches, the first one trained on."""
    buffer = ServiceHarness(path, Config.model_validate({"train": {"prompts_per_step": 2}}))
    buffer.register(3)
    buffer.announce(0, 0)
    visits = buffer.lease(3).visits
    for n, visit in enumerate(visits):
        buffer.clock.advance(1.5)
        group = [
            make_trajectory(visit.prompt_key, visit.lease, tokens=[n, k, 9], reward=k / 2, text=f"answer {n} {k}")
            for k in range(3)
        ]
        buffer.put(group, first_sequence=3 * n)
    ids = buffer.sample(0, prompts=2, samples=3).message.trajectory_ids
    buffer.report(0, ids, [-1.5] * len(ids))
    buffer.announce(1, 1)
    visit = buffer.lease(1, version=1).visits[0]
    failed = {"tokens": [], "error": "reward: ValueError: no number", "stop_reason": "error", "reward": 0.0}
    last = [
        make_trajectory(visit.prompt_key, visit.lease, version=1, **changes) for changes in ({"tokens": [7, 7]}, failed)
    ]
    buffer.put(last, first_sequence=9)
    buffer.sample(1, prompts=2, samples=3)
    buffer.store.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "buffer.sqlite"
        fill(path)
        connection = sqlite3.connect(path)
        print(f"-- A buffer database of schema {sys.argv[1]}, as tests/data/dump.py made it.")
        print("\n".join(connection.iterdump()))
        connection.close()


if __name__ == "__main__":
    main()
