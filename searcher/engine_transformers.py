"""Generation with plain Transformers: runs on anything torch runs on, and needs nothing else.

Requests are generated in waves: the queue fills a left-padded batch, every step adds one token to each row of
each wave, and finished rows leave at once. A wave starts when half of the places are free, so that there are
few of them: the cost of a step is nearly that of its number of waves.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tba.common.errors import ConfigError, SnapshotError
from tba.common.model_files import eos_ids, model_directory, weight_files
from tba.common.snapshot import Snapshot
from tba.common.trajectory import STOP_EOS, STOP_LENGTH, Float32
from tba.searcher.engine import Generation, GenerationRequest, LoadReport, append_version, check_request
from tba.searcher.snapshot_checks import check_snapshot, prove, tensor_shapes

# Shape suffixes: B rows of the wave, T positions, V vocabulary.


@dataclass(slots=True)
class _Row:
    """One request of the wave, and what it has got so far."""

    request: GenerationRequest
    started: float
    generator: torch.Generator | None  # of a request with a seed
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
        transformers_logging.disable_progress_bar()
        directory = model_directory(model)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), use_safetensors=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the model in {directory} cannot be loaded: {reason}") from error
        self._model.to(device).eval().requires_grad_(False)
        self._device = device
        self._limit = max_in_flight
        self._tolerance = canary_tolerance
        self._generator = torch.Generator().manual_seed(seed)
        self._eos = frozenset(eos_ids(directory))
        self._context = int(self._model.config.max_position_embeddings)
        self._vocabulary = int(self._model.config.vocab_size)
        self._tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        self._shapes = tensor_shapes(weight_files(directory), tied=self._tied)
        if other := sorted(self._shapes.keys() - self._model.state_dict().keys()):
            raise ConfigError(
                f"the files in {directory} name tensors otherwise than transformers holds them ({other[0]!r} for one): "
                'this engine cannot reload such models, use search.engine = "vllm"'
            )
        self._version = 0
        self._queue: deque[_Row] = deque()
        self._waves: list[_Wave] = []

    @property
    def weights_version(self) -> int:
        """Version that the next token will be produced by."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        return len(self._queue) + self._active

    @property
    def _active(self) -> int:
        return sum(len(wave.rows) for wave in self._waves)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises EngineError if prompt and response do not fit the model's context."""
        check_request(request, vocabulary=self._vocabulary, context=self._context)
        seed = request.sampling.seed
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._queue.append(_Row(request, time.perf_counter(), generator))

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Advance all requests by about one token and return those that finished. [] when idle."""
        free = self._limit - self._active
        if self._queue and free >= max(1, self._limit // 2):
            self._waves.append(self._start_wave(free))
        finished = [generation for wave in self._waves for generation in self._advance(wave)]
        self._waves = [wave for wave in self._waves if wave.rows]
        return finished

    def prepare(self, snapshot: Snapshot) -> None:
        """Nothing: this engine reads the files when it loads them. Raises SnapshotError for another model's."""
        check_snapshot(snapshot, self._shapes, tied=self._tied, vocabulary=self._vocabulary)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, prove it on the canary, and go on from there.

        All or nothing, as the protocol says: no step runs between the copy and the canary, so requests in
        flight never see refused weights. Their cache keeps the keys and values of the weights that made it.
        """
        check_snapshot(snapshot, self._shapes, tied=self._tied, vocabulary=self._vocabulary)
        times = [time.perf_counter()]
        targets = self._targets()
        backup = {name: tensor.clone() for name, tensor in targets.items()}
        values = _read(snapshot)
        times.append(time.perf_counter())
        try:
            _copy(targets, values)
            times.append(time.perf_counter())
            mismatch = prove(self, snapshot, self._tolerance, context=self._context)
        except BaseException:  # also when a signal handler raised: unproven weights must not serve
            _copy(targets, backup)
            raise
        times.append(time.perf_counter())
        self._version = snapshot.manifest.version
        read, exchange, canary = np.diff(times).tolist()
        parts = (read, exchange, canary, times[-1] - times[0])
        return LoadReport(mismatch.maximum, mismatch.mean, mismatch.kl, "copy", *parts)

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for T tokens an array [T - 1]."""
        return [self._score_one(list(sequence)) for sequence in sequences]

    def close(self) -> None:
        """Nothing to end: the memory goes with the object."""

    # ------------------------------------------------------------ generation

    def _start_wave(self, free: int) -> _Wave:
        rows = [self._queue.popleft() for _ in range(min(free, len(self._queue)))]
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
        tokens_B = torch.where(greedy_B, logits_BV.argmax(-1), inverse_cdf(logprobs_BV, self._uniform(rows)))
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]

    def _uniform(self, rows: list[_Row]) -> torch.Tensor:
        """One number in [0, 1) per row, from the request's own generator if it has a seed."""
        uniform_B = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        for place, row in enumerate(rows):
            if row.generator is not None:
                uniform_B[place] = torch.rand(1, dtype=torch.float64, generator=row.generator)[0]
        return uniform_B.to(self._device)

    def _retire(self, wave: _Wave) -> list[Generation]:
        """Take the finished rows out of the wave."""
        reasons = [self._stop_reason(row) for row in wave.rows]
        finished = [
            _generation(row, reason) for row, reason in zip(wave.rows, reasons, strict=True) if reason is not None
        ]
        kept = [place for place, reason in enumerate(reasons) if reason is None]
        if finished:
            self._keep_rows(wave, kept)
        return finished

    def _keep_rows(self, wave: _Wave, kept: list[int]) -> None:
        wave.rows = [wave.rows[place] for place in kept]
        if not kept:
            return
        indices = torch.tensor(kept, device=self._device)
        wave.next_B1 = wave.next_B1[indices]
        wave.mask_BT = wave.mask_BT[indices]
        wave.cache.batch_select_indices(indices)

    def _stop_reason(self, row: _Row) -> str | None:
        if row.tokens[-1] in self._eos:
            return STOP_EOS
        return STOP_LENGTH if len(row.tokens) >= row.request.sampling.max_tokens else None

    # ------------------------------------------------------------ weights

    def _targets(self) -> dict[str, torch.Tensor]:
        """The tensors that a snapshot overwrites, by name; a tied head is its embedding."""
        state: dict[str, torch.Tensor] = self._model.state_dict()
        return {name: tensor for name, tensor in state.items() if name in self._shapes}

    def _score_one(self, sequence: list[int]) -> Float32:
        if len(sequence) < 2:
            return np.zeros(0, np.float32)
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


def inverse_cdf(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token whose part of [0, 1) holds the number: exact, and never one of probability 0."""
    cdf_BV = logprobs_BV.double().exp().cumsum(-1)
    target_B1 = (uniform_B * cdf_BV[:, -1])[:, None]
    return torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0]


def _copy(targets: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


def _read(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in snapshot.weight_files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{path} cannot be read: {error}") from error
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
