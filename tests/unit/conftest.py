"""Fixtures of the unit tests: `tba buffer` commands, filled databases, a publisher."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tba.common.config import Config
from tba.tests.conftest import Outcome
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.helpers.puts import log_ratios, make_trajectory, numbers_of


@pytest.fixture
def tba_buffer(tba_here: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs `tba buffer ...` in this process and in an empty directory."""
    return partial(tba_here, "buffer")


@pytest.fixture(scope="session")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of `filled`."""
    buffer = ServiceHarness(
        tmp_path_factory.mktemp("filled") / "buffer.sqlite", Config.model_validate({"train": {"prompts_per_step": 2}})
    )
    buffer.register(2)
    buffer.announce(0, 0)
    for n, visit in enumerate(buffer.lease(2).visits):
        group = [
            make_trajectory(visit.prompt_key, visit.lease, tokens=[n, k, 9], reward=k / 4, text=f"answer {n}{k}")
            for k in range(3)
        ]
        buffer.put(group, first_sequence=3 * n)
    failed = make_trajectory(tokens=[], lease=0, error="reward: no number", stop_reason="error", reward=0.0)
    buffer.put([failed], first_sequence=6)
    ids = buffer.sample(0, prompts=2, samples=3).message.trajectory_ids
    each = log_ratios(None, *([-2.0, 0.001, n / 10] for n in range(1, len(ids))))
    buffer.report(0, ids, [-1.5] * len(ids), numbers_of(len(ids), token_log_ratios=each))
    buffer.store.close()
    return buffer.store.path.read_bytes()


@pytest.fixture
def filled(tmp_path: Path, filled_once: bytes) -> Path:
    """A closed database: two prompts with three trajectories each, a failed one, and one step trained on."""
    path = tmp_path / "filled.sqlite"
    path.write_bytes(filled_once)
    return path


@pytest.fixture
def hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub answer from its cache alone, as if HF_HUB_OFFLINE was set when it was imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def no_home(monkeypatch):
    """The user has no home directory, as a number that the system does not know."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)


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
