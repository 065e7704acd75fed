"""`train.offload = "optimizer"`: the same training with masters, gradients and AdamW on the host, run on a CPU."""

from typing import Any

import pytest
import torch

from tba.tests.helpers.checks import not_none
from tba.tests.helpers.ranks import make_learner
from tba.tests.helpers.trainer import random_batch
from tba.tests.runner import slow
from tba.trainer import checkpoint
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.step.learner import Learner

# Several micro-batches in a step, and a norm that clips.
KEYS: dict[str, Any] = {"double": False, "micro_batch_tokens": 30, "max_grad_norm": 0.5}
OFFLOAD: dict[str, Any] = {"offload": "optimizer", **KEYS}


def losses(learner: Learner, steps: int) -> list[float]:
    return [
        learner.step(random_batch(learner.steps_done, step=learner.steps_done)).metrics["loss"] for _ in range(steps)
    ]


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.masters().items()}


def make_plain(**keys: Any) -> Learner:
    """Return a learner without offload whose AdamW is the fused one: the plain loop rounds the last bit differently."""
    learner = make_learner(**KEYS, **keys)
    for group in learner.optimizer.param_groups:
        group["fused"] = True
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tb", *slow("tb_learned_z")])
def test_in_float32_five_steps_have_the_same_losses_and_weights_bit_for_bit(name):
    offloaded, plain = make_learner(name=name, **OFFLOAD), make_plain(name=name)
    assert losses(offloaded, 5) == losses(plain, 5)
    for name_, weight in plain.policy.named_parameters():
        assert torch.equal(weight, offloaded.masters()[name_])


@pytest.mark.slow
def test_in_bfloat16_losses_agree_up_to_the_rounding_of_the_weights():
    """Without offload autocast rounds matrices alone; with it embeddings and norms are bfloat16 too."""
    keys: dict[str, Any] = {"autocast": True, "learning_rate": 1e-3}
    offloaded, plain = losses(make_learner(**OFFLOAD, **keys), 10), losses(make_learner(**KEYS, **keys), 10)
    assert offloaded == pytest.approx(plain, rel=0.05, abs=0.01)
    assert offloaded != plain


def test_in_bfloat16_the_published_weights_are_the_rounded_masters():
    learner = make_learner(autocast=True, **OFFLOAD)
    losses(learner, 2)
    published, exact = dict(gathered(learner.policy, MERGED)), learner.masters()
    assert published.keys() == exact.keys()
    for name, tensor in published.items():
        assert tensor.dtype == torch.bfloat16
        assert exact[name].dtype == torch.float32
        assert torch.equal(tensor, exact[name].bfloat16())
    assert any(not torch.equal(exact[name].bfloat16().float(), exact[name]) for name in exact)


def test_small_updates_add_up_in_the_masters_where_bfloat16_would_lose_them():
    learner = make_learner(autocast=True, **OFFLOAD, learning_rate=1e-6)
    before, rounded = masters(learner), dict(gathered(learner.policy, MERGED))
    rounded = {name: tensor.clone() for name, tensor in rounded.items()}
    losses(learner, 3)
    name = "model.layers.0.mlp.up_proj.weight"
    assert (learner.masters()[name] != before[name]).float().mean() > 0.9
    assert (dict(gathered(learner.policy, MERGED))[name] == rounded[name]).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, *slow(True)])
@pytest.mark.parametrize("saved_with", ["optimizer", *slow("none")])
def test_a_resumed_learner_makes_the_same_steps_bit_for_bit(tmp_path, autocast, saved_with):
    keys = KEYS | {"autocast": autocast}
    first = make_learner(offload=saved_with, **keys)
    losses(first, 3)
    checkpoint.save(tmp_path, first, run="r", keep=1)
    resumed = [make_learner(offload="optimizer", **keys) for _ in range(2)]
    for learner in resumed:
        checkpoint.restore(not_none(checkpoint.newest(tmp_path)), learner)
    if saved_with == "optimizer":
        resumed[0] = first
    found = [losses(learner, 3) for learner in resumed]
    assert found[0] == found[1]
    assert all(torch.equal(mine, resumed[1].masters()[name]) for name, mine in resumed[0].masters().items())


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_changes_neither_masters_nor_weights():
    learner = make_learner(**OFFLOAD)
    losses(learner, 1)
    before, batch = masters(learner), random_batch(1, step=1)
    batch.reward_BK[0, 0] = float("nan")
    assert learner.step(batch).skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.masters().items())
    plain = make_plain()
    losses(plain, 1)
    plain.step(batch)
    assert losses(learner, 2) == losses(plain, 2), "nothing of the skipped gradient is left"


def test_no_gradient_stays_on_the_device_after_a_backward_pass():
    learner = make_learner(**OFFLOAD)
    batch = random_batch(0)
    learner.accumulate(batch, torch.zeros_like(batch.reward_BK), 0.1)
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    learner.optimizer.collect()  # type: ignore[attr-defined]
    assert all(parameter.grad is not None for parameter in learner.optimizer.param_groups[0]["params"])
