"""The pace of a GPU node, imposed on the real engine and the real trainer of small models.

Both compute what they always compute, and then wait until the node that they stand for would be done. So a run at this
pace has the staleness, the waiting and the learning of the node, without its GPUs, as long as computing takes less time
than the pace.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.common.weights.snapshot import Snapshot
from tba.searcher.engines.engine import Engine, Generation, GenerationRequest, LoadReport
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.loop import Trainer

# The engine looks this often whether a response is due. Dozens of searchers that look more often would take the cores.
_POLL_SECONDS = 0.02
# Batches over which `step_ratio` averages the longest decoding.
_DRAWN_BATCHES = 1000


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that the parts of a node take.

    One token of every response in flight takes `decode + decode_each * responses`. Responses have log-normal lengths
    with this mean and this sigma of the logarithm, cut off at `max_tokens`. New weights take `publish` from the step to
    the searcher, and then stop its generation for `pause`.
    """

    decode: float
    decode_each: float
    mean_tokens: float
    sigma: float
    max_tokens: float
    step: float
    publish: float
    pause: float

    def scaled(self, factor: float) -> "Pace":
        """Return a pace that is `factor` times as fast."""
        lengths = ("mean_tokens", "sigma", "max_tokens")
        seconds = {one.name: getattr(self, one.name) / factor for one in fields(self) if one.name not in lengths}
        return Pace(**seconds, **{name: getattr(self, name) for name in lengths})

    def tokens(self, random: np.random.Generator, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Draw the lengths of responses."""
        # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
        mu = np.log(self.mean_tokens) - self.sigma**2 / 2
        return np.minimum(random.lognormal(mu, self.sigma, shape), self.max_tokens)


def step_ratio(pace: Pace, searchers: int, responses: int) -> float:
    """Return how many times as fast as a synchronous step an asynchronous one is by the pace alone, on average.

    A synchronous step waits for its batch of `responses`, which the searchers share equally, and for new weights. An
    asynchronous one takes as long as the slower of training and generation with one batch in flight.
    """
    lengths = pace.tokens(np.random.default_rng(0), (_DRAWN_BATCHES, responses))
    # Responses that end leave the others faster: the sum over all tokens is decode * longest + decode_each * total.
    parts = np.array_split(lengths, searchers, axis=1)
    decoding = [pace.decode * part.max(axis=1) + pace.decode_each * part.sum(axis=1) for part in parts if part.size]
    synchronous = pace.step + float(np.max(decoding, axis=0).mean()) + pace.publish
    # With a batch in flight, a batch is finished whenever an average response is.
    generation = float(lengths.mean()) * (pace.decode + pace.decode_each * responses / searchers) + pace.pause
    return synchronous / max(pace.step, generation)


# All figures are estimates of other hardware, and inputs of this benchmark; they are for batches of 256 responses.
PACES = {
    # Qwen2.5-7B on H100s. Decoding: 15 GB of weights at 3.35 TB/s and kernel launches, and a throughput of about 10,000
    # tokens/s with 256 responses in flight. The step: 6 x 7.6e9 x 256 x 600 FLOP at 40 % of 989 TFLOP/s. Publication:
    # docs/benchmarks-models.md.
    "short": Pace(
        decode=0.008, decode_each=7e-5, mean_tokens=400, sigma=0.8, max_tokens=2048, step=18.0, publish=1.7, pause=0.3
    ),
    # DeepSeek-R1-Distill-Qwen-1.5B on H100s, in the contexts of the last stage of DeepScaleR.
    #
    # Lengths: the model's answers to MATH-500 have 5450 +- 7327 tokens (PrimeIntellect-ai/prime-rl, pull request 1026),
    # so sigma is sqrt(ln(1 + (7327 / 5450)^2)). The cut is the 24K of DeepScaleR (NVIDIA-NeMo/RL,
    # docs/guides/grpo-deepscaler.md); 2.3 % of the responses reach it, and the mean falls to 5,122. As a check of the
    # form: the 3270 +- 4027 tokens after 300 steps would have 7.6 % above 8,192, where DeepScaleR reports that 4.2 to
    # 6.5 % are clipped (rllm-org/rllm, issue 33).
    #
    # Decoding: vLLM generates 183 tokens/s of Qwen2.5-1.5B on an A100 (QwenLM/Qwen2.5,
    # docs/source/benchmark/speed_benchmark.rst), 5.45 ms each, of which 3.1 GB at 2.0 TB/s are 1.5 ms, and at 3.35 TB/s
    # 0.9 ms. Each response adds the reading of its keys and values: 28 layers x 2 x 2 heads x 128 x 2 bytes are 28.7 kB
    # a token, 152 MB at the average position of 5,306, and 6e-5 s at 75 % of 3.35 TB/s. A batch of 256 takes 39 GB of
    # an engine's memory.
    #
    # The step: a token takes 2 x 1.54e9 FLOP for the weights and 4 x 28 x 1536 x 5306 for attention, three times that
    # with the backward pass, and 256 x 5,122 tokens at 40 % of 989 TFLOP/s take 40 s. Publication: a fifth of the bytes
    # of 7B. DeepScaleR's own batches have 1,024 responses and more, with a step four times as long.
    "long": Pace(
        decode=0.0049,
        decode_each=6e-5,
        mean_tokens=5450,
        sigma=1.016,
        max_tokens=24576,
        step=40.0,
        publish=0.34,
        pause=0.06,
    ),
}


class PacedEngine:
    """An engine whose responses are finished when those of the node would be."""

    def __init__(self, engine: Engine, pace: Pace, seeds: Sequence[int]) -> None:
        self._engine = engine
        self._pace = pace
        # Every engine numbers its requests from 0: `seeds` give each of them other lengths.
        self._random = np.random.default_rng(seeds)
        # Tokens that are left of each response in flight, by request.
        self._left: dict[int, float] = {}
        self._ready: dict[int, Generation] = {}
        self._advanced_at = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        """Return everything else of the engine itself."""
        return getattr(self._engine, name)

    @property
    def in_flight(self) -> int:
        return len(self._left)

    def submit(self, request: GenerationRequest) -> None:
        self._advance()
        self._engine.submit(request)
        self._left[request.id] = float(self._pace.tokens(self._random))

    def step(self) -> list[Generation]:
        for generation in self._engine.step() if self._engine.in_flight else ():
            self._ready[generation.id] = generation
        self._advance()
        done = [id_ for id_ in self._ready if self._left[id_] <= 0]
        if not done and not self._engine.in_flight:
            time.sleep(_POLL_SECONDS)
        for id_ in done:
            del self._left[id_]
        return [self._ready.pop(id_) for id_ in done]

    def _advance(self) -> None:
        """Generate the tokens of the time since the last call."""
        now = time.monotonic()
        token_seconds = self._pace.decode + self._pace.decode_each * len(self._left)
        tokens = (now - self._advanced_at) / token_seconds
        for id_ in self._left:
            self._left[id_] -= tokens
        self._advanced_at = now

    def prepare(self, snapshot: Snapshot) -> None:
        with at_least(self._pace.publish - self._pace.pause):
            self._engine.prepare(snapshot)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        self._advance()
        with at_least(self._pace.pause):
            report = self._engine.load_weights(snapshot)
        # Nothing is generated in the pause.
        self._advanced_at = time.monotonic()
        return report


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """A block that takes at least some seconds."""
    until = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, until - time.monotonic()))


def paced_trainer(pace: Pace, note: Callable[[float, float], None]) -> type[Trainer]:
    """Return a trainer whose steps take the time of the node's.

    `note` gets the Unix time at the end of each step, and the seconds that computing it took.
    """

    class PacedTrainer(Trainer):
        def learn(self, batch: TrainBatch) -> None:
            started = time.monotonic()
            with at_least(pace.step):
                super().learn(batch)
                computed = time.monotonic() - started
            note(time.time(), computed)

    return PacedTrainer
