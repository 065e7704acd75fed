"""What the numbers of each row cost: the CPU time of a demo step with and without them, step by step in pairs.

    python -m benchmarks.rows [--steps 20] [--objective tb] [--part numbers]

A step is that of `examples/arithmetic/demo.toml`: 32 prompts, 8 responses of 2 to 4 tokens, all reference
log-probabilities to compute, from the batch to the report in the database, in one thread. Without the numbers, the two
that the metrics need are computed as before them, and the report has none. `--part tokens` leaves out only the
log-ratios of the tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.table import print_table
from tba.common.config import Config
from tba.common.wire import messages
from tba.tests.conftest import ServiceHarness
from tba.tests.helpers.puts import make_trajectory
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.model.scorer import load_model
from tba.trainer.objectives import from_config
from tba.trainer.objectives.responses import Responses
from tba.trainer.step import accumulate, learner, row_numbers

MODEL = Path(__file__).parent.parent / "examples" / "arithmetic" / "model"
PROMPTS, SAMPLES = 32, 8


class Run:
    """The demo's learner, and a buffer with trajectories for its batches."""

    def __init__(self, folder: Path, objective: str) -> None:
        sections = {"objective": {"name": objective}, "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-5}}
        config = Config.model_validate(sections)
        self._buffer = ServiceHarness(folder / "buffer.sqlite", config)
        self._buffer.fill(PROMPTS, 0)
        for n in range(PROMPTS):
            group = [make_trajectory(f"p{n}", 0, tokens=[n, k, 1, 1][: 2 + k % 3]) for k in range(SAMPLES)]
            self._buffer.put(group, first_sequence=n * SAMPLES)
        self._learner = learner.Learner(
            load_model(MODEL, torch.device("cpu")),
            load_model(MODEL, torch.device("cpu")),
            config.train,
            from_config.make_objective(config.objective, longest_response=6),
            autocast=False,
            entropy=True,
        )

    def step(self, step: int, *, left_out: str) -> float:
        """Train on a batch and report it, without the "numbers", without the "tokens" or, with "", completely.

        Returns the seconds of CPU time.
        """
        lengths = self._buffer.sample(step, PROMPTS, SAMPLES).message.response_ids_count
        batch = make_batch(step, lengths)
        start = time.process_time()
        with {"": nullcontext, "numbers": without_numbers, "tokens": without_tokens}[left_out]():
            result = self._learner.step(batch)
        report = messages.ReportStep(
            step=batch.step,
            metrics=result.metrics,
            reference="initial",
            trajectory_ids=[],
            reference_logprobs=[],
            rows=None if left_out == "numbers" else result.rows,
        )
        self._buffer.ask(report, role="trainer", sender="t.1")
        return time.process_time() - start


@contextmanager
def without_numbers() -> Iterator[None]:
    """Compute only the two sums that the metrics need."""

    def two_sums(_rows: list[Row], responses: Responses, *_: object) -> torch.Tensor:
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


@contextmanager
def without_tokens() -> Iterator[None]:
    """Neither keep nor report the log-ratios of tokens."""
    with (
        patch.object(accumulate.Accumulator, "_keep_tokens", lambda *_: None),
        patch.object(row_numbers, "_token_log_ratios", lambda *_: None),
    ):
        yield


def make_batch(step: int, lengths: list[int]) -> TrainBatch:
    """Return a batch of the demo's size, with responses of these lengths."""
    rng = np.random.default_rng(step // 2)
    rows = [
        Row(
            id=1000 * step + n,
            prompt_ids=rng.integers(3, 13, size=6).astype(np.int32),
            response_ids=rng.integers(3, 13, size=length).astype(np.int32),
            sampling_logprobs=np.full(length, -1.0, np.float32),
            loss_mask=np.ones(length, np.uint8),
            on_policy=n % 3 == 0,
        )
        for n, length in enumerate(lengths)
    ]
    rewards = torch.from_numpy(rng.integers(0, 2, size=(PROMPTS, SAMPLES)).astype(float))
    unknown = torch.full_like(rewards, float("nan"))
    return TrainBatch(step=step, rows=rows, reward_BK=rewards, reference_BK=unknown, staleness_BK=rewards * 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps")
    parser.add_argument("--objective", default="tb")
    parser.add_argument("--part", choices=["numbers", "tokens"], default="numbers", help="what is left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        run = Run(Path(folder), options.objective)
        pairs = []
        for n in range(options.steps + 1):
            first = n % 2 == 0
            order = enumerate(("", options.part) if first else (options.part, ""))
            seconds = {part: run.step(2 * n + k, left_out=part) for k, part in order}
            pairs.append((seconds[""], seconds[options.part]))
    # The first pair allocates.
    pairs = pairs[1:]
    with_, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    rows = [["without", f"{1000 * without:.1f}"], ["with", f"{1000 * with_:.1f}"], ["ratio of a pair", f"{ratio:.4f}"]]
    print_table(
        f"a step of {options.objective} and its {options.part}, CPU time, medians of {len(pairs)} pairs",
        ["", "ms"],
        rows,
    )


if __name__ == "__main__":
    main()
