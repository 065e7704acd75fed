"""The optima of objectives with a learned log Z, on a table of logits whose responses can be enumerated.

A response is one token, 0, or two, of three: 0, 1x and 2x, and with `even` always two. A batch is one group in which
every response is as often as its sampler draws it, so its loss is an expectation over groups of any size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import objective
from tba.tests.unit.trainer.test_objectives import by_hand
from tba.trainer.objectives.advantages import standardised
from tba.trainer.objectives.responses import Responses

pytestmark = pytest.mark.slow
BETA = 0.5


@dataclass(slots=True)
class World:
    """Responses, their rewards, the reference's and the sampler's logits of each prefix: (), 0, 1 and 2."""

    even: bool
    reference: Tensor = field(init=False)
    counts: Tensor = field(init=False)
    reward_Y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.reference = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        self.reward_Y = torch.rand(len(self.responses), generator=generator, dtype=torch.float64)
        # The sampler is neither the reference nor the policy.
        self.counts = torch.randint(1, 6, (len(self.responses),), generator=generator)

    @property
    def responses(self) -> list[list[int]]:
        firsts = range(3) if self.even else (1, 2)
        return [*([] if self.even else [[0]]), *([first, second] for first in firsts for second in range(3))]

    def tokens(self, logits: Tensor) -> list[Tensor]:
        """Return the log-probabilities of the tokens of each response."""
        table = logits.log_softmax(1)
        return [
            torch.stack([table[0 if t == 0 else 1 + one[0], one[t]] for t in range(len(one))]) for one in self.responses
        ]

    def totals(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each response."""
        return torch.stack([one.sum() for one in self.tokens(logits)])


def group_of(world: World, logits: Tensor, counts: Tensor, log_z: Tensor, value: Tensor) -> Responses:
    """Return each response as often as `counts` says. `value` is of the prefixes (), 0, 1 and 2."""
    rows = torch.arange(len(counts)).repeat_interleave(counts).tolist()
    policy, reference = world.tokens(logits), world.tokens(world.reference)
    prefixes = [value[[0, *(1 + token for token in one[:-1])]] for one in world.responses]
    sampled = (counts / counts.sum()).log()
    return by_hand(
        [len(world.responses[row]) for row in rows],
        torch.cat([policy[row] for row in rows]),
        torch.cat([(sampled[row] / len(policy[row])).expand(len(policy[row])) for row in rows]),
        world.reward_Y[rows],
        reference_bK=torch.stack([reference[row].sum() for row in rows])[None],
        log_z_bK=log_z.view(1, 1),
        value_R=torch.cat([prefixes[row] for row in rows]),
        reference_R=torch.cat([reference[row] for row in rows]),
    )


def train(world: World, loss_of: Callable[[Responses], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Train from the reference on a fixed sampler. Returns log pi of each response, log Z and the values."""
    logits = world.reference.clone().requires_grad_()
    head = [torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in (1, 4)]
    optimizer = torch.optim.LBFGS(
        [logits, *head], max_iter=1000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(group_of(world, logits, world.counts, *head))
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
    return world.totals(logits).detach(), head[0].detach(), head[1].detach()


def distance(logprob_Y: Tensor, other_Y: Tensor) -> float:
    """Return the total variation distance of the distributions."""
    return float((logprob_Y.softmax(0) - other_Y.softmax(0)).abs().sum() / 2)


def standardised_reward(world: World) -> Tensor:
    """Return FlowRL's reward of each response."""
    rewards = world.reward_Y.repeat_interleave(world.counts)[None]
    return torch.stack([one[0] for one in torch.split(standardised(rewards)[0], world.counts.tolist())])


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("name", ["tb", "tb_learned_z", "tb_prefix"])
def test_the_optimum_of_balance_is_the_posterior_whichever_policy_sampled(name, even):
    world = World(even)
    posterior = world.totals(world.reference) + world.reward_Y / BETA
    found, log_z, _ = train(world, lambda responses: objective(name).loss(responses, BETA))
    assert distance(found, posterior) < 1e-6
    assert distance(world.totals(world.reference), posterior) > 0.1
    if name == "tb_learned_z":
        assert log_z.item() == pytest.approx(posterior.logsumexp(0).item(), abs=1e-6)


@pytest.mark.parametrize("even", [True, False])
def test_tb_prefix_learns_the_log_z_of_every_prefix(even):
    world = World(even)
    value = train(world, lambda responses: objective("tb_prefix").loss(responses, BETA))[2]
    reference, reward = (
        world.tokens(world.reference),
        dict(zip(map(tuple, world.responses), world.reward_Y, strict=True)),
    )
    appended = [
        [
            one[1] + reward[tuple(y)] / BETA
            for one, y in zip(reference, world.responses, strict=True)
            if len(y) == 2 and y[0] == token
        ]
        for token in range(3)
    ]
    expected = [(world.totals(world.reference) + world.reward_Y / BETA).logsumexp(0)]
    expected += [torch.stack(one).logsumexp(0) if one else torch.tensor(0.0) for one in appended]
    assert (value / BETA).tolist() == pytest.approx([one.item() for one in expected], abs=1e-6)


def optimum_of_flowrl(world: World, inverse: float) -> tuple[Tensor, Tensor]:
    """Return log pi of each response and log Z where log Z + 1/T log pi / ref = A / beta, by bisection."""
    lengths_Y = torch.tensor([float(len(one)) for one in world.responses], dtype=torch.float64)
    low, high = torch.tensor([-100.0, 100.0], dtype=torch.float64)
    for _ in range(100):
        log_z = (low + high) / 2
        logprob_Y = world.totals(world.reference) + lengths_Y * (inverse * standardised_reward(world) - log_z)
        low, high = (log_z, high) if logprob_Y.logsumexp(0) > 0 else (low, log_z)
    return logprob_Y, log_z


@pytest.mark.parametrize("even", [True, False])
def test_training_by_flowrl_or_by_its_code_reaches_this_optimum(even):
    world = World(even)
    expected, log_z = optimum_of_flowrl(world, 1.0)
    for loss_of in (lambda responses: objective("flowrl").loss(responses, 1.0), code_of_flowrl(1.0)):
        found, learned, _ = train(world, loss_of)
        assert distance(found, expected) < 1e-6
        assert learned.item() == pytest.approx(log_z.item(), abs=1e-5)
    # With unequal lengths it is the posterior of no reward with a single temperature.
    others = [
        distance(expected, world.totals(world.reference) + times * standardised_reward(world)) for times in (1, 2)
    ]
    assert others[1] < 1e-6 if even else min(others) > 0.01


def code_of_flowrl(inverse: float) -> Callable[[Responses], Tensor]:
    """Return the loss of FlowRL's code: the importance weight is not clipped."""

    def loss_of(responses: Responses) -> Tensor:
        rows = zip(
            torch.split(responses.logprob_R, responses.lengths),
            torch.split(responses.sampled_logprob_R, responses.lengths),
            torch.split(not_none(responses.reference_R), responses.lengths),
            standardised(responses.reward_bK)[0],
            strict=True,
        )
        losses = [
            (policy - sampled).sum().exp().detach()
            * (not_none(responses.log_z_bK)[0, 0] + policy.mean() - inverse * a - reference.mean()) ** 2
            for policy, sampled, reference, a in rows
        ]
        return torch.stack(losses).mean()

    return loss_of
