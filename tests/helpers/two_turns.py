"""A world of two turns that can be enumerated: 3 actions, one of 3 observations, 3 actions again.

The episodes of a sampler are one group in which every path is as often as it is likely, so the loss of the group is
its expectation over groups of any size, up to a factor. Shape suffixes: A first actions, O observations, a second ones.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tba.trainer.objectives.from_config import Objective
from tba.trainer.objectives.responses import Responses, Totals, Turns

BETA = 0.5
# Of the reference, the log-probability of each action is minus this.
LOG_3 = math.log(3)
# Rates of learning: at first large.
RATES = [0.1] * 300 + [0.03] * 200 + [0.01] * 100


@dataclass(frozen=True, slots=True)
class World:
    """`reward_AOa` of the last turn, and `chance_AO`, the probabilities of the observations after an action."""

    reward_AOa: Tensor
    chance_AO: Tensor


@dataclass(frozen=True, slots=True)
class Sampler:
    """Action probabilities of both turns. All are multiples of 1 / `parts`."""

    first_A: Tensor
    second_AOa: Tensor
    parts: int


def make_world(kind: str, seed: int = 0) -> World:
    """Return a "deterministic" world, a "random" one, or one with "luck": its observations are worth 0, 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    reward_AOa = torch.rand(3, 3, 3, generator=generator, dtype=torch.float64)
    if kind == "luck":
        reward_AOa = reward_AOa + torch.arange(3.0, dtype=torch.float64)[:, None]
    chance_AO = torch.eye(3, dtype=torch.float64)
    return World(reward_AOa, chance_AO if kind == "deterministic" else torch.full_like(chance_AO, 1 / 3))


def make_sampler(seed: int, *, parts: int = 16, spread: float = 1.0) -> Sampler:
    """Return a softmax of Gaussians, rounded so that each action has at least 1 of `parts`."""
    generator = torch.Generator().manual_seed(100 + seed)
    logits = spread * torch.randn(10, 3, generator=generator, dtype=torch.float64)
    counts = 1 + ((parts - 3) * logits.softmax(1)).floor()
    counts.scatter_add_(1, logits.argmax(1, keepdim=True), parts - counts.sum(1, keepdim=True))
    return Sampler(counts[0] / parts, (counts[1:] / parts).view(3, 3, 3), parts)


class Even(Responses):
    """Responses of 3 tokens each, whose sums take one operation."""

    __slots__ = ()

    def per_row(self, value_R: Tensor) -> Tensor:
        """Sum over the counted tokens of each response."""
        return torch.where(self.mask_R, value_R, 0.0).view(-1, 3).sum(1).view_as(self.reward_bK)


class Policy:
    """A tabular policy that starts at the uniform reference. `logits` have a gradient."""

    def __init__(self) -> None:
        self.logits = torch.zeros(10, 3, dtype=torch.float64, requires_grad=True)

    @property
    def log_first_A(self) -> Tensor:
        return self.logits[0].log_softmax(0)

    @property
    def log_second_AOa(self) -> Tensor:
        return self.logits[1:].log_softmax(1).view(3, 3, 3)


def values(world: World) -> tuple[Tensor, Tensor]:
    """Return the soft values of the optimum: of the last histories [A, O], and of the first actions [A]."""
    after_AO = BETA * (world.reward_AOa / BETA).logsumexp(2) - BETA * LOG_3
    return after_AO, (world.chance_AO * after_AO).sum(1)


@torch.no_grad()
def gain(world: World, policy: Policy) -> float:
    """Return the share of the gain in E[r] - beta KL between the uniform reference, 0, and the optimum, 1."""
    log_A, log_AOa = policy.log_first_A, policy.log_second_AOa
    soft_AO = (log_AOa.exp() * (world.reward_AOa - BETA * (log_AOa + LOG_3))).sum(2)
    reached = (log_A.exp() * ((world.chance_AO * soft_AO).sum(1) - BETA * (log_A + LOG_3))).sum()
    start = (world.chance_AO * world.reward_AOa.mean(2)).sum(1).mean()
    best = BETA * (values(world)[1] / BETA).logsumexp(0) - BETA * LOG_3
    return float((reached - start) / (best - start))


def paths(world: World, sampler: Sampler) -> Tensor:
    """Return the paths (A, O, a), each as often as it is likely: [K, 3]."""
    counts = (chances(world, sampler) * sampler.parts**2 * 3).round().long()
    return torch.cartesian_prod(*[torch.arange(3)] * 3).repeat_interleave(counts.flatten(), dim=0)


def group_of(
    world: World, sampler: Sampler, policy: Policy, path_N3: Tensor, samples: int, value_AO: Tensor | None = None
) -> Responses:
    """Return episodes as groups: action, observation, action, of which the observation does not count.

    `value_AO` are learned values of the second turn's histories.
    """
    first, seen, second = path_N3.unbind(1)
    rows, nothing = len(path_N3), torch.zeros(len(path_N3), dtype=torch.float64)
    chosen = policy.log_first_A[first], nothing, policy.log_second_AOa[first, seen, second]
    sampled = sampler.first_A.log()[first], nothing, sampler.second_AOa.log()[first, seen, second]
    reward = world.reward_AOa[first, seen, second].view(-1, samples)
    return Even(
        logprob_R=torch.stack(chosen, 1).flatten(),
        sampled_logprob_R=torch.stack(sampled, 1).flatten(),
        mask_R=torch.tensor([True, False, True]).repeat(rows),
        lengths=[3] * rows,
        reward_bK=reward,
        reference_bK=torch.full_like(reward, -2 * LOG_3),
        staleness_bK=torch.zeros_like(reward),
        totals=Totals(len(reward), rows, 2 * rows),
        turns=_turns(path_N3, reward.flatten(), samples, torch.zeros(3, 3) if value_AO is None else value_AO),
    )


def _turns(path_N3: Tensor, reward_N: Tensor, samples: int, value_AO: Tensor) -> Turns:
    first, seen, _ = path_N3.unbind(1)
    row_N, nothing = torch.arange(len(path_N3)), torch.zeros_like(reward_N)
    group_N = 10 * (row_N // samples)
    history_S = torch.stack([group_N, group_N + 1 + 3 * first + seen], 1).flatten()
    return Turns(
        lengths=[1] * (2 * len(path_N3)),
        row_S=row_N.repeat_interleave(2),
        depth_S=torch.tensor([0, 1]).repeat(len(path_N3)),
        history_S=history_S,
        shared_S=history_S.bincount()[history_S] > 1,
        reward_S=torch.stack([nothing, reward_N], 1).flatten(),
        reference_S=torch.full((2 * len(path_N3),), -LOG_3, dtype=torch.float64),
        value_S=torch.stack([nothing, value_AO[first, seen].double()], 1).flatten(),
    )


def train(policy: Policy, loss: Callable[[], Tensor], *others: Tensor) -> None:
    """Minimise a loss by Adam until it has converged."""
    optimizer = torch.optim.Adam([policy.logits, *others])
    for rate in RATES:
        for part in optimizer.param_groups:
            part["lr"] = rate
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()


def chances(world: World, sampler: Sampler) -> Tensor:
    """Return the probabilities of the paths: [A, O, a]."""
    return (sampler.first_A[:, None] * world.chance_AO)[:, :, None] * sampler.second_AOa


@dataclass(frozen=True, slots=True)
class Expected:
    """An objective in expectation over groups of `samples` independent episodes, without a sample.

    `name` is "tb" or "oapl", in large groups, or "tba_prime"; with `raised`, the mean of what `imitation` adds, that is
    `tb_stale`. `cap` truncates the weights of tokens.
    """

    name: str
    samples: float = math.inf
    cap: float = 8.0
    raised: float = 0.0

    def loss(self, world: World, sampler: Sampler, policy: Policy) -> Tensor:
        """Return a loss with the expected gradient."""
        chance_AOa, reward_AOa = chances(world, sampler), world.reward_AOa
        sampled_AOa = sampler.first_A.log()[:, None, None] + sampler.second_AOa.log()
        policy_AOa = policy.log_first_A[:, None, None] + policy.log_second_AOa
        balance_AOa = reward_AOa / BETA - policy_AOa - 2 * LOG_3
        if self.name == "tb":
            residual_AOa = (chance_AOa * balance_AOa.detach()).sum() - balance_AOa
            return BETA / 2 * (chance_AOa * residual_AOa.square()).sum()
        if self.name == "oapl":
            value = BETA * (chance_AOa * (reward_AOa / BETA).exp()).sum().log()
            residual_AOa = BETA * (policy_AOa - sampled_AOa) - (reward_AOa - value)
            return (chance_AOa * residual_AOa.square()).sum() / (2 * BETA)
        weighted_A = self._weighted(policy.log_first_A, sampler.first_A)
        weighted_AOa = weighted_A[:, None, None] + self._weighted(policy.log_second_AOa, sampler.second_AOa)
        # One of the samples whose mean is subtracted is the episode itself.
        mean_AOa = reward_AOa - BETA * (sampled_AOa + 2 * LOG_3)
        others = (1 - 1 / self.samples) * (chance_AOa * mean_AOa).sum()
        advantage_AOa = BETA * balance_AOa.detach() - mean_AOa / self.samples - others + self.raised
        return -(chance_AOa * advantage_AOa * weighted_AOa).sum()

    def gain(self, world: World, sampler: Sampler) -> float:
        """Return the gain of a policy that trains on a fixed sampler alone."""
        policy = Policy()
        train(policy, lambda: self.loss(world, sampler, policy))
        return gain(world, policy)

    def _weighted(self, logprob: Tensor, sampled: Tensor) -> Tensor:
        return (logprob.detach().exp() / sampled).clamp(max=self.cap) * logprob


def mean_imitation(world: World, sampler: Sampler, others: int) -> float:
    """Return the mean of `imitation` over the other responses of a group, for rewards that all differ: (m - l) s^3."""
    order_N = world.reward_AOa.flatten().argsort()
    reward_N, chance_N = (one.flatten()[order_N] for one in (world.reward_AOa, chances(world, sampler)))
    # How many of them share the largest reward.
    count = torch.arange(others + 1, dtype=torch.float64)
    ways = torch.tensor([math.comb(others, n) for n in range(others + 1)], dtype=torch.float64)
    # Without a spread it is the reward.
    total = float((chance_N**others * reward_N.clamp(min=0)).sum())
    for first, last in itertools.combinations(range(len(reward_N)), 2):
        low, high = reward_N[first], reward_N[last]
        # From the least to the largest reward, minus what lacks one of them.
        for start, end in itertools.product((first, first + 1), (last, last - 1)):
            reward, chance = reward_N[start : end + 1], chance_N[start : end + 1]
            top = reward >= high - 0.05 * (high - low)
            (p, above), (q, below) = ((chance[one].sum(), (chance * (reward - low))[one].sum()) for one in (top, ~top))
            excess = count * above / p.clamp(min=1e-300) + (others - count) * below / q.clamp(min=1e-300)
            mean = (ways * p**count * q ** (others - count) * excess * count**3).sum() / others**4
            total += float(mean) * (-1) ** (start - first + last - end)
    return total


def gain_of(objective: Objective, world: World, sampler: Sampler) -> float:
    """Return the gain of an objective that trains on a fixed sampler alone."""
    policy, path_N3 = Policy(), paths(world, sampler)
    train(policy, lambda: objective.loss(group_of(world, sampler, policy, path_N3, len(path_N3)), BETA))
    return gain(world, policy)
