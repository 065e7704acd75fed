"""The arguments of an objective: the responses of a micro-batch, group after group, and the size of the whole batch.

An objective returns the micro-batch's part of the loss. Everything it divides by is counted over the whole batch and
all ranks (`Totals`), so the parts add up to the same loss and gradient however the batch is cut.

Shape suffixes: b prompts of a micro-batch, K responses to each, N = b x K rows, R response tokens, S turns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Totals:
    """Sizes of the whole batch, over all micro-batches and ranks: B prompts, B x K rows, counted tokens."""

    prompts: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of all responses, in their order, S of them. Each is a run of counted tokens.

    `lengths` are the tokens of each turn. `row_S` is the row of a turn, `depth_S` the number of turns before it in that
    row. `history_S` numbers what came before a turn: the same number means the same tokens in the same group,
    and `shared_S` is whether several trajectories of the group have it.
    `reward_S` sums to the rewards of the rows. `reference_S` are log-probabilities under the reference policy.
    `value_S` is the learned beta log Z of the history, in units of the reward, with gradient.
    """

    lengths: list[int]
    row_S: Tensor
    depth_S: Tensor
    history_S: Tensor
    shared_S: Tensor
    reward_S: Tensor
    reference_S: Tensor
    value_S: Tensor


@dataclass(frozen=True, slots=True)
class Responses:
    """K responses to each of b prompts; row i belongs to prompt i // K. Log-probabilities are natural logarithms.

    `logprob_R` is under the policy being trained, at temperature 1, and carries the gradient. `tempered_R` is the same
    at the temperature with which each row was sampled; None means that this is 1. `sampled_logprob_R` is what the
    engine reported, under the weights and temperature that produced the token. It is only comparable in the rows of
    `known_bK`, None for all: not in demonstrations, for example. Tokens with `mask_R`
    False, for example tool output, were not chosen by the policy and do not count. `lengths` are the response tokens
    of each row. `reference_bK` are sums over the counted tokens under the reference policy, NaN if the objective needs
    none. `staleness_bK` is in optimiser steps, inf for responses of explorers. `log_z_bK` is a learned log Z, for the
    objectives that learn it, `turns` are for the one with a log Z of each turn. `value_R` is what the head makes of
    everything before a token, in units of the reward, with gradient, and 0 where a token does not count; `reference_R`
    are log-probabilities under the reference policy. Both are for objectives with a value of each token.
    """

    logprob_R: Tensor
    sampled_logprob_R: Tensor
    mask_R: Tensor
    lengths: list[int]
    reward_bK: Tensor
    reference_bK: Tensor
    staleness_bK: Tensor
    totals: Totals
    log_z_bK: Tensor | None = None
    tempered_R: Tensor | None = None
    known_bK: Tensor | None = None
    turns: Turns | None = None
    value_R: Tensor | None = None
    reference_R: Tensor | None = None

    @property
    def policy_bK(self) -> Tensor:
        """Log-probabilities of whole responses under the policy, at temperature 1: [b, K], float64, with gradient."""
        return self.per_row(self.logprob_R)

    @property
    def at_sampling_R(self) -> Tensor:
        """Log-probabilities under the policy at the temperature of sampling: [R], with gradient."""
        return self.logprob_R if self.tempered_R is None else self.tempered_R

    @property
    def at_sampling_bK(self) -> Tensor:
        """Log-probabilities of whole responses under the policy at the temperature of sampling: [b, K], float64."""
        return self.per_row(self.at_sampling_R)

    @property
    def usable_R(self) -> Tensor:
        """Counted tokens of a known sampler: [R], bool."""
        return self.mask_R if self.known_bK is None else self.mask_R & self.per_token(self.known_bK)

    @property
    def log_ratio_R(self) -> Tensor:
        """log pi / mu of each token at the temperature of sampling: [R], float64; 0 if unknown or not counted."""
        return torch.where(self.usable_R, self.at_sampling_R.double() - self.sampled_logprob_R, 0.0)

    @property
    def log_ratio_bK(self) -> Tensor:
        """log pi / mu of whole responses, at the temperature of sampling: [b, K], float64; 0 where it is unknown."""
        return self.only_known(self.at_sampling_bK - self.per_row(self.sampled_logprob_R))

    def only_known(self, value_bK: Tensor) -> Tensor:
        """Replace the values of responses whose sampler is unknown by 0: [b, K]."""
        return value_bK if self.known_bK is None else torch.where(self.known_bK, value_bK, 0.0)

    @property
    def tokens_bK(self) -> Tensor:
        """Counted tokens of each response: [b, K], float64."""
        return row_totals(self.mask_R, self.lengths).view_as(self.reward_bK)

    def per_row(self, value_R: Tensor) -> Tensor:
        """Sum over the counted tokens of each response: [b, K] in float64."""
        return row_sums(value_R, self.mask_R, self.lengths).view_as(self.reward_bK)

    def per_token(self, value_bK: Tensor) -> Tensor:
        """Repeat a value of each response at each of its tokens: [R]."""
        lengths_N = torch.tensor(self.lengths, device=value_bK.device)
        return value_bK.flatten().repeat_interleave(lengths_N)


class Terms(NamedTuple):
    """A micro-batch's part of the loss, a float64 scalar, and what the loss makes of each response.

    The gradient of the loss is the sum of -weight * advantage * grad log pi, up to the divisor of the objective.
    `advantage_bK` is in units of the reward; for a squared residual it is -beta times that. `weight_bK` is what
    truncation leaves of the response: 1 without any, the mean over its counted tokens if each has a weight of its own,
    0 if the response has no gradient. Both are [b, K] and detached.
    """

    loss: Tensor
    advantage_bK: Tensor
    weight_bK: Tensor


def row_sums(value_R: Tensor, mask_R: Tensor, lengths: list[int]) -> Tensor:
    """Sum over the counted tokens of each row: [N] in float64.

    A KL is a small difference of such sums, and float32 has a resolution of only 3e-5 at -500.
    """
    counted_R = torch.where(mask_R, value_R, 0.0).double()
    return torch.stack([row.sum() for row in torch.split(counted_R, lengths)])


def row_totals(value_R: Tensor, lengths: list[int]) -> Tensor:
    """Sum over all tokens of each row: [N] in float64. It is faster than `row_sums`, and rounds otherwise."""
    row_R = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, row_R, value_R.double())
