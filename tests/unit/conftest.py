"""Fixtures of the unit tests: `tba buffer` commands, filled databases, a publisher."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.store.schema import migrations
from tba.tests.conftest import Outcome


@pytest.fixture
def tba_buffer(tba_here: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs `tba buffer ...` in this process and in an empty directory."""
    return partial(tba_here, "buffer")


@pytest.fixture
def filled(harness: Callable[..., Any], trajectory: Callable[..., Any]) -> Path:
    """A closed database: two prompts with three trajectories each, a failed one, and one step trained on."""
    buffer = harness(train={"prompts_per_step": 2})
    buffer.register(2)
    buffer.announce(0, 0)
    for n, visit in enumerate(buffer.lease(2).visits):
        group = [
            trajectory(visit.prompt_key, visit.lease, tokens=[n, k, 9], reward=k / 4, text=f"answer {n}{k}")
            for k in range(3)
        ]
        buffer.put(group, first_sequence=3 * n)
    failed = trajectory(tokens=[], lease=0, error="reward: no number", stop_reason="error", reward=0.0)
    buffer.put([failed], first_sequence=6)
    ids = buffer.sample(0, prompts=2, samples=3).message.trajectory_ids
    buffer.report(0, ids, [-1.5] * len(ids))
    buffer.store.close()
    path: Path = buffer.store.path
    return path


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Registers a further migration, as a later release does, and returns its name."""

    def register() -> str:
        monkeypatch.setattr(migrations, "_migrations", migrations._migrations[:])
        migrations(name="0003_note")(lambda db: db.table("runs").add_column("note", str))
        return "0003_note"

    return register


@pytest.fixture
def publisher_harness(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes models with a buffer and publishers; keyword arguments are keys of [train]."""
    from tba.tests.helpers.publisher import PublisherHarness  # loads torch

    made: list[PublisherHarness] = []

    def make(**settings: Any) -> PublisherHarness:
        made.append(PublisherHarness(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
