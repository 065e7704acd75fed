"""What a trainer refuses before it loads a model: a torch that is too old for the configuration."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.trainer.distributed import join
from tba.trainer.step.build import prepare


@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_force_sum_reduction_for_comms"])
def test_ranks_do_not_join_with_a_torch_whose_fsdp_lacks_a_method(monkeypatch, name):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delattr(FSDPModule, name)
    with pytest.raises(ConfigError, match=rf"torch 2\.9 or newer, and torch {torch.__version__[:4]}.*has no {name}\)"):
        join(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join(torch.device("cpu")).size == 1


def test_exact_logits_on_a_gpu_need_a_product_that_adds_in_float32(monkeypatch):
    config = Config.model_validate({"model": {"head_dtype": "float32", "dtype": "bfloat16"}})
    monkeypatch.setattr(torch.ops.aten.mm, "overloads", lambda: ["default", "out"])
    with pytest.raises(ConfigError, match=r'head_dtype = "float32" needs torch 2\.8 or newer.*or set it to "model"'):
        prepare(config, "cuda:0")
    others = Config.model_validate({"model": {"head_dtype": "model", "dtype": "bfloat16"}})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees none"):
            prepare(others, "cuda:0")
