"""How long children may take to end, by the size of the model."""

import pytest

from tba.common.config import Config
from tba.deploy.child import drain_seconds, trainer_drain_seconds
from tba.tests.helpers.trainer import save_tiny_model, tiny_model


def config(path, **sections) -> Config:
    return Config.model_validate({"model": {"path": str(path)}, "task": {"train": "t"}} | sections)


def test_a_trainer_has_time_for_two_checkpoints_of_its_model(tmp_path):
    model = save_tiny_model(tmp_path / "model", hidden=64)
    parameters = sum(parameter.numel() for parameter in tiny_model(hidden=64).parameters())
    auto = config(model)
    assert trainer_drain_seconds(auto) == pytest.approx(20 + 2 * 12 * parameters / 0.5e9)
    assert drain_seconds(auto) == 20
    assert trainer_drain_seconds(config(model, lora={"rank": 4})) == 20


def test_a_set_value_holds_for_all_and_a_model_of_the_hub_has_ten_minutes(tmp_path):
    fixed = config("name/model", launch={"drain_seconds": 5.0})
    assert (drain_seconds(fixed), trainer_drain_seconds(fixed)) == (5, 5)
    assert trainer_drain_seconds(config("name/model")) == 600
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{}")
    (damaged / "model.safetensors").write_bytes(b"no header")
    assert trainer_drain_seconds(config(damaged)) == 600
