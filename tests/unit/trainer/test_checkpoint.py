"""Checkpoints: a resumed learner equals one that never stopped, bit for bit; damage is detected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tba.common.errors import CheckpointError
from tba.tests.helpers import trainer
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import random_batch
from tba.tests.helpers.weights import flip_a_byte
from tba.trainer import checkpoint
from tba.trainer.step.learner import Learner

KEYS: dict[str, Any] = {"steps": 6, "schedule": "wsd", "warmup_steps": 1, "decay_steps": 3, "beta_anneal_steps": 4}


def make_learner(*, name: str = "tb", **model) -> Learner:
    return trainer.make_learner(name=name, model={"tie": True} | model, **KEYS)


def run_steps(learner: Learner, count: int) -> list[dict[str, float]]:
    return [learner.step(random_batch(learner.steps_done)).metrics for _ in range(count)]


def state(learner: Learner) -> dict[str, torch.Tensor]:
    moments = learner.optimizer.state_dict()["state"]
    return {
        **{name: tensor.clone() for name, tensor in learner.policy.state_dict().items()},
        **{f"{i}.{name}": tensor.clone() for i, values in moments.items() for name, tensor in values.items()},
        "rng": torch.get_rng_state(),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("tie", [True, False])
def test_three_steps_and_three_after_a_resume_equal_six_steps_bit_for_bit(tmp_path, tie):
    torch.manual_seed(3)
    straight = make_learner(tie=tie)
    torch.manual_seed(4)
    expected = run_steps(straight, 6)
    first = make_learner(tie=tie)
    torch.manual_seed(4)
    found = run_steps(first, 3)
    checkpoint.save(tmp_path, first, run="r", keep=2)
    # Other weights, so that all of them must come from the file.
    second = make_learner(tie=tie, seed=99)
    checkpoint.restore(not_none(checkpoint.newest(tmp_path)), second)
    assert second.steps_done == 3
    found += run_steps(second, 3)
    assert found == expected
    assert same(state(second), state(straight))


def save_three(directory: Path) -> list[Path]:
    learner = make_learner()
    paths = []
    for _ in range(3):
        run_steps(learner, 1)
        paths.append(checkpoint.save(directory, learner, run="r", keep=3))
    return paths


def test_the_newest_checkpoint_is_found_and_old_ones_are_deleted(tmp_path):
    learner = make_learner()
    for _ in range(3):
        run_steps(learner, 1)
        checkpoint.save(tmp_path, learner, run="r", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    found = not_none(checkpoint.newest(tmp_path))
    assert (found.step, found.run, found.unreported) == (3, "r", None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip_a_byte(path / "model.safetensors"),
        lambda path: flip_a_byte(path / "optimizer.safetensors"),
        lambda path: (path / "optimizer.safetensors").write_bytes(b""),
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "manifest.json").write_text('{"format": 2, "run"'),
        lambda path: (path / "manifest.json").unlink(),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, damage):
    newest = save_three(tmp_path)[-1]
    damage(newest)
    assert not_none(checkpoint.newest(tmp_path)).step == 2
    assert not newest.exists()
    assert newest.with_name("step_00000003.damaged").is_dir()


def test_a_step_that_was_damaged_can_be_saved_again(tmp_path):
    flip_a_byte(save_three(tmp_path)[-1] / "model.safetensors")
    learner = make_learner()
    checkpoint.restore(not_none(checkpoint.newest(tmp_path)), learner)
    run_steps(learner, 1)
    checkpoint.save(tmp_path, learner, run="r", keep=3)
    assert not_none(checkpoint.newest(tmp_path)).step == 3


def test_only_damaged_checkpoints_are_an_error_and_not_a_silent_new_start(tmp_path):
    for path in save_three(tmp_path):
        flip_a_byte(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* \(3\) is damaged"):
        not_none(checkpoint.newest(tmp_path))


def test_a_checkpoint_of_another_format_is_an_error_and_is_not_moved(tmp_path):
    path = save_three(tmp_path)[-1]
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(CheckpointError, match="format 3, this release reads 2"):
        not_none(checkpoint.newest(tmp_path))
    assert path.exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_three(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        checkpoint.restore(not_none(checkpoint.newest(tmp_path)), make_learner(hidden=32))


def test_a_checkpoint_without_log_z_is_refused_by_an_objective_that_learns_it(tmp_path):
    learner = make_learner()
    run_steps(learner, 1)
    checkpoint.save(tmp_path, learner, run="r", keep=2)
    with pytest.raises(CheckpointError, match=r"lacks a learned log Z: objective\.name"):
        checkpoint.restore(not_none(checkpoint.newest(tmp_path)), make_learner(name="tb_learned_z"))
