"""What the numbers of each row cost: the CPU time of a demo step with and without them, step by step in pairs.

    python -m benchmarks.rows [--steps 20] [--objective tb]

A step is that of `examples/arithmetic/demo.toml`: 32 prompts, 8 responses of 2 to 4 tokens, all reference
log-probabilities to compute, from the batch to the report in the database, in one thread. Without the numbers, the two
that the metrics need are computed as before them, and the report has none.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from benchmarks.table import print_table
from tba.common.config import Config
from tba.common.wire import messages
from tba.tests.conftest import ServiceHarness
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives import from_config
from tba.trainer.objectives.responses import Responses
from tba.trainer.step import accumulate, learner

MODEL = Path(__file__).parent.parent / "examples" / "arithmetic" / "model"
PROMPTS, SAMPLES = 32, 8


class Run:
    """The demo's learner, and a buffer with trajectories for its batches."""

    def __init__(self, folder: Path, objective: str) -> None:
        sections = {"objective": {"name": objective}, "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-5}}
        config = Config.model_validate(sections)
        self._buffer = ServiceHarness(folder / "buffer.sqlite", config)
        self._buffer.fill(PROMPTS, SAMPLES)
        self._learner = learner.Learner(
            load_model(MODEL, torch.device("cpu")),
            load_model(MODEL, torch.device("cpu")),
            config.train,
            from_config.make_objective(config.objective, longest_response=6),
            autocast=False,
            entropy=True,
        )

    def step(self, batch: TrainBatch, *, numbers: bool) -> float:
        """Train on a batch and report it. Returns the seconds of CPU time."""
        self._buffer.sample(batch.step, PROMPTS, SAMPLES)
        start = time.process_time()
        with nullcontext() if numbers else without_numbers():
            result = self._learner.step(batch)
        report = messages.ReportStep(
            step=batch.step,
            metrics=result.metrics,
            reference="initial",
            trajectory_ids=[],
            reference_logprobs=[],
            rows=result.rows if numbers else None,
        )
        msgspec.to_builtins(report)
        self._buffer.ask(report, role="trainer", sender="t.1")
        return time.process_time() - start


@contextmanager
def without_numbers() -> Iterator[None]:
    """Compute only the two sums that the metrics need."""

    def two_sums(_rows: list[Row], responses: Responses, _terms: object) -> torch.Tensor:
        policy_bK = responses.policy_bK.detach()
        zero_bK = torch.zeros_like(policy_bK)
        return torch.stack([policy_bK, responses.log_ratio_bK.detach(), zero_bK, zero_bK, zero_bK])

    def ones(*arguments: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(arguments[-1])

    with (
        patch.object(accumulate, "quantities", two_sums),
        patch.object(learner, "row_numbers", lambda *_, **__: None),
        patch.object(from_config, "_truncation", ones),
    ):
        yield


def make_batch(step: int) -> TrainBatch:
    """Return a batch of the demo's size."""
    rng = np.random.default_rng(step // 2)
    rows = [
        Row(
            id=1000 * step + n,
            prompt_ids=rng.integers(3, 13, size=6).astype(np.int32),
            response_ids=(response := rng.integers(3, 13, size=rng.integers(2, 5)).astype(np.int32)),
            sampling_logprobs=np.full(len(response), -1.0, np.float32),
            loss_mask=np.ones(len(response), np.uint8),
            on_policy=n % 3 == 0,
        )
        for n in range(PROMPTS * SAMPLES)
    ]
    rewards = torch.from_numpy(rng.integers(0, 2, size=(PROMPTS, SAMPLES)).astype(float))
    unknown = torch.full_like(rewards, float("nan"))
    return TrainBatch(step=step, rows=rows, reward_BK=rewards, reference_BK=unknown, staleness_BK=rewards * 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps")
    parser.add_argument("--objective", default="tb")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        run = Run(Path(folder), options.objective)
        pairs = []
        for n in range(options.steps + 1):
            first = n % 2 == 0
            order = enumerate((first, not first))
            seconds = {numbers: run.step(make_batch(2 * n + k), numbers=numbers) for k, numbers in order}
            pairs.append((seconds[True], seconds[False]))
    # The first pair allocates.
    pairs = pairs[1:]
    with_, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    rows = [["without", f"{1000 * without:.1f}"], ["with", f"{1000 * with_:.1f}"], ["ratio of a pair", f"{ratio:.4f}"]]
    print_table(f"a step of {options.objective}, CPU time, medians of {len(pairs)} pairs", ["", "ms"], rows)


if __name__ == "__main__":
    main()
