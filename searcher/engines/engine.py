"""The interface of a generation engine.

The searcher owns the loop: it submits requests, calls `step`, and collects finished responses. Between two steps it may
load new weights. Requests in flight survive that, and each token keeps the version that produced it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from tba.common.errors import EngineError
from tba.common.weights.snapshot import Snapshot
from tba.common.wire.trajectory import Float32, Int32
from tba.searcher.engines.stopping import Stopping


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample one response. `temperature` 0 is greedy. `stopping` replaces what ends the engine's responses.

    After the temperature come `min_p`, `top_k` (0 is all tokens) and `top_p`, in this order, each over what is left.
    """

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    stopping: Stopping | None = None
    top_k: int = 0
    min_p: float = 0.0

    @property
    def cuts(self) -> bool:
        """Whether it may leave a part of the vocabulary to sample from."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def recorded(self) -> dict[str, float]:
        """Return the settings that are stored with the response."""
        more = {"top_k": self.top_k, "min_p": self.min_p}
        return {"temperature": self.temperature, "top_p": self.top_p} | {name: one for name, one in more.items() if one}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate. `id` is unique for the lifetime of the engine.

    A `first` one starts before those that are queued: the next turn of an episode, or a request of `search.serve`.
    """

    id: int
    prompt_ids: Int32
    sampling: SamplingSettings
    first: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished response of R tokens.

    `logprobs` [R] are natural-log probabilities under the sampling distribution, with temperature and top-p (greedy
    decoding: at temperature 1). `version_runs` [V, 2] are pairs (policy version, tokens) in order; the tokens sum to R.
    `stop_reason` is "eos", also if `search.stop` ended the response, or "length". The token that ended it is part of
    `response_ids`. `kept` is as in `Trajectory`.
    """

    id: int
    response_ids: Int32
    logprobs: Float32
    version_runs: Int32
    stop_reason: str
    seconds: float
    kept: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))


class Mismatch(NamedTuple):
    """The difference between engine and trainer on the same tokens.

    The largest and the mean |log-probability difference| d, and the mean of exp(d) - 1 - d, an estimate of the KL
    divergence (Schulman's k3).
    """

    maximum: float
    mean: float
    kl: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result and the cost of a swap of weights.

    `mismatch` is that of the canary. `way` names how the weights were loaded. `read_seconds` is the duration of
    `prepare`, whether or not generation continued meanwhile. `pause_seconds` is how long `load_weights` blocked
    generation; `exchange_seconds` and `canary_seconds` are the parts of it that the successful attempt took.
    """

    mismatch: Mismatch
    way: str
    read_seconds: float
    exchange_seconds: float
    canary_seconds: float
    pause_seconds: float

    def metrics(self) -> dict[str, float]:
        return {
            "mismatch_max": self.mismatch.maximum,
            "mismatch_mean": self.mismatch.mean,
            "mismatch_kl": self.mismatch.kl,
            "swap_read_seconds": self.read_seconds,
            "swap_exchange_seconds": self.exchange_seconds,
            "swap_canary_seconds": self.canary_seconds,
            "swap_pause_seconds": self.pause_seconds,
        }


class Engine(Protocol):
    """A generation engine. All methods must be called from one thread, except `prepare`.

    Errors are raised as EngineError or SnapshotError. After EngineFaulty the process must end, and be started again.
    """

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""

    @property
    def max_in_flight(self) -> int:
        """Responses that it generates concurrently; more are queued."""

    @property
    def metrics(self) -> dict[str, float]:
        """What this engine reports of itself, by metric name."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its response is shorter if the context has no room for `max_tokens` after the prompt.

        Raises EngineError if it has no room for one token.
        """

    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""

    def prepare(self, snapshot: Snapshot) -> None:
        """Do the part of `load_weights` that needs no pause. Does not change the weights that serve.

        Blocks until it is done; call it from another thread while stepping continues. It is optional: otherwise
        `load_weights` does this part too. Raises SnapshotError if the snapshot cannot be loaded at all.
        """

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, check it on the canary, and continue from there.

        All or nothing: on SnapshotError or CanaryMismatch the old weights serve again, no token of the refused ones
        reaches a Generation, and requests in flight are still answered. The files of the weights that serve must stay
        readable: a rollback may need them. Raises EngineFaulty if it can neither load nor roll back.
        """

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for a sequence of T tokens an array [T - 1],
        whose t-th entry is log p(token t + 1 | tokens up to t)."""

    def close(self) -> None:
        """Free the device."""


class Requests:
    """The requests to one engine, each with what is called with its response."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._on_done: dict[int, Callable[[Generation], None]] = {}
        # Returns an id that no request and no ticket has.
        self.new_id = count().__next__

    def ask(
        self, ids: Int32, sampling: SamplingSettings, on_done: Callable[[Generation], None], first: bool = True
    ) -> None:
        """Generate after a context. `first`: before what is queued. Raises EngineError like `Engine.submit`."""
        id_ = self.new_id()
        self._engine.submit(GenerationRequest(id_, ids, sampling, first=first))
        self._on_done[id_] = on_done

    def step(self) -> None:
        """Step the engine unless it is idle, and pass on the responses that have ended."""
        for generation in self._engine.step() if self._engine.in_flight else ():
            self._on_done.pop(generation.id)(generation)


class ContextOverflow(EngineError):
    """The context has no room for one token after a prompt."""


def fit_request(request: GenerationRequest, *, vocabulary: int, context: int) -> GenerationRequest:
    """Return a request with at most the tokens that the context has room for after the prompt.

    Raises EngineError for a request that no engine of this model can answer. It becomes the error of a row, without
    numbers of the request, so that `GROUP BY error` counts.
    """
    sampling, prompt = request.sampling, len(request.prompt_ids)
    if prompt >= context:
        raise ContextOverflow(
            f"the prompt leaves no room for a response in the maximum context length of {context} tokens: "
            "raise search.max_model_len, or drop the prompt"
        )
    if not in_vocabulary(request.prompt_ids.tolist(), vocabulary):
        raise EngineError(f"the prompt is empty, or has token ids outside 0 to {vocabulary - 1}")
    least = min(sampling.temperature, sampling.top_k, sampling.min_p, sampling.max_tokens - 1)
    if least < 0 or not 0 < sampling.top_p <= 1 or sampling.min_p > 1:
        raise EngineError(
            f"the request has temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}, "
            f"min_p {sampling.min_p}, max_tokens {sampling.max_tokens}: they must be at least 0, in (0, 1], at least "
            "0, in [0, 1], and at least 1"
        )
    if prompt + sampling.max_tokens <= context:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=context - prompt))


def in_vocabulary(ids: Sequence[int], vocabulary: int) -> bool:
    """Whether there are token ids, and all of them are in the vocabulary."""
    return len(ids) > 0 and 0 <= min(ids) <= max(ids) < vocabulary
