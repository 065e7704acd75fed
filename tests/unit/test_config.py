"""Configuration: layers, origins, and one clear sentence for each mistake."""

from pathlib import Path

import pytest

from tba.common.config import Config
from tba.common.config_layers import fields, resolve, value_of
from tba.common.errors import ConfigError

# None: follows from other keys
OPTIONAL = {"buffer.database", "search.spool_dir", "search.canary_tolerance", "search.weights_dir"}
ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def refusal(file: Path | None = None, **arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(file, environment=arguments.pop("environment", {}), **arguments)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_flag_wins_over_environment_over_file_over_default(tmp_path):
    file = write(tmp_path, "[train]\nsteps = 1\nlearning_rate = 1.0\nbeta = 1.0")
    resolved = resolve(
        file,
        environment={"TBA_TRAIN__STEPS": "2", "TBA_TRAIN__LEARNING_RATE": "2.0"},
        overrides={"train.steps": 3, "train.gpu": None},
    )
    assert (resolved.config.train.steps, resolved.config.train.learning_rate, resolved.config.train.beta) == (3, 2, 1)
    origins = [resolved.origin(f"train.{key}") for key in ("steps", "learning_rate", "beta", "gpu")]
    assert origins == ["command line", "TBA_TRAIN__LEARNING_RATE", str(file), "default"]


def test_set_assigns_any_key_as_toml_would():
    resolved = resolve(None, environment={}, assignments=["train.adam_betas=[0.8, 0.9]", "search.gpus=cpu"])
    assert resolved.config.train.adam_betas == (0.8, 0.9)
    assert resolved.config.search.gpus == "cpu"


def test_an_unknown_key_names_the_nearest_one(tmp_path):
    file = write(tmp_path, "[train]\nlearning_rat = 1.0")
    assert refusal(file) == f"unknown key train.learning_rat ({file}): did you mean train.learning_rate?"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.max_tokens", "did you mean search.max_tokens?"),
        ("trian.learning_rate", "did you mean train.learning_rate?"),
        ("train.warmup_step", "did you mean train.warmup_steps?"),
        ("train.objective", "`tba config show` lists all keys"),
        ("buffer.port", "`tba config show` lists all keys"),
        ("learning_rate", "did you mean train.learning_rate?"),
        ("rtain.samples_per_prompt", "did you mean train.samples_per_prompt?"),
        ("bojective.name", "did you mean objective.name?"),
        ("erward_model.path", "did you mean reward_model.path?"),
        ("train.gpus", "did you mean train.gpu?"),
    ],
)
def test_a_key_that_is_far_from_all_is_given_no_other_name(key, hint):
    with pytest.raises(ConfigError) as error:
        resolve(None, environment={}, assignments=[f"{key}=1"])
    assert str(error.value) == f"unknown key {key} (--set): {hint}"


def test_an_unknown_key_in_the_environment_is_an_error_too():
    assert "TBA_TRAIN__STEP" in refusal(environment={"TBA_TRAIN__STEP": "3"})


def test_a_wrong_type_names_key_value_and_origin(tmp_path):
    message = refusal(write(tmp_path, '[train]\nsteps = "many"'))
    assert message.startswith("train.steps = 'many' (")
    assert "integer" in message


def test_a_value_out_of_range_says_the_range():
    assert "greater than or equal to 2" in refusal(assignments=["train.samples_per_prompt=1"])


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.toml does not exist" in refusal(tmp_path / "nowhere.toml")


def test_broken_toml_is_named_with_its_place(tmp_path):
    assert "line 1" in refusal(write(tmp_path, "[train\n"))


def test_a_key_outside_a_section_is_named(tmp_path):
    assert "`steps` stands outside a section" in refusal(write(tmp_path, "steps = 3"))


def test_an_assignment_without_a_value_says_how_to_write_it():
    assert "section.key=value" in refusal(assignments=["train.steps"])


def test_a_staleness_limit_that_publishing_cannot_meet_is_refused():
    assert "publish_every" in refusal(assignments=["buffer.max_staleness=0", "train.publish_every=2"])


def test_gsm8k_without_data_is_refused():
    assert "task.train" in refusal(assignments=["task.name=gsm8k"])
    assert "they are arithmetic, gsm8k, and your own" in refusal(assignments=["task.name=arithmetik"])


def test_every_field_is_documented():
    assert [key for key, field in fields() if not field.description] == []


def test_every_key_has_a_value():
    assert all(value_of(Config(), key) is not None for key, _ in fields() if key not in OPTIONAL)


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_valid(file):
    assert resolve(file, environment={}).config.model.path
