"""Checkpoints: a resumed learner equals one that never stopped; damage is detected; a full disk stops nothing."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tba.common.config import Config, LoraSection, ReferenceSection
from tba.common.errors import CheckpointError, CheckpointMismatch
from tba.common.run_files import CHECKPOINTS
from tba.tests.helpers import trainer
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.trainer import random_batch
from tba.tests.helpers.weights import flip_a_byte
from tba.tests.runner import slow
from tba.trainer import checkpoint
from tba.trainer.checkpoint import CheckpointWriter
from tba.trainer.model.host_buffers import HostBuffers
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


RESUMED: list[dict[str, Any]] = [
    {},
    {"model": {"tie": True}},
    {"name": "distill"},
    {"offload": "optimizer"},
    {"offload": "optimizer", "autocast": True},
    {"reference": ReferenceSection(kind="reset", every=2)},
    {"reference": ReferenceSection(kind="ema", every=2, decay=0.5)},
    {"lora": LoraSection(rank=2, alpha=3.0), "trained_adapters": True},
]


@pytest.mark.parametrize(
    "keys",
    [RESUMED[0], *slow(*RESUMED[1:])],
    ids=["plain", "tied", "distill", "offload", "half", "reset", "ema", "lora"],
)
def test_three_steps_and_three_after_a_resume_equal_six_steps_bit_for_bit(tmp_path, keys):
    def made(seed: int = 0) -> Learner:
        return trainer.make_learner(**keys | KEYS | {"model": keys.get("model", {}) | {"seed": seed}})

    straight = made()
    torch.manual_seed(4)
    expected = run_steps(straight, 6)
    first = made()
    torch.manual_seed(4)
    found = run_steps(first, 3)
    checkpoint.save(tmp_path, first, run="r", keep=2)
    # Other weights, so that all of them must come from the file. The base of adapters is not in it.
    second = made(seed=0 if "lora" in keys else 99)
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
def test_a_damaged_checkpoint_is_set_aside_the_one_before_is_used_and_its_step_is_saved_again(tmp_path, damage):
    newest, learner = save_three(tmp_path)[-1], make_learner()
    damage(newest)
    found = not_none(checkpoint.newest(tmp_path))
    assert found.step == 2
    assert not newest.exists()
    assert newest.with_name("step_00000003.damaged").is_dir()
    checkpoint.restore(found, learner)
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


@pytest.mark.parametrize(
    ("other", "sentence"),
    [({"hidden": 32}, "another model"), ({"name": "tb_learned_z"}, r"lacks a learned log Z: objective\.name")],
)
def test_a_checkpoint_of_another_model_or_without_a_log_z_to_learn_is_refused(tmp_path, other, sentence):
    save_three(tmp_path)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.restore(not_none(checkpoint.newest(tmp_path)), make_learner(**other))


def with_head(name: str) -> Any:
    """Return a learner of an objective, or for "turn" of tb with a log Z of histories."""
    return trainer.make_learner(**({"keys": {"log_z": "turn"}} if name == "turn" else {"name": name}))


@pytest.mark.parametrize("named", [True, False], ids=["named", "of an earlier release"])
@pytest.mark.parametrize("saved", ["tb_learned_z", "turn", "tb_prefix", "flowrl", "ppo"])
def test_a_head_is_restored_only_into_the_objective_that_it_was_learned_for(tmp_path, saved, named):
    learner = with_head(saved)
    learner.log_z.linear.weight.data += 1
    path = checkpoint.save(tmp_path, learner, run="r", keep=1)
    if not named:
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["head"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    found = not_none(checkpoint.newest(tmp_path))
    fitting = (saved,) if named else ("tb_learned_z", "turn")
    for name in ("tb_learned_z", "turn", "tb_prefix", "flowrl", "ppo"):
        other = with_head(name)
        if name in fitting:
            checkpoint.restore(found, other)
            assert torch.equal(other.log_z.linear.weight, learner.log_z.linear.weight)
        else:
            with pytest.raises(CheckpointMismatch, match=r"a head of .*, the configuration .*: objective\.name must"):
                checkpoint.restore(found, other)


def make_writer(directory: Path, sync: Any = lambda: None, **train: Any) -> CheckpointWriter:
    """Return a writer to DIRECTORY/checkpoints; `sync` makes the metrics durable."""
    config = Config.model_validate({"run": {"dir": str(directory), "name": "r"}, "train": train})
    metrics: Any = SimpleNamespace(sync=sync)
    return CheckpointWriter(config, HostBuffers(torch.device("cpu")), metrics)


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.list_checkpoints(directory / CHECKPOINTS)]


class Gate:
    """Holds the checkpoint thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def test_a_checkpoint_has_the_learner_at_the_time_of_the_call(tmp_path):
    gate, learner, straight = Gate(), make_learner(), make_learner()
    writer = make_writer(tmp_path, gate)
    run_steps(learner, 2)
    writer.begin(learner)
    run_steps(learner, 2)
    gate.opened.set()
    writer.wait()
    run_steps(straight, 2)
    resumed = make_learner()
    checkpoint.restore(not_none(checkpoint.newest(tmp_path / CHECKPOINTS)), resumed)
    assert resumed.steps_done == 2
    assert run_steps(resumed, 2) == run_steps(straight, 2)


def test_a_checkpoint_due_during_another_is_skipped_but_the_last_one_is_saved(tmp_path):
    gate, learner = Gate(), make_learner()
    writer = make_writer(tmp_path, gate)
    run_steps(learner, 1)
    writer.begin(learner)
    assert gate.reached.wait(60)
    run_steps(learner, 1)
    writer.begin(learner)
    run_steps(learner, 1)
    last = threading.Thread(target=writer.save, args=[learner])
    last.start()
    assert steps(tmp_path) == []
    gate.opened.set()
    last.join(60)
    assert steps(tmp_path) == [1, 3]


def test_a_failed_write_is_a_warning_except_for_the_last_checkpoint(tmp_path):
    """Writing fails because a file has the name of the checkpoint's directory."""
    learner = make_learner()
    writer = make_writer(tmp_path)
    run_steps(learner, 1)
    writer.save(learner)
    obstacle = tmp_path / CHECKPOINTS / ".step_00000002.tmp"
    obstacle.write_text("")
    run_steps(learner, 1)
    writer.begin(learner)
    with pytest.raises(CheckpointError, match=r"step_00000002 cannot be written"):
        writer.save(learner)
    assert steps(tmp_path) == [1]
    obstacle.unlink()
    writer.save(learner)
    assert steps(tmp_path) == [1, 2]


def test_unfinished_checkpoints_of_a_killed_trainer_are_none_and_are_deleted(tmp_path):
    unfinished = tmp_path / CHECKPOINTS / ".step_00000004.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path / CHECKPOINTS) is None
    make_writer(tmp_path)
    assert not unfinished.exists()


def test_metrics_are_durable_before_a_checkpoint_has_its_name(tmp_path):
    seen: list[list[int]] = []
    learner = make_learner()
    writer = make_writer(tmp_path, lambda: seen.append(steps(tmp_path)))
    run_steps(learner, 1)
    writer.save(learner)
    assert seen == [[]]
    assert steps(tmp_path) == [1]


def test_too_little_disk_space_is_a_warning_before_anything_is_written(tmp_path):
    writer = make_writer(tmp_path, min_free_mib=1 << 42)
    learner = make_learner()
    run_steps(learner, 1)
    writer.begin(learner)
    writer.close()
    assert list((tmp_path / CHECKPOINTS).iterdir()) == []
    with pytest.raises(CheckpointError, match=r"must leave train\.min_free_mib"):
        writer.save(learner)
