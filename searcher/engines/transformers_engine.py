"""Generation with plain Transformers: runs on any device that torch supports, with no other dependency.

Continuous batching: each step adds one token to all rows in one forward pass. Finished rows leave immediately. Waiting
requests join as soon as an eighth of the rows is free, with one forward pass over their prompts, in which samples of
the same prompt share a row. Joining one by one would fill the batch a little better, and cost a pass per response
(docs/decisions/0016).
"""

import copy
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from tba.common.errors import ConfigError, EngineFaulty, SnapshotError, SnapshotRefused, first_line, raised_at
from tba.common.rotation import Rotation
from tba.common.system.load_errors import loading, not_loaded, out_of_memory
from tba.common.weights import adapter
from tba.common.weights.model_files import model_directory, weight_files
from tba.common.weights.pretrained import causal_model, tied_names
from tba.common.weights.snapshot import Canary, Manifest, Snapshot
from tba.common.wire.trajectory import STOP_EOS, STOP_LENGTH, Float32, Int32, encode_kept
from tba.searcher.engines.acceptance import Acceptance, routes_or_quantizes, tensor_shapes
from tba.searcher.engines.engine import Generation, GenerationRequest, LoadReport, SamplingSettings, fit_request
from tba.searcher.engines.kv_cache import GROUPED, BatchKVCache, cache_argument
from tba.searcher.engines.stopping import Stopping

# Shape suffixes: B rows of the batch, P distinct prompts, T positions, V vocabulary, C chunks of it, K tokens of one.

_CHUNK = 64
# Rounding must not turn a number in [0, 1) into 1, which is past the last token.
_BELOW_ONE = 1 - 2.0**-40
_NO_LIMIT = 1 << 30
# Parameters up to which a model in bfloat16 is checked in float32, on a copy of at most 1 GiB.
_COPIED = 1 << 28

# The layer types that the KV cache supports. With a sliding window the mask hides the positions outside.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(slots=True)
class _Row:
    """One request and its response so far. `uniform` are its random numbers, one per token."""

    request: GenerationRequest
    started: float
    uniform: npt.NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Int32] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)


class TransformersEngine:
    """An `Engine` (searcher/engines/engine.py) on `transformers`, for CPUs and for models that vLLM lacks."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        device: str,
        max_in_flight: int,
        seed: int,
        canary_tolerance: float,
        stopping: Stopping,
    ) -> None:
        transformers_logging.disable_progress_bar()
        directory = model_directory(model)
        self._model = _load(directory, getattr(torch, dtype), device)
        self._cache_argument = cache_argument(self._model)
        self._device = device
        self.max_in_flight = max_in_flight
        # No engine metrics.
        self.metrics: dict[str, float] = {}
        self._generator = np.random.default_rng(seed)
        self._stopping = stopping
        config = self._model.config.get_text_config()
        # Cached keys keep their rotation, which is another one above the limit.
        # Models whose attention knows distances alone, such as BLOOM and MPT, have no largest position.
        named = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
        positions = int(named or _NO_LIMIT)
        self._context = min(positions, Rotation.of(config).limit or positions)
        # By name in the files.
        self._names = _names_in_files(self._model)
        tied = tied_names(self._model)
        copies = {name for name, own in self._names.items() if own in tied}
        files = tensor_shapes(weight_files(directory), without=copies)
        # Others are ignored by transformers, so the trainer does not publish them.
        self._shapes = {name: shape for name, shape in files.items() if name in self._names}
        if stale := self._unaccounted():
            raise ConfigError(
                f"{stale[0]!r} of the model has another form or name in the files of {directory}, such as experts one "
                'by one: this engine cannot reload such models, use search.engine = "vllm". If only the tied head is '
                "there, load the model with transformers and save it again"
            )
        self._acceptance = Acceptance(
            self._shapes,
            vocabulary=int(config.vocab_size),
            tolerance=canary_tolerance,
            copies=copies,
            routed=routes_or_quantizes(self._model.config.to_dict()),
        )
        self.weights_version = 0
        # Whose files the weights are from: at the start, the model's.
        self._served = Snapshot(directory, Manifest("", 0, 0, 0.0, {}, Canary([], [])), weight_files(directory))
        self._queue: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = BatchKVCache()
        self._check_steps(directory, math.inf if self._acceptance.routed else canary_tolerance)

    @property
    def in_flight(self) -> int:
        return len(self._queue) + len(self._rows)

    def submit(self, request: GenerationRequest) -> None:
        request = fit_request(request, vocabulary=self._acceptance.vocabulary, context=self._context)
        seed = request.sampling.seed
        generator = self._generator if seed is None else np.random.Generator(np.random.Philox(seed))
        row = _Row(request, time.perf_counter(), generator.random(request.sampling.max_tokens))
        (self._queue.appendleft if request.first else self._queue.append)(row)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        finished: list[Generation] = []
        if self._rows:
            finished += self._advance()
        # After the running rows, so that rows that have just finished make room. A new row gets one token in this step.
        if self._queue and self.max_in_flight - len(self._rows) >= max(1, self.max_in_flight // 8):
            finished += self._admit()
        return finished

    def prepare(self, snapshot: Snapshot) -> None:
        """Check a snapshot; its files are read by `load_weights`. Raises SnapshotError for another model's."""
        self._acceptance.check(snapshot)

    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        """Replace the weights by a verified snapshot's, check it on the canary, and continue from there.

        All or nothing, as the protocol requires: no step runs between the copy and the canary, so requests in flight
        never use refused weights. Their KV cache keeps what older weights computed.
        """
        self._acceptance.check(snapshot)
        if stale := self._unaccounted():
            raise SnapshotRefused(f"v{snapshot.manifest.version} would leave {stale[0]!r} of the model as it is")
        try:
            report = self._exchange(snapshot)
        except EngineFaulty:
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise
            # It is tried again, and may find memory then.
            raise SnapshotError(
                f"out of memory while v{snapshot.manifest.version} was loaded ({first_line(error)}): end other "
                "processes that use its memory, or lower search.max_in_flight"
            ) from error
        self.weights_version = snapshot.manifest.version
        self._served = snapshot
        self._acceptance.uncalibrated = False
        return report

    def _targets(self) -> dict[str, torch.Tensor]:
        """The tensors that a snapshot overwrites, by name in its files. A tied head is not one: it is the embedding."""
        state: dict[str, torch.Tensor] = self._model.state_dict()
        return {name: state[self._names[name]] for name in self._shapes}

    def _exchange(self, snapshot: Snapshot) -> LoadReport:
        """Copy a snapshot's weights and check them. Restores those that serve after any error."""
        times = [time.perf_counter()]
        targets = self._targets()
        values = _read(snapshot)
        calibrate = self._acceptance.uncalibrated and (
            self._acceptance.routed
            or all(torch.equal(one, values[name].to(one.device, one.dtype)) for name, one in targets.items())
        )
        times.append(time.perf_counter())
        try:
            _copy(targets, values)
            times.append(time.perf_counter())
            mismatch = self._acceptance.check_canary(self.score, snapshot, context=self._context, calibrate=calibrate)
        # Also when a signal handler raised: unchecked weights must not serve.
        except BaseException:
            del values
            # Read again: a copy on the device would take as much memory as the model.
            try:
                _copy(targets, _read(self._served))
            except Exception as error:
                raise EngineFaulty(
                    f"a snapshot was refused and v{self.weights_version} could not be restored: {error}; restart the "
                    "searcher"
                ) from error
            raise
        times.append(time.perf_counter())
        read, exchange, canary = np.diff(times).tolist()
        return LoadReport(mismatch, "copy", read, exchange, canary, times[-1] - times[0])

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float32]:
        """Teacher-forced log-probabilities at temperature 1: for T tokens an array [T - 1]."""
        scores: list[Float32] = []
        for sequence in sequences:
            if len(sequence) < 2:
                scores.append(np.zeros(0, np.float32))
                continue
            ids_1T = torch.tensor([list(sequence)], device=self._device)
            logprobs_TV = self._model(input_ids=ids_1T).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].cpu().numpy())
        return scores

    def close(self) -> None:
        """Nothing to close: the memory is freed with the object."""

    def _admit(self) -> list[Generation]:
        """Fill the free rows from the queue. The forward pass over the prompts gives the first tokens."""
        before = len(self._rows)
        rows = [self._queue.popleft() for _ in range(min(self.max_in_flight - before, len(self._queue)))]
        # The samples of a prompt are rows of one batch, so one row of the pass serves all of them.
        keys = [row.request.prompt_ids.tobytes() for row in rows]
        distinct = dict(zip(keys, (row.request.prompt_ids for row in rows), strict=True))
        ids = [torch.from_numpy(prompt.astype(np.int64)) for prompt in distinct.values()]
        ids_PT = pad_sequence(ids, batch_first=True, padding_side="left")
        mask_PT = pad_sequence([*map(torch.ones_like, ids)], batch_first=True, padding_side="left")
        prompts = DynamicCache()
        logits_PV = self._forward(ids_PT, mask_PT, (mask_PT.cumsum(-1) - 1).clamp(min=0), prompts)
        numbers = {key: number for number, key in enumerate(distinct)}
        of_row_B = torch.tensor([numbers[key] for key in keys], device=self._device)
        prompts.batch_select_indices(of_row_B)
        self._cache.join(prompts, [len(row.request.prompt_ids) for row in rows])
        self._rows += rows
        self._add_tokens(rows, logits_PV[of_row_B])
        return self._retire()

    def _advance(self) -> list[Generation]:
        """Generate one more token for every row."""
        last_B1 = torch.tensor([row.tokens[-1:] for row in self._rows])
        self._cache.reserve(len(self._rows))
        mask_BT, positions_B1 = self._cache.mask_and_positions(self._device)
        logits_BV = self._forward(last_B1, mask_BT, positions_B1, self._cache)
        self._cache.end += 1
        self._add_tokens(self._rows, logits_BV)
        return self._retire()

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Logits [B, V] after the last position, float32."""
        output = self._model(
            input_ids=ids_BT.to(self._device),
            attention_mask=mask_BT.to(self._device),
            position_ids=positions_BT.to(self._device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits_BV: torch.Tensor = output.logits[:, -1].float()
        return logits_BV

    def _add_tokens(self, rows: list[_Row], logits_BV: torch.Tensor) -> None:
        uniform_B = torch.tensor([row.uniform[len(row.tokens)] for row in rows], dtype=torch.float64)
        drawn = sample(logits_BV, [row.request.sampling for row in rows], uniform_B.to(self._device))
        for number, kept in drawn.kept.items():
            rows[number].kept.append(kept)
        for row, token, logprob in zip(rows, drawn.tokens_B.tolist(), drawn.logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if not row.runs or row.runs[-1][0] != self.weights_version:
                row.runs.append([self.weights_version, 0])
            row.runs[-1][1] += 1

    def _retire(self) -> list[Generation]:
        reasons = {number: reason for number, row in enumerate(self._rows) if (reason := self._stop_reason(row))}
        finished = [_generation(self._rows[number], reason) for number, reason in reasons.items()]
        if finished:
            self._rows = [self._rows[number] for number in self._cache.leave(reasons.keys())]
        return finished

    def _stop_reason(self, row: _Row) -> str | None:
        stopping = row.request.sampling.stopping or self._stopping
        if row.tokens[-1] in stopping.ids or stopping.completes_string(row.tokens):
            return STOP_EOS
        return STOP_LENGTH if len(row.tokens) >= row.request.sampling.max_tokens else None

    def _check_steps(self, directory: Path, limit: float) -> None:
        """Raise ConfigError unless generated rows have the log-probabilities of one pass over each, within `limit`."""
        # Some models take positions from the length of the cache, padding included; others have no such cache.
        ids = np.random.default_rng(0).integers(0, self._acceptance.vocabulary, 8, np.int32)
        served, name, rows, why, advice = self._model, type(self._model).__name__, self.max_in_flight, "", ""
        try:
            # Quantized weights cannot be converted.
            if served.dtype != torch.float32 and limit < math.inf and served.num_parameters() <= _COPIED:
                self._model = copy.deepcopy(served).float()
            limit = 1e-3 if limit < math.inf and self._model.dtype == torch.float32 else limit
            # Not the methods of a derived class.
            if np.isnan(TransformersEngine.score(self, [ids[: self._context].tolist()])[0]).any():
                raise ConfigError(f"{directory}: the log-probabilities of {name} are not finite: check its weights")
            # One row at a time, without padding, and then in a batch.
            for self.max_in_flight in sorted({1, rows}):
                for length in (1, min(8, self._context - 1)):
                    sampling = SamplingSettings(1.0, 1.0, 4, seed=length)
                    TransformersEngine.submit(self, GenerationRequest(length, ids[:length], sampling))
                done = [one for _ in range(8) for one in TransformersEngine.step(self)]
                whole = TransformersEngine.score(self, [[*ids[: one.id], *one.response_ids] for one in done])
                differences = [one.logprobs - logprobs[one.id - 1 :] for one, logprobs in zip(done, whole, strict=True)]
                if not (largest := np.abs(np.concatenate(differences)).max()) <= limit:
                    why = f"its log-probabilities differ by {largest:.3g} from those of one pass over a row"
                    break
                advice = "search.max_in_flight = 1 or "
        except ConfigError:
            raise
        # A forward of another form may raise anything.
        except Exception as error:
            if out_of_memory(error):
                raise not_loaded(f"the model in {directory}", error, self._device) from error
            why = raised_at(error)
        finally:
            self._model, self._cache, self.max_in_flight = served, BatchKVCache(), rows
        if why:
            cannot = "cannot batch" if advice else "cannot generate with"
            raise ConfigError(f'{directory}: this engine {cannot} {name}: {why}: use {advice}search.engine = "vllm"')

    def _unaccounted(self) -> list[str]:
        """Names of parameters that a snapshot does not overwrite, and that are not tied to one that it does."""
        written, tied = {self._names[name] for name in self._shapes}, tied_names(self._model)
        return sorted(name for name, _ in self._model.named_parameters() if tied.get(name, name) not in written)


def _load(directory: Path, dtype: torch.dtype, device: str) -> Any:
    """Load a model. Raises OutOfMemory, or ConfigError for one with more state than attention's keys and values."""
    with loading(f"the model in {directory}", device):
        model = causal_model(directory, dtype).to(device).requires_grad_(False)
    if other := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES:
        raise ConfigError(
            f"the model in {directory} has layers of type {min(other)!r}, which this engine cannot batch: "
            'use search.engine = "vllm"'
        )
    # A model without sdpa, such as one with extra terms in its attention, keeps its own implementation.
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED)
    return model


def _names_in_files(model: Any) -> dict[str, str]:
    """Map names in the model's files to those in the model, without tensors that loading changes, such as experts."""
    state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    names = {id(tensor): name for name, tensor in state.items()}
    saved = revert_weight_conversion(model, state)
    return {name: names[id(tensor)] for name, tensor in saved.items() if id(tensor) in names}


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
    if snapshot.adapter is not None:
        policy = adapter.load(snapshot.adapter)
        # In float32: copying the sums into the model rounds them.
        for name in policy.factors:
            tensors[name] = tensors[name].float() + torch.from_numpy(policy.change(name))
    return tensors


def _generation(row: _Row, reason: str) -> Generation:
    return Generation(
        id=row.request.id,
        response_ids=np.asarray(row.tokens, np.int32),
        logprobs=np.asarray(row.logprobs, np.float32),
        version_runs=np.asarray(row.runs, np.int32),
        stop_reason=reason,
        seconds=time.perf_counter() - row.started,
        kept=encode_kept(row.tokens, row.kept) if row.kept else np.zeros(0, np.int32),
    )


class Drawn(NamedTuple):
    """A token for each row, and its natural-log probability under the distribution that it was drawn from.

    `kept` are the tokens that were left, ascending, of the rows whose settings cut.
    """

    tokens_B: torch.Tensor
    logprobs_B: torch.Tensor
    kept: dict[int, Int32]


def sample(logits_BV: torch.Tensor, settings: Sequence[SamplingSettings], uniform_B: torch.Tensor) -> Drawn:
    """Draw one token per row. Row b's depends only on its logits, its settings and uniform_B[b], float64 in [0, 1).

    At temperature 0 it is the token with the largest logit, with its probability at temperature 1.
    """
    device = logits_BV.device
    temperatures = [s.temperature or 1.0 for s in settings]
    scaled_BV = logits_BV / torch.tensor(temperatures, device=device)[:, None]
    cut, kept = [row for row, s in enumerate(settings) if s.cuts], dict[int, Int32]()
    if cut:
        cut_BV = keep_likely(scaled_BV[cut], [settings[row] for row in cut])
        scaled_BV[cut] = cut_BV
        left_BV = (cut_BV > float("-inf")).cpu().numpy()
        kept = {row: np.flatnonzero(left_V).astype(np.int32) for row, left_V in zip(cut, left_BV, strict=True)}
    greedy = torch.tensor([s.temperature == 0 for s in settings])
    fixed_B = logits_BV.argmax(-1) if bool(greedy.any()) else None
    return Drawn(*inverse_cdf(scaled_BV, uniform_B, greedy.to(device), fixed_B), kept)


def keep_likely(logits_BV: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """Set the logits of all tokens that min-p, top-k and top-p (Holtzman et al. 2020) cut off to minus infinity."""
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    numbers_3B = torch.tensor([(s.min_p, s.top_k or logits_BV.shape[1], s.top_p) for s in settings]).T.to(logits_BV)
    min_p_B1, top_k_B1, top_p_B1 = numbers_3B[:, :, None]
    outside_BV = sorted_BV < sorted_BV[:, :1] + min_p_B1.log()
    outside_BV |= torch.arange(logits_BV.shape[1], device=logits_BV.device) >= top_k_B1
    probabilities_BV = sorted_BV.masked_fill(outside_BV, float("-inf")).softmax(-1)
    outside_BV |= probabilities_BV.cumsum(-1) - probabilities_BV >= top_p_B1
    # A top_p that is 0 in float32 still keeps the most probable token.
    outside_BV[:, 0] = False
    return logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), float("-inf"))


def inverse_cdf(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, greedy_B: torch.Tensor, fixed_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token whose interval of the CDF contains the number, never one of probability 0; `fixed_B` if greedy.

    It searches in two levels, first among chunks of the vocabulary. So each logit costs one exponential in float32, and
    only sums of few numbers are float64.
    """
    largest_B1 = logits_BV.max(-1, keepdim=True).values
    weights_BV = (logits_BV - largest_B1).exp()
    padded_BV = torch.nn.functional.pad(weights_BV, (0, -weights_BV.shape[1] % _CHUNK))
    weights_BCK = padded_BV.view(len(padded_BV), -1, _CHUNK)
    sums_BC = weights_BCK.sum(-1).double()
    cdf_BC = sums_BC.cumsum(-1)
    total_B1 = cdf_BC[:, -1:]
    target_B1 = uniform_B[:, None].clamp(max=_BELOW_ONE) * total_B1
    chunk_B1 = torch.searchsorted(cdf_BC, target_B1, right=True)
    sum_B1 = sums_BC.gather(1, chunk_B1)
    within_B1 = ((target_B1 - cdf_BC.gather(1, chunk_B1) + sum_B1) / sum_B1).clamp(0, _BELOW_ONE)
    rows_B = torch.arange(len(chunk_B1), device=chunk_B1.device)
    cdf_BK = weights_BCK[rows_B, chunk_B1[:, 0]].double().cumsum(-1)
    tokens_B1 = chunk_B1 * _CHUNK + torch.searchsorted(cdf_BK, within_B1 * cdf_BK[:, -1:], right=True)
    if fixed_B is not None:
        tokens_B1 = torch.where(greedy_B[:, None], fixed_B[:, None], tokens_B1)
    logprobs_B1 = logits_BV.gather(1, tokens_B1) - largest_B1 - total_B1.log().float()
    return tokens_B1[:, 0], logprobs_B1[:, 0]
