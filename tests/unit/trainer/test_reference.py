"""The reference policy: frozen, reset to the policy, or a moving average of it, also after a resume."""

from typing import Any

import pytest
import torch

from tba.common.config import Config, ReferenceSection
from tba.common.errors import EXIT_CONFIG, CheckpointMismatch
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import make_batch, make_learner, make_row, random_batch, tiny_model
from tba.trainer import checkpoint
from tba.trainer.model.reference import Reference
from tba.trainer.model.scorer import Scorer, weights_of
from tba.trainer.step.build import lineage_of
from tba.trainer.step.learner import Learner


def learner(**section: Any) -> Learner:
    return make_learner(reference=ReferenceSection.model_validate(section))


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights_of(model).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def reference(kind: Any, **keys: Any) -> tuple[Reference, Any]:
    model = tiny_model(seed=1)
    return Reference(Scorer(model), ReferenceSection(kind=kind, **keys), "x"), model


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("frozen", ["initial"] * 7),
        ("reset", ["initial"] * 3 + ["reset-0001-x"] * 3 + ["reset-0002-x"]),
        ("ema", ["initial"] * 3 + ["ema-0001-x"] * 3 + ["ema-0002-x"]),
    ],
)
def test_the_name_depends_on_the_step_alone(kind, names):
    made, _ = reference(kind, every=3)
    assert [made.name_at(step) for step in range(7)] == names


def test_a_reset_reference_keeps_the_policy_until_the_next_reset():
    made, model = reference("reset", every=3)
    initial, policies = copied(model), [tiny_model(seed=seed) for seed in range(10, 17)]
    found = []
    for steps_done, policy in enumerate(policies, start=1):
        made.update(policy, steps_done)
        found.append(copied(model))
    expected = [initial, initial, *[copied(policies[2])] * 3, *[copied(policies[5])] * 2]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_a_moving_average_keeps_a_fraction_of_the_old_weights_at_each_update():
    made, model = reference("ema", every=2, decay=0.75)
    old, policy = copied(model), tiny_model(seed=3)
    made.update(policy, 1)
    assert same(copied(model), old)
    made.update(policy, 2)
    for name, tensor in weights_of(model).items():
        assert torch.allclose(tensor, 0.75 * old[name] + 0.25 * policy.state_dict()[name], atol=1e-6)


def test_log_probabilities_are_computed_once_per_reference():
    rows = [make_row(n, [1, 2], [3, 4, n]) for n in range(4)]
    made = learner(kind="reset", every=2)
    results = [made.step(make_batch(rows, [[0.0, 1.0], [1.0, 0.5]], step=step)) for step in range(4)]
    assert [len(result.reference) for result in results] == [4, 0, 4, 0]
    assert results[0].reference != results[2].reference


def test_a_checkpoint_of_another_reference_is_rejected(tmp_path):
    made = learner(kind="reset", every=2)
    made.step(random_batch(0))
    checkpoint.save(tmp_path, made, run="r", keep=1)
    sentence = r"reset every 2 steps, the configuration says reset every 3 steps"
    with pytest.raises(CheckpointMismatch, match=sentence) as refused:
        checkpoint.restore(not_none(checkpoint.newest(tmp_path)), learner(kind="reset", every=3))
    assert refused.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    ("changed", "fixed", "determines"),
    [
        ({"train": {"threads": 3}}, {}, False),
        ({"train": {"gpu": "cpu"}}, {}, False),
        ({"train": {"checkpoint_every": 9}}, {}, False),
        ({"train": {"serve_snapshots": "tcp://*:7000"}}, {}, False),
        ({"run": {"dir": "elsewhere"}}, {}, False),
        ({"reference": {"path": "teacher"}}, {}, False),
        ({"train": {"learning_rate": 3e-6}}, {}, True),
        ({"train": {"steps": 9}}, {}, True),
        ({"objective": {"name": "tba_prime"}}, {}, True),
        ({"model": {"dtype": "float32"}}, {}, True),
        # Its loss is divided by the longest response, that of others is not.
        ({"search": {"max_tokens": 100}}, {"objective": {"name": "dr_grpo"}}, True),
        ({"search": {"max_tokens": 100}}, {"objective": {"name": "tb"}}, False),
    ],
)
def test_only_settings_that_determine_the_weights_give_references_of_another_name(changed, fixed, determines):
    one, other = (lineage_of(Config.model_validate(sections)) for sections in (fixed, fixed | changed))
    assert (one != other) == determines
