"""Fixtures that several folders use. A fixture ends only processes that it started."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when torch is imported. Two OpenMP threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

from tba.buffer.rows import service_message
from tba.buffer.service import BufferService
from tba.buffer.store import Store
from tba.common import wire
from tba.common.clock import ManualClock
from tba.common.codec import Request, RequestHeader
from tba.common.config import Config
from tba.common.trajectory import Trajectory, pack

ROOT = Path(__file__).parent.parent
EXAMPLE_MODEL = ROOT / "examples/arithmetic/model"


@pytest.fixture
def example_model() -> Path:
    """The checkpoint of examples/arithmetic."""
    return EXAMPLE_MODEL


@pytest.fixture
def test_data() -> Path:
    """The folder with gsm8k and math500, or a skip: users have no such folder."""
    folder = os.environ.get("TBA_TEST_DATA")
    if not folder or not Path(folder, "gsm8k").is_dir():
        pytest.skip("TBA_TEST_DATA does not name a folder with gsm8k/")
    return Path(folder)


def make_trajectory(prompt_key: str = "p0", lease: int = 1, version: int = 0, **changes: Any) -> Trajectory:
    """A small valid trajectory; `tokens` sets the response."""
    tokens = np.asarray(changes.pop("tokens", [5, 6, 7]), np.int32)
    fields = {
        "prompt_key": prompt_key,
        "lease": lease,
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": tokens,
        "logprobs": np.full(len(tokens), -0.5, np.float32),
        "version_runs": np.array([[version, len(tokens)]], np.int32),
        "reward": 1.0,
        "reward_parts": {"correct": 1.0},
        "stop_reason": "eos",
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "created_at": 1000.0,
        "generation_seconds": 0.1,
    }
    return Trajectory(**{**fields, **changes})


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Makes trajectories."""
    return make_trajectory


class ServiceHarness:
    """A buffer service on a real database, driven without sockets."""

    def __init__(self, path: Path, config: Config) -> None:
        self.clock = ManualClock()
        self.config = config
        self.store = Store(path, durability="process")
        self.run = self.store.open_run("test", seed=config.run.seed, config={}, software={})
        self.service = BufferService(self.store, self.run, config, self.clock)

    def ask(
        self, message: wire.Message, frames: list[bytes] | None = None, sender: str = "s.1", role: str = "searcher"
    ):
        """Handle one request in a transaction of its own."""
        header = RequestHeader(v=1, type=message.TYPE, id=1, run=self.run.uuid, role=role, sender=sender)
        views = [memoryview(frame) for frame in frames or []]
        self.service.hear(header)
        with self.store.transaction():
            return self.service.handle(header, service_message(Request(header, message, views)))

    def register(self, count: int) -> None:
        """Register prompts p0, p1, ..."""
        keys = [f"p{n}" for n in range(count)]
        self.ask(wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=count, offset=0, keys=keys))

    def announce(self, version: int, step: int) -> None:
        """Announce a snapshot."""
        ref = wire.WeightsRef(version=version, step=step, path=f"/v{version}", manifest_sha256="0" * 64)
        self.ask(wire.AnnounceSnapshot(weights=ref, bytes=1), role="publisher", sender="pub.1")

    def lease(self, want: int, held: list[int] | None = None, version: int = 0, sender: str = "s.1"):
        """Ask for leases; None if the request would wait."""
        message = wire.LeasePrompts(want=want, held=held or [], weights_version=version, wait_seconds=0.0)
        answer = self.ask(message, sender=sender)
        return None if answer is None else answer.message

    def put(self, trajectories: list[Trajectory], first_sequence: int, sender: str = "s.1"):
        """Put trajectories."""
        columns, frames = pack(trajectories)
        message = wire.PutTrajectories(first_sequence=first_sequence, rows=wire.Rows.model_validate(columns))
        return self.ask(message, frames, sender=sender).message

    def sample(self, step: int, prompts: int, samples: int):
        """Ask for the batch of a step; None if it would wait."""
        message = wire.SampleBatch(step=step, prompts=prompts, samples=samples, reference="initial", wait_seconds=0.0)
        return self.ask(message, role="trainer", sender="t.1")

    def report(self, step: int, ids: list[int] | None = None, logprobs: list[float] | None = None) -> None:
        """Report a step as done."""
        message = wire.ReportStep(
            step=step, metrics={}, reference="initial", trajectory_ids=ids or [], reference_logprobs=logprobs or []
        )
        self.ask(message, role="trainer", sender="t.1")

    def fill(self, prompts: int, samples: int, version: int = 0) -> None:
        """Register prompts and put a group of different responses for each."""
        self.register(prompts)
        if version not in self.service._served.versions:
            self.announce(version, version)
        for n in range(prompts if samples else 0):
            group = [make_trajectory(f"p{n}", lease=0, version=version, tokens=[n, k]) for k in range(samples)]
            self.put(group, first_sequence=version * 10_000 + n * samples)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Callable[..., ServiceHarness]]:
    """Makes service harnesses; `harness(buffer={...}, train={...})` sets configuration keys."""
    made: list[ServiceHarness] = []

    def make(path: Path | None = None, **sections: dict[str, Any]) -> ServiceHarness:
        config = Config.model_validate({"train": {"prompts_per_step": 1}} | sections)
        made.append(ServiceHarness(path or tmp_path / f"buffer{len(made)}.sqlite", config))
        return made[-1]

    yield make
    for harness in made:
        harness.store.close()
