"""The files of a model directory."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save_file

from tba.common.weights.model_files import share_weights


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
