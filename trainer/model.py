"""The policy: loading it, and log-probabilities of responses under it.

Shape suffixes: N rows, T tokens of the longest, P tokens of a pass with its padding, R response tokens of all rows,
H hidden size, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tba.common.errors import ConfigError
from tba.common.memory import loading
from tba.common.quantity import quantity
from tba.trainer.batch import Layout, Row, by_length, counted, pad
from tba.trainer.objectives.responses import row_sums
from tba.trainer.packing import ATTENTION, pack
from tba.trainer.selective import selective_logprobs, selective_logprobs_and_entropy

# What a forward pass over nothing goes over: a token whose prediction nobody asks for.
_NOTHING = Row(
    id=-1,
    prompt_ids=np.zeros(1, np.int32),
    response_ids=np.zeros(0, np.int32),
    sampling_logprobs=np.zeros(0, np.float32),
    loss_mask=np.zeros(0, np.uint8),
    on_policy=False,
)

# What one forward pass more costs, in tokens: below it, padding is cheaper than another pass. On a GPU a pass has to
# be large to fill it.
_CPU_PASS_TOKENS = 64
_GPU_PASS_TOKENS = 4096


def load_model(directory: Path, device: torch.device) -> PreTrainedModel:
    """A causal language model with float32 weights and without dropout. Raises ConfigError, MemoryShort."""
    with loading(f"the model in {directory}", device):
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        if missing := info["missing_keys"]:
            # transformers would go on with random weights there.
            lacking = quantity(len(missing), "weight")
            raise ConfigError(f"the files in {directory} lack {lacking} of the model, {min(missing)} for one")
        model.to(device).eval()
    _remove_dropout(model)
    _check_head(model)
    return model


def structure_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU that has no weights, to be called with others' weights in their place."""
    hollow = {id(parameter): nn.Parameter(parameter.to("meta"), False) for parameter in model.parameters()}
    copied: PreTrainedModel = copy.deepcopy(model, hollow)
    for buffer in copied.buffers():
        buffer.data = buffer.data.cpu()
    return copied


def _remove_dropout(model: PreTrainedModel) -> None:
    """log pi must be one number, also in training mode, which gradient checkpointing needs."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """Refuse models that do more to their logits than a linear head: `score` would miss it."""
    tokens_NT = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    logits_NTV = model(input_ids=tokens_NT, use_cache=False).logits
    hidden_NTH = model.base_model(input_ids=tokens_NT, use_cache=False).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden_NTH), logits_NTV, atol=1e-3, rtol=1e-3):
        raise ConfigError(f"{type(model).__name__} scales or caps its logits: this release cannot train it")


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprob_R` of every response token, masked ones too, row after row, and if they were asked for `prompt_NH`, the
    mean of each prompt's last hidden states, and `entropy_R`, of the distribution at each of these tokens."""

    logprob_R: Tensor
    prompt_NH: Tensor | None = None
    entropy_R: Tensor | None = None


class Scorer(nn.Module):
    """Log-probabilities, at temperature 1, of response tokens under one model.

    `autocast` computes in bfloat16 on float32 weights. `packed` puts all rows of a call into one pass without padding,
    else they go in passes of like length. It is a module so that FSDP can shard it: all that touches weights happens
    inside its call.
    """

    def __init__(self, model: PreTrainedModel, *, autocast: bool, packed: bool = False) -> None:
        super().__init__()
        self.model = model
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._autocast = autocast
        self._packed = packed
        if packed:
            model.set_attn_implementation(ATTENTION)

    @property
    def device(self) -> torch.device:
        """Where it computes; FSDP moves a model."""
        device: torch.device = self.model.device
        return device

    def passes_of(self, lengths: Sequence[int]) -> list[list[int]]:
        """How rows of these lengths are divided over forward passes: indices, each exactly once."""
        if self._packed:
            return [list(range(len(lengths)))] if lengths else []
        return by_length(lengths, _GPU_PASS_TOKENS if self.device.type == "cuda" else _CPU_PASS_TOKENS)

    def score(self, rows: Sequence[Row], *, pooled: bool = False, entropy: bool = False, passes: int = 0) -> Scores:
        """Rows in their order; `pooled` asks for the prompts' mean hidden states too, `entropy` for that.

        All passes are parts of one graph: a loss on all rows together is exact. Where other ranks make more `passes`,
        some are over nothing: FSDP's collectives need them, and no number comes of them.
        """
        parts = self.passes_of([row.tokens for row in rows])
        idle = range(len(rows), len(rows) + max(passes - len(parts), 0))
        logprob_R, prompt_NH, entropy_R = self(
            [*rows, *(_NOTHING for _ in idle)], [*parts, *([n] for n in idle)], pooled, entropy
        )
        return Scores(logprob_R, prompt_NH[: len(rows)] if pooled else None, entropy_R if entropy else None)

    def forward(
        self, rows: Sequence[Row], passes: Sequence[Sequence[int]], pooled: bool, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of `Scores`; what is not asked for is empty."""
        hidden: list[Tensor] = []
        pools: list[Tensor] = []
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            for part in passes:
                laid = (pack if self._packed else pad)([rows[n] for n in part], self.device)
                output = self.model.base_model(input_ids=laid.tokens_NT, use_cache=False, **laid.told)
                hidden_PH = output.last_hidden_state.flatten(0, 1)
                hidden += torch.split(hidden_PH.index_select(0, laid.source_R), laid.lengths)
                if pooled:
                    pools.append(_mean_of_prompts(hidden_PH, laid))
            order = np.argsort(np.concatenate(passes)).tolist()
            targets_R = torch.from_numpy(np.concatenate([row.response_ids for row in rows]).astype(np.int64))
            head, hidden_RH = self.model.get_output_embeddings(), torch.cat([hidden[n] for n in order])
            entropy_R = None
            if entropy:
                logprob_R, entropy_R = selective_logprobs_and_entropy(head, hidden_RH, targets_R.to(self.device))
            else:
                logprob_R = selective_logprobs(head, hidden_RH, targets_R.to(self.device))
        nothing = logprob_R.new_zeros(0)
        return logprob_R, torch.cat(pools)[order] if pooled else nothing, nothing if entropy_R is None else entropy_R


def _mean_of_prompts(hidden_PH: Tensor, laid: Layout) -> Tensor:
    prompts = zip(laid.starts, laid.prompt_lengths, strict=True)
    return torch.stack([hidden_PH[start : start + length].mean(dim=0) for start, length in prompts])


def sequence_logprobs(logprob_R: Tensor, rows: Sequence[Row]) -> Tensor:
    """[N] in float64: the sum over the counting tokens of each row."""
    return row_sums(logprob_R, counted(rows).to(logprob_R.device), [len(row.response_ids) for row in rows])


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict with each tied tensor once, under the name that transformers saves it by."""
    tied = set(model.all_tied_weights_keys)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
