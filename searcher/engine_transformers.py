"""Generation with plain Transformers: runs on anything torch runs on, and needs nothing else.

Requests are generated in waves: the queue fills a left-padded batch, every step adds one token to each of
its rows, finished rows leave the batch at once, and the next wave starts when it is empty.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tba.common.errors import CanaryMismatch, ConfigError, EngineError, SnapshotError
from tba.common.snapshot import Snapshot
from tba.common.trajectory import STOP_EOS, STOP_LENGTH, Float32
from tba.searcher.engine import Generation, GenerationRequest, append_version, canary_difference
from tba.searcher.model_files import canary_problem, eos_ids, model_directory, shape_difference, tensor_shapes

# Shape suffixes: B rows of the wave, T positions, V vocabulary.


@dataclass(slots=True)
class _Row:
    """One request of the wave, and what it has got so far."""

    request: GenerationRequest
    started: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class _Wave:
    """A batch in generation. `next_B1` are the tokens to feed; the cache holds all before them."""

    rows: list[_Row]
    next_B1: torch.Tensor
    mask_BT: torch.Tensor
    cache: Any


class TransformersEngine:
    """An `Engine` (searcher/engine.py) on `transformers`, for CPUs and for models that vLLM does not have."""

    def __init__(
        self, model: str, *, dtype: str, device: str, max_in_flight: int, seed: int, canary_tolerance: float
    ) -> None:
        directory = model_directory(model)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {model!r} cannot be loaded: {error}") from error
        self._model.to(device).eval().requires_grad_(False)
        self._device = device
        self._limit = max_in_flight
        self._tolerance = canary_tolerance
        self._generator = torch.Generator(device).manual_seed(seed)
        self._eos = frozenset(eos_ids(directory))
        self._context = int(self._model.config.max_position_embeddings)
        self._version = 0
        self._queue: deque[_Row] = deque()
        self._wave: _Wave | None = None

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        return len(self._queue) + (len(self._wave.rows) if self._wave else 0)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if prompt and response do not fit the model's context."""
        needed = len(request.prompt_ids) + request.sampling.max_tokens
        if needed > self._context:
            raise EngineError(
                f"prompt and response need {needed} tokens, the model has {self._context}: "
                "lower search.max_tokens or drop the prompt"
            )
        self._queue.append(_Row(request, time.perf_counter()))

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""
        if self._wave is None:
            if not self._queue:
                return []
            self._wave = self._start_wave()
        return self._advance(self._wave)

    def load_weights(self, snapshot: Snapshot) -> None:
        """Replace the weights by a verified snapshot's, prove it on the canary, and go on from there.

        All or nothing, as the protocol says: no step runs between the copy and the canary, so requests in
        flight never see refused weights. Their cache keeps the keys and values of the weights that made it.
        """
        targets = self._check(snapshot)
        backup = {name: tensor.clone() for name, tensor in targets.items()}
        self._copy(targets, _read(snapshot))
        try:
            self._prove(snapshot)
        except BaseException:
            self._copy(targets, backup)
            raise
        self._version = snapshot.manifest.version

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for T tokens an array [T - 1]."""
        return [self._score_one(list(sequence)) for sequence in sequences]

    def close(self) -> None:
        """Nothing to end: the memory goes with the object."""

    # ------------------------------------------------------------ generation

    def _start_wave(self) -> _Wave:
        rows = [self._queue.popleft() for _ in range(min(self._limit, len(self._queue)))]
        longest = max(len(row.request.prompt_ids) for row in rows)
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for place, row in enumerate(rows):
            length = len(row.request.prompt_ids)
            ids_BT[place, longest - length :] = torch.from_numpy(row.request.prompt_ids.astype(np.int64))
            mask_BT[place, longest - length :] = 1
        return _Wave(rows, ids_BT.to(self._device), mask_BT.to(self._device), None)

    def _advance(self, wave: _Wave) -> list[Generation]:
        logits_BV = self._forward(wave)
        tokens_B, logprobs_B = self._sample(wave.rows, logits_BV)
        for row, token, logprob in zip(wave.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            append_version(row.runs, self._version, 1)
        wave.next_B1 = tokens_B[:, None]
        wave.mask_BT = torch.nn.functional.pad(wave.mask_BT, (0, 1), value=1)
        return self._retire(wave)

    def _forward(self, wave: _Wave) -> torch.Tensor:
        positions_BT = (wave.mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -wave.next_B1.shape[1] :]
        output = self._model(
            input_ids=wave.next_B1,
            attention_mask=wave.mask_BT,
            position_ids=positions_BT,
            past_key_values=wave.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        wave.cache = output.past_key_values
        logits_BV: torch.Tensor = output.logits[:, -1].float()
        return logits_BV

    def _sample(self, rows: list[_Row], logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities under the distribution they were drawn from."""
        settings = [row.request.sampling for row in rows]
        temperature_B = torch.tensor([s.temperature for s in settings], device=self._device)
        top_p_B = torch.tensor([s.top_p for s in settings], device=self._device)
        greedy_B = temperature_B == 0
        scaled_BV = logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]
        if bool((top_p_B < 1).any()):
            scaled_BV = torch.where(greedy_B[:, None], scaled_BV, keep_top_p(scaled_BV, top_p_B))
        logprobs_BV = scaled_BV.log_softmax(-1)
        drawn_B = torch.multinomial(logprobs_BV.exp(), 1, generator=self._generator)[:, 0]
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]

    def _retire(self, wave: _Wave) -> list[Generation]:
        """Take the finished rows out of the wave."""
        reasons = [self._stop_reason(row) for row in wave.rows]
        finished = [
            _generation(row, reason) for row, reason in zip(wave.rows, reasons, strict=True) if reason is not None
        ]
        kept = [place for place, reason in enumerate(reasons) if reason is None]
        if not kept:
            self._wave = None
        elif finished:
            self._keep_rows(wave, kept)
        return finished

    def _keep_rows(self, wave: _Wave, kept: list[int]) -> None:
        indices = torch.tensor(kept, device=self._device)
        wave.rows = [wave.rows[place] for place in kept]
        wave.next_B1 = wave.next_B1[indices]
        wave.mask_BT = wave.mask_BT[indices]
        wave.cache.batch_select_indices(indices)

    def _stop_reason(self, row: _Row) -> str | None:
        if row.tokens[-1] in self._eos:
            return STOP_EOS
        return STOP_LENGTH if len(row.tokens) >= row.request.sampling.max_tokens else None

    # ------------------------------------------------------------ weights

    def _check(self, snapshot: Snapshot) -> dict[str, torch.Tensor]:
        """The tensors to overwrite, by name. Raises SnapshotError unless the snapshot fits this model."""
        name = f"v{snapshot.manifest.version}"
        if snapshot.manifest.base is not None:
            raise SnapshotError(f"{name} is a delta on v{snapshot.manifest.base}: this engine loads full snapshots")
        tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        found = tensor_shapes(snapshot.weight_files, tied=tied)
        own: dict[str, torch.Tensor] = self._model.state_dict()
        if tied:
            own.pop("lm_head.weight", None)
        expected = {key: (found.get(key, ("F32", ()))[0], tuple(tensor.shape)) for key, tensor in own.items()}
        if difference := shape_difference(expected, found):
            raise SnapshotError(f"{name} does not hold the weights of the model that is served: {difference}")
        vocabulary = int(self._model.config.vocab_size)
        if problem := canary_problem(snapshot.manifest.canary, vocabulary, self._context):
            raise SnapshotError(f"{name} has an unusable canary: {problem}")
        return own

    def _copy(self, targets: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(values[name])

    def _prove(self, snapshot: Snapshot) -> None:
        difference = canary_difference(self, snapshot)
        if not difference <= self._tolerance:  # written so that a NaN is refused
            raise CanaryMismatch(
                f"v{snapshot.manifest.version}: log-probabilities differ by {difference:.3g} on the canary, "
                f"{self._tolerance:.3g} is allowed"
            )

    def _score_one(self, sequence: list[int]) -> Float32:
        ids_1T = torch.tensor([sequence], device=self._device)
        logprobs_TV = self._model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
        scores: Float32 = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].cpu().numpy()
        return scores


def keep_top_p(logits_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Logits with all tokens outside the nucleus (Holtzman et al. 2020) at minus infinity."""
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
    outside_BV = before_BV >= top_p_B[:, None]
    return logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), float("-inf"))


def _read(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in snapshot.weight_files:
        tensors |= load_file(path)
    return tensors


def _generation(row: _Row, reason: str) -> Generation:
    return Generation(
        id=row.request.id,
        response_ids=np.asarray(row.tokens, np.int32),
        logprobs=np.asarray(row.logprobs, np.float32),
        version_runs=np.asarray(row.runs, np.int32),
        stop_reason=reason,
        seconds=time.perf_counter() - row.started,
    )
