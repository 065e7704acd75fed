"""Sample the tokens of a batch, each row with its own settings and its own random numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tba.searcher.engines.engine import SamplingSettings

# Shape suffixes: B rows, V vocabulary, C chunks of the vocabulary, K tokens of a chunk.

_CHUNK = 64
# Rounding must not turn a number in [0, 1) into 1, which is past the last token.
_BELOW_ONE = 1 - 2.0**-40


class Drawn(NamedTuple):
    """A token for each row, and its natural-log probability under the distribution that it was drawn from."""

    tokens_B: torch.Tensor
    logprobs_B: torch.Tensor


def sample(logits_BV: torch.Tensor, settings: Sequence[SamplingSettings], uniform_B: torch.Tensor) -> Drawn:
    """Draw one token per row. Row b's depends only on its logits, its settings and uniform_B[b], float64 in [0, 1).

    At temperature 0 it is the token with the largest logit, with its probability at temperature 1.
    """
    device = logits_BV.device
    temperatures = [s.temperature or 1.0 for s in settings]
    scaled_BV = logits_BV / torch.tensor(temperatures, device=device)[:, None]
    nucleus = [row for row, s in enumerate(settings) if s.top_p < 1 and s.temperature > 0]
    if nucleus:
        rows = torch.tensor(nucleus, device=device)
        top_p = torch.tensor([settings[row].top_p for row in nucleus], device=device)
        scaled_BV[rows] = keep_top_p(scaled_BV[rows], top_p)
    greedy = torch.tensor([s.temperature == 0 for s in settings])
    fixed_B = logits_BV.argmax(-1) if bool(greedy.any()) else None
    return inverse_cdf(scaled_BV, uniform_B, greedy.to(device), fixed_B)


def keep_top_p(logits_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Set the logits of all tokens outside the nucleus (Holtzman et al. 2020) to minus infinity."""
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    probabilities_BV = sorted_BV.softmax(-1)
    outside_BV = probabilities_BV.cumsum(-1) - probabilities_BV >= top_p_B[:, None]
    return logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), float("-inf"))


def inverse_cdf(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, greedy_B: torch.Tensor, fixed_B: torch.Tensor | None
) -> Drawn:
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
    return Drawn(tokens_B1[:, 0], logprobs_B1[:, 0])
