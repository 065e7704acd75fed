"""The files of a model directory."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save_file

from tba.buffer.tools.tokenizer import decoder_of
from tba.common.errors import ConfigError
from tba.common.weights.model_files import check_model, local_model, share_weights, weight_files


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_get_the_permissions_that_the_umask_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        (tmp_path / "config.json").write_text("{}")
        for part in ("model-1", "model-2"):
            save_file({"w": np.zeros(3)}, tmp_path / f"{part}.safetensors")
    finally:
        os.umask(before)
    share_weights(tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.safetensors")] == [mode, mode]


def model_with(folder, *names):
    for name in ("config.json", "tokenizer.json", *names):
        (folder / name).write_text("{}")
    return folder


def test_a_stray_weight_file_next_to_the_models_own_is_not_among_its_weights(tmp_path):
    model = model_with(tmp_path, "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors")
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]


def test_weights_that_transformers_does_not_read_are_refused(tmp_path):
    model = model_with(tmp_path, "consolidated.safetensors")
    with pytest.raises(
        ConfigError, match=r"neither model\.safetensors nor .*index\.json, .* but consolidated\.safetensors"
    ):
        check_model(str(model))


def test_a_directory_that_transformers_would_load_as_an_adapter_is_refused(tmp_path):
    model = model_with(tmp_path, "model.safetensors", "adapter_config.json")
    with pytest.raises(ConfigError, match=r"has an adapter_config\.json, .* merge it into its base model"):
        check_model(str(model))


@pytest.mark.usefixtures("no_home")
def test_the_home_directory_of_a_user_without_one_has_no_model():
    with pytest.raises(ConfigError, match="model.path ~/model does not exist"):
        local_model("~/model")
    assert decoder_of("~/model") is None
