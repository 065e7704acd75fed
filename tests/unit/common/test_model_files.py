"""The files of a model directory."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save_file

from tba.buffer.tools.tokenizer import decoder_of
from tba.common.errors import ConfigError
from tba.common.weights.model_files import local_model, share_weights


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


@pytest.mark.usefixtures("no_home")
def test_the_home_directory_of_a_user_without_one_has_no_model():
    with pytest.raises(ConfigError, match="model.path ~/model does not exist"):
        local_model("~/model")
    assert decoder_of("~/model") is None
