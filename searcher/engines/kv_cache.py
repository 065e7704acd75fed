"""The KV cache of a continuous batch: requests join and leave while the others continue.

    row 0   . . . . p p p p p p r r r r r|          p prompt, r response, | the column that all rows write next
    row 1   . . . . . . . . . . p p p p r|          . masked
    row 2   . p p r r r r r r r r r r r r|
              ^ begin                    ^ end

All rows write the same column, so a step is one slice assignment per layer, and the prompt of a request that joins is
copied in so that it ends at `end`. A read returns the columns from `begin`, the start of the oldest row, as a view:
nothing is copied per step, where a `DynamicCache` copies its whole content.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Shape suffixes: B rows, T columns, H heads of keys and values, G heads of queries to each of them, D head dimension.

GROUPED = "tba_grouped_sdpa"
_SPARE_COLUMNS = 64


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name by which a model's forward takes its KV cache: transformers renames it between 5.19 and 5.40."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class BatchKVCache(Cache):  # type: ignore[misc]
    """Keys and values of a changing batch, with rows numbered from 0 without gaps."""

    layers: list["_Layer"]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._starts: list[int] = []
        self.end = 0

    @property
    def rows(self) -> int:
        return len(self._starts)

    @property
    def begin(self) -> int:
        """First column that any row uses."""
        return min(self._starts, default=self.end)

    def mask_and_positions(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """For a step: the attention mask [B, T + 1], the new column included, and each row's new position [B, 1]."""
        start_B1 = torch.tensor(self._starts, device=device)[:, None]
        return torch.arange(self.begin, self.end + 1, device=device) >= start_B1, self.end - start_B1

    def join(self, prompts: DynamicCache, lengths: Sequence[int]) -> None:
        """Append rows: left-padded prompts of these lengths."""
        if not self.layers:
            self.layers = [_Layer(self) for _ in prompts.layers]
            for layer, prompt in zip(self.layers, prompts.layers, strict=True):
                layer.lazy_initialization(prompt.keys, prompt.values)
        self.reserve(self.rows + len(lengths), before=max(lengths))
        rows, columns = slice(self.rows, self.rows + len(lengths)), slice(self.end - max(lengths), self.end)
        for layer, prompt in zip(self.layers, prompts.layers, strict=True):
            layer.keys[rows, :, columns], layer.values[rows, :, columns] = prompt.keys, prompt.values
        self._starts += [self.end - length for length in lengths]

    def leave(self, rows: Collection[int]) -> list[int]:
        """Drop rows; the last ones take their numbers. Returns the earlier number of each row that is left."""
        left = self.rows - len(rows)
        kept = list(range(left))
        holes = [row for row in kept if row in rows]
        last = [row for row in range(left, self.rows) if row not in rows]
        for hole, row in zip(holes, last, strict=True):
            kept[hole] = row
        self._starts = [self._starts[row] for row in kept]
        if holes:
            used = slice(min(self._starts[hole] for hole in holes), self.end)
            for layer in self.layers:
                for tensor in (layer.keys, layer.values):
                    tensor[holes, :, used] = tensor[last, :, used]
        return kept

    def reserve(self, rows: int, *, before: int = 0) -> None:
        """Ensure space for as many rows, the column at `end` and `before` columns left of it, before each step."""
        held, _, width, _ = self.layers[0].keys.shape
        if rows <= held and before <= self.end < width:
            return
        begin = self.begin
        used = self.end - begin
        end = max(used, before)
        # Half as much again: the copies of used columns then cost about two columns per step until the next one.
        columns = end + max(end // 2, _SPARE_COLUMNS)
        for layer in self.layers:
            layer.keys, layer.values = (
                _larger(one, max(rows, held), columns, slice(begin, self.end), end - used)
                for one in (layer.keys, layer.values)
            )
        self._starts = [start - begin + end - used for start in self._starts]
        self.end = end


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: `keys` and `values` [rows, H, columns, D], of which the batch is the first rows."""

    def __init__(self, batch: BatchKVCache) -> None:
        super().__init__()
        self._batch = batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Empty, but with the right dtype, device, heads and head dimension: `reserve` enlarges it.
        self.keys, self.values = key_states[:0, :, :0], value_states[:0, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one column and return all used columns, as views."""
        rows, begin, end = self._batch.rows, self._batch.begin, self._batch.end
        self.keys[:rows, :, end] = key_states[:, :, 0]
        self.values[:rows, :, end] = value_states[:, :, 0]
        return self.keys[:rows, :, begin : end + 1], self.values[:rows, :, begin : end + 1]

    def get_seq_length(self) -> int:
        return self._batch.end - self._batch.begin

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def _larger(tensor: torch.Tensor, rows: int, columns: int, used: slice, target: int) -> torch.Tensor:
    """Return a copy in a larger tensor, in which the columns `used` begin at `target`."""
    # Zeros, because a masked column still enters the weighted sum: 0 x NaN would be NaN.
    larger = tensor.new_zeros(rows, tensor.shape[1], columns, tensor.shape[3])
    width = used.stop - used.start
    larger[: tensor.shape[0], :, target : target + width] = tensor[:, :, used]
    return larger


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa` of transformers, except that with one token per row the query heads of a key head are its queries.

    With a mask, transformers copies keys and values for each query head, in every layer. Returns [B, 1, heads, D].
    """
    rows, heads, length, width = query.shape
    if length != 1 or "position_bias" in kwargs:
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    query_BHGD = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    mixed_BHGD = scaled_dot_product_attention(query_BHGD, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed_BHGD.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
