"""Loading the policy, and log-probabilities of responses under it.

Shape suffixes: N rows, T tokens of the longest, P tokens of a pass including padding, R response tokens of all rows,
H hidden size, V vocabulary.
"""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.common.errors import ConfigError
from tba.common.rotation import Rotation
from tba.common.system.load_errors import loading
from tba.common.weights.pretrained import causal_model, tied_names
from tba.trainer.batch.batch import Row, counted, pad, plain_row
from tba.trainer.batch.micro_batches import CPU_PASS_TOKENS, GPU_PASS_TOKENS, forward_passes
from tba.trainer.model.chunked_logprobs import Kept, token_logprobs
from tba.trainer.model.packed_attention import ATTENTION
from tba.trainer.model.packing import pack
from tba.trainer.objectives.responses import row_sums
from tba.trainer.preflight.shape import meta_model

# What has a learned value: each turn, each counted token, or neither.
Places = Literal["", "turn", "token"]
# The row of an empty pass: one token, and no response.
_EMPTY_ROW = plain_row(-1, [0], [])
# Enough that dropout or noise of any rate changes one of their logits.
_PROBE_TOKENS = 64
# More than any cap of logits.
_LARGE_LOGIT = 1e4
# Relative change of hidden states by a later token: at most 3e-4 from rounding, and 0.4 and more with attention to it.
_CAUSAL = 1e-2


def load_model(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load a causal language model with float32 weights and without dropout. Raises ConfigError, OutOfMemory.

    On the meta device nothing but its configuration is read: `shard` puts rank 0's weights and buffers into it.
    """
    if device.type == "meta":
        model = meta_model(directory).eval()
        _remove_dropout(model)
        return model
    with loading(f"the model in {directory}", device):
        model = causal_model(directory, torch.float32).to(device)
    _remove_dropout(model)
    _check_head(model)
    return model


def in_half(device: torch.device, dtype: str) -> bool:
    """Whether a trainer on this device computes in bfloat16, under autocast. `dtype` is `model.dtype`."""
    return device.type == "cuda" and dtype == "bfloat16"


def to_bfloat16(model: PreTrainedModel, *, frozen_only: bool = True) -> None:
    """Round weights to bfloat16, in place, for computation under autocast.

    With `frozen_only` these are the frozen weights of linear layers, embeddings and experts: autocast would round each
    of them before its product, so that only memory is saved. Otherwise all weights.
    """
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for parameter in model.parameters():
        # Experts are matrices in one tensor of three dimensions.
        if not frozen_only or (not parameter.requires_grad and (id(parameter) in matrices or parameter.dim() == 3)):
            parameter.data = parameter.data.to(torch.bfloat16)


def structure_of(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model without its weights, on the CPU. To run it, call it with weights in their place."""
    without_weights = {id(parameter): nn.Parameter(parameter.to("meta"), False) for parameter in model.parameters()}
    copied: PreTrainedModel = copy.deepcopy(model, without_weights)
    for buffer in copied.buffers():
        buffer.data = buffer.data.cpu()
    return copied


def _remove_dropout(model: PreTrainedModel) -> None:
    """Set dropout and noise of routers to zero: log pi must be deterministic, also in training mode.

    Layers read the rates from modules, from attributes of their own, or from the configuration in memory.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for owner in (*model.modules(), model.config, model.config.get_text_config()):
        # A threshold of PhiMoE's router, also outside of training.
        threshold = "router_jitter_noise" if hasattr(owner, "input_jitter_noise") else ""
        for name, value in vars(owner).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name) and name != threshold:
                setattr(owner, name, 0.0)


def enable_gradient_checkpointing(model: PreTrainedModel, *, autocast: bool) -> None:
    """Recompute activations in the backward pass, which layers do only in training mode.

    Raises ConfigError if the model computes other log-probabilities in that mode. A model on the meta device is not
    tried: rank 0 does that.
    """
    # Renamed in transformers 5.24, which warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    if model.device.type == "meta":
        enable({"use_reentrant": False})
        model.train()
        return
    tokens_NT = torch.arange(min(_PROBE_TOKENS, model.config.get_text_config().vocab_size), device=model.device)[None]
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        expected = model.eval()(input_ids=tokens_NT, use_cache=False).logits
        enable({"use_reentrant": False})
        found = model.train()(input_ids=tokens_NT, use_cache=False).logits
    # Kernels of a GPU may add in another order. Dropout changes logits by far more.
    near = 1e-2 if autocast else 1e-4
    if not torch.allclose(found, expected, atol=near, rtol=near):
        raise ConfigError(
            f"{type(model).__name__} computes other log-probabilities in training mode, which gradient checkpointing "
            "needs (by dropout or noise): set train.gradient_checkpointing = false"
        )


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """Reject models that scale or cap the logits of their linear head: `Scorer` applies the head alone.

    The head's output is replaced by large numbers, which a cap changes whatever the weights are. Also reject models
    whose hidden states are not finite, or depend on later tokens.
    """
    head, inputs = model.get_output_embeddings(), []

    def replace(_: nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        inputs.append(arguments[0])
        return torch.linspace(-_LARGE_LOGIT, _LARGE_LOGIT, output.shape[-1]).to(output).expand_as(output)

    tokens_NT = torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device)[None]
    with head.register_forward_hook(replace):
        logits_NTV = model(input_ids=tokens_NT, use_cache=False).logits
    name, body, near = type(model).__name__, model.base_model, partial(torch.allclose, atol=1e-3, rtol=1e-3)
    if body is model:
        raise ConfigError(f"transformers names no body of {name} apart from its head: this release cannot train it")
    hidden_NTH = getattr(body(input_ids=tokens_NT, use_cache=False), "last_hidden_state", head.weight[:1])
    if not hidden_NTH.isfinite().all():
        raise ConfigError(f"{name} computes numbers that are not finite: its weights are damaged, copy them again")
    unchanged = inputs and torch.equal(logits_NTV, replace(head, (hidden_NTH,), logits_NTV))
    if not unchanged or inputs[0].shape != hidden_NTH.shape or not near(inputs[0], hidden_NTH):
        raise ConfigError(f"{name} scales or caps its logits: this release cannot train it")
    # Of the same shape: with other shapes, rounding may choose other experts.
    other_NT = torch.cat([tokens_NT[:, :-1], tokens_NT[:, :1]], dim=1)
    changed_NTH = body(input_ids=other_NT, use_cache=False).last_hidden_state - hidden_NTH
    if changed_NTH[:, :-1].norm() > _CAUSAL * hidden_NTH[:, :-1].norm():
        raise ConfigError(f"in {name} tokens depend on later ones, as in an encoder: it is no causal language model")


class Scores(NamedTuple):
    """The scores of some rows, in their order.

    `logprob_R` has every response token, masked ones included, at temperature 1; it is 0 in the contexts of segments.
    `tempered_R` is that of the distribution that the engine sampled from, at the temperature and over the kept tokens
    of each row, if that is asked for; otherwise the same tensor. On request there are `prompt_NH`, the mean of each
    prompt's last hidden states, `place_SH`, the last hidden state of the token before each turn (`Row.turns`) or each
    counted token, detached, and `entropy_R`, the entropy in nats of the distribution at each response token.
    """

    logprob_R: Tensor
    tempered_R: Tensor
    prompt_NH: Tensor | None = None
    entropy_R: Tensor | None = None
    place_SH: Tensor | None = None


class Scorer(nn.Module):
    """Log-probabilities of response tokens under one model.

    `autocast` computes in bfloat16 on float32 weights; `exact_logits` are then not rounded to bfloat16. `packed` puts
    all rows of a call into one pass without padding; otherwise rows of similar lengths share a pass. The class is a
    module so that FSDP can shard it: everything that uses weights happens inside `forward`.
    """

    def __init__(
        self, model: PreTrainedModel, *, autocast: bool = False, packed: bool = False, exact_logits: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._autocast, self._packed, self._exact_logits = autocast, packed, exact_logits
        self._rotation = Rotation.of(model.config)
        if autocast:
            # Hidden states are float32 between the layers, also where the embeddings are in bfloat16.
            model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())
        if packed:
            model.set_attn_implementation(ATTENTION)

    @property
    def device(self) -> torch.device:
        """The device of the computation. It is read at each call because FSDP moves the model."""
        device: torch.device = self.model.device
        return device

    @property
    def pass_overhead(self) -> int | None:
        """What one more forward pass costs, in tokens; None where all rows are packed into one pass."""
        if self._packed:
            return None
        return GPU_PASS_TOKENS if self.device.type == "cuda" else CPU_PASS_TOKENS

    def passes(self, lengths: Sequence[int]) -> list[list[int]]:
        """Split rows of these lengths into forward passes, in which no row depends on the others; indices of each."""
        return self._rotation.split(lengths, partial(forward_passes, overhead=self.pass_overhead))

    def score(
        self,
        rows: Sequence[Row],
        passes: Sequence[Sequence[int]] | None = None,
        *,
        tempered: bool = False,
        pooled: bool = False,
        entropy: bool = False,
        places: Places = "",
    ) -> Scores:
        """Score rows, in their order. The flags ask for the optional fields of `Scores`.

        Each sequence of a row is computed alone. `passes` are the forward passes as indices into the sequences of all
        rows, by default those of `passes`. All of them are parts of one graph, so a loss on all rows is exact. An empty
        pass runs over a single token and yields nothing: FSDP's collectives need it where other ranks have more passes.
        """
        each = [row.sequences for row in rows]
        sequences = list(itertools.chain(*each))
        if passes is None:
            passes = self.passes([one.tokens for one in sequences])
        filled, all_sequences = [], list(sequences)
        for part in passes:
            filled.append(part or [len(all_sequences)])
            if not part:
                all_sequences.append(_EMPTY_ROW)
        temperature_R = _temperatures(all_sequences) if tempered else None
        kept = _kept(all_sequences) if tempered else None
        place_S = _value_places(all_sequences, places) if places else None
        scores: Scores = self(all_sequences, filled, temperature_R, kept, pooled, entropy, place_S)
        if temperature_R is None:
            scores = scores._replace(tempered_R=scores.logprob_R)
        if len(sequences) > len(rows):
            place_R = _places(rows).to(scores.logprob_R.device)
            zero_R = scores.logprob_R.new_zeros(sum(len(row.response_ids) for row in rows))
            by_token = {name: getattr(scores, name) for name in ("logprob_R", "tempered_R", "entropy_R")}
            placed = {name: zero_R.index_copy(0, place_R, one) for name, one in by_token.items() if one is not None}
            scores = scores._replace(**placed)
        if scores.prompt_NH is None:
            return scores
        firsts = list(itertools.accumulate(map(len, each), initial=0))[:-1]
        return scores._replace(prompt_NH=scores.prompt_NH[firsts])

    def forward(
        self,
        rows: Sequence[Row],
        passes: Sequence[Sequence[int]],
        temperature_R: Tensor | None,
        kept: Kept | None,
        pooled: bool,
        entropy: bool,
        place_S: list[int] | None,
    ) -> Scores:
        """Score rows without segments. Without temperatures `tempered_R` is empty."""
        hidden: list[Tensor] = []
        pools: list[Tensor] = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            for part in passes:
                self._rotation.forget(self.model)
                layout = (pack if self._packed else pad)([rows[n] for n in part], self.device)
                output = self.model.base_model(input_ids=layout.tokens_NT, use_cache=False, **layout.model_kwargs)
                hidden_PH = output.last_hidden_state.flatten(0, 1)
                hidden += torch.split(hidden_PH.index_select(0, layout.source_R), layout.lengths)
                if pooled:
                    prompts = zip(layout.starts, layout.prompt_lengths, strict=True)
                    pools += [hidden_PH[start : start + length].mean(dim=0) for start, length in prompts]
            order = np.argsort(np.concatenate(passes)).tolist()
            targets_R = torch.from_numpy(np.concatenate([row.response_ids for row in rows]).astype(np.int64))
            head, hidden_RH = self.model.get_output_embeddings(), torch.cat([hidden[n] for n in order])
            logprob_R, tempered_R, entropy_R = token_logprobs(
                head,
                hidden_RH,
                targets_R.to(self.device),
                temperature_R=None if temperature_R is None else temperature_R.to(self.device),
                kept=None if kept is None else Kept(*(one.to(self.device) for one in kept)),
                entropy=entropy,
                exact=self._exact_logits,
            )
        return Scores(
            logprob_R,
            tempered_R,
            torch.stack(pools)[order] if pooled else None,
            entropy_R if entropy else None,
            None if place_S is None else hidden_RH.detach()[place_S],
        )


def _temperatures(rows: Sequence[Row]) -> Tensor | None:
    """Return the temperature of each response token, 1 where it is unknown: [R] in float64.

    None if all are 1, and no token was cut off.
    """
    if all(row.temperature in (0, 1) and not len(row.kept) for row in rows):
        return None
    values = np.repeat([row.temperature or 1.0 for row in rows], [len(row.response_ids) for row in rows])
    return torch.from_numpy(values)


def _kept(rows: Sequence[Row]) -> Kept | None:
    """Return the kept tokens of all rows; None if no row has any."""
    if not any(len(row.kept) for row in rows):
        return None
    whole = [len(row.kept) == 0 for row in rows]
    streams = [row.kept if len(row.kept) else np.zeros(len(row.response_ids), np.int32) for row in rows]
    kept = np.concatenate(streams).astype(np.int64)
    counts_R = np.diff(np.flatnonzero(kept == 0), prepend=-1) - 1
    is_whole_R = np.repeat(whole, [len(row.response_ids) for row in rows])
    return Kept(*map(torch.from_numpy, (kept[kept > 0] - 1, counts_R, is_whole_R)))


def _value_places(sequences: Sequence[Row], places: Places) -> list[int]:
    """Return where the turns of all sequences start, in the tokens of all, or where their counted tokens are."""
    if places == "token":
        counted_S: list[int] = counted(sequences).nonzero()[:, 0].tolist()
        return counted_S
    starts = itertools.accumulate([len(one.response_ids) for one in sequences], initial=0)
    return [start + turn for start, one in zip(starts, sequences, strict=False) for turn, _ in one.turns]


def _places(rows: Sequence[Row]) -> Tensor:
    """Return where the tokens of all sequences are in the responses of the rows: [S]."""
    starts = itertools.accumulate([len(row.response_ids) for row in rows], initial=0)
    spans = [(start, span) for start, row in zip(starts, rows, strict=False) for span in row.spans]
    return torch.from_numpy(np.concatenate([np.arange(start + first, start + end) for start, (_, first, end) in spans]))


def sequence_logprobs(logprob_R: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the log-probability of each whole response: [N] in float64, the sum over its counted tokens."""
    return row_sums(logprob_R, counted(rows).to(logprob_R.device), [len(row.response_ids) for row in rows])


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict with each tied tensor once, under the name by which transformers saves it."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


class LogZHead(nn.Module):
    """log Z(x) as a linear function of the mean of the prompt's last hidden states (Lee et al. 2024).

    It is for the objectives `tb_learned_z` and `flowrl`. b are prompts. With `objective.log_z = "turn"` they are turns,
    for `tb_prefix` and `ppo` counted tokens, each with the last hidden state before it. The result is then a value,
    such as beta log Z: in units of the reward it is learned as fast for each beta.

    The hidden states are detached: the policy is not trained to make log Z easier to predict. All weights start at
    zero, and so does log Z.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, prompt_bH: Tensor) -> Tensor:
        """Return log Z: [b] in float64, on the CPU, where losses are computed."""
        log_z_b: Tensor = self.linear(prompt_bH.detach().float())[:, 0].double().cpu()
        return log_z_b
