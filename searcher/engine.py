"""What a generation engine is to the searcher.

The searcher owns the loop: it submits requests, calls `step`, and takes what has finished. Between two
steps it may load new weights; requests in flight survive that, and each token keeps the version that
produced it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tba.common.errors import EngineError
from tba.common.snapshot import Snapshot
from tba.common.trajectory import Float32, Int32


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample one response. `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate. `id` is unique within the engine's life."""

    id: int
    prompt_ids: Int32
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished response.

    `logprobs` [R] are natural-log probabilities under the distribution that was sampled from, with
    temperature and top-p (for greedy decoding: at temperature 1). `version_runs` [V, 2] are pairs
    (policy version, tokens), in order, summing to R. `stop_reason` is "eos" (its token is included in
    `response_ids`) or "length".
    """

    id: int
    response_ids: Int32
    logprobs: Float32
    version_runs: Int32
    stop_reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a swap of weights showed and cost.

    `mismatch_*` compare the engine with the trainer on the tokens of the canary: the largest and the mean
    |log-probability difference| d, and the mean of exp(d) - 1 - d, an estimate of the KL divergence (Schulman's k3).

    `way` says how the weights came in. `read_seconds` is what `prepare` took, whether or not generation went on
    beside it; `pause_seconds` is how long `load_weights` held generation up, of which `exchange_seconds` and
    `canary_seconds` are the parts of the way that succeeded.
    """

    mismatch_max: float
    mismatch_mean: float
    mismatch_kl: float
    way: str
    read_seconds: float
    exchange_seconds: float
    canary_seconds: float
    pause_seconds: float

    def metrics(self) -> dict[str, float]:
        """The numbers, by the names that they are exported under."""
        return {
            "mismatch_max": self.mismatch_max,
            "mismatch_mean": self.mismatch_mean,
            "mismatch_kl": self.mismatch_kl,
            "swap_read_seconds": self.read_seconds,
            "swap_exchange_seconds": self.exchange_seconds,
            "swap_canary_seconds": self.canary_seconds,
            "swap_pause_seconds": self.pause_seconds,
        }


class Engine(Protocol):
    """A generation engine. Only `prepare` may be called from another thread than the others.

    Errors are raised as EngineError or SnapshotError. After EngineFaulty the process has to end: a supervisor
    starts it again, with a new engine.
    """

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if prompt and response do not fit the model's context."""

    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""

    def prepare(self, snapshot: Snapshot) -> None:
        """Do what of a `load_weights` needs no pause. Touches nothing that serves.

        Returns when it is done; meant to be called from another thread while stepping goes on. Raises
        SnapshotError if the snapshot cannot be loaded at all. Without it, `load_weights` does it.
        """

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, prove it on the canary, and go on from there.

        All or nothing: on SnapshotError or CanaryMismatch the old weights serve again, no token of the
        refused ones reaches a Generation, and requests in flight are still answered. The files of the weights
        that serve must stay readable: they may be needed to go back. Raises EngineFaulty if the engine does not
        take weights any more, or cannot go back.
        """

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for a sequence of T tokens an array [T - 1],
        whose t-th entry is log p(token t + 1 | tokens up to t)."""

    def close(self) -> None:
        """Free the device."""


def append_version(runs: list[list[int]], version: int, tokens: int) -> None:
    """Count `tokens` for `version` at the end of a list of [version, tokens] runs."""
    if runs and runs[-1][0] == version:
        runs[-1][1] += tokens
    elif tokens:
        runs.append([version, tokens])


def check_request(request: GenerationRequest, *, vocabulary: int, context: int) -> None:
    """Raise EngineError for a request that no engine of this model could answer."""
    sampling = request.sampling
    needed = len(request.prompt_ids) + sampling.max_tokens
    if needed > context:
        raise EngineError(
            f"request {request.id} needs {needed} tokens of context, the engine has {context}: "
            "lower search.max_tokens, or drop the prompt"
        )
    if not in_vocabulary(request.prompt_ids.tolist(), vocabulary):
        raise EngineError(f"request {request.id} is empty, or has token ids outside 0 to {vocabulary - 1}")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
        raise EngineError(
            f"request {request.id} has temperature {sampling.temperature}, top_p {sampling.top_p}, max_tokens "
            f"{sampling.max_tokens}: they must be at least 0, in (0, 1], and at least 1"
        )


def in_vocabulary(ids: Sequence[int], vocabulary: int) -> bool:
    """Whether there are token ids, all of them the model's."""
    return len(ids) > 0 and 0 <= min(ids) <= max(ids) < vocabulary
