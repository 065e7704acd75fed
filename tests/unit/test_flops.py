"""Model FLOPs against torch's own count, and the devices that are known."""

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tba.trainer.flops import ModelFlops, peak_flops

from .tb_lab import make_row, tiny_model


def test_the_dense_part_is_what_torch_counts_in_the_matrix_products():
    model = tiny_model(vocabulary=32, hidden=64)
    row = make_row(1, [1], np.arange(23) % 32)
    tokens = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    with FlopCounterMode(display=False) as counter:
        model.base_model(input_ids=tokens)
    products = counter.flop_counts["Global"]
    counted = 3 * (products[torch.ops.aten.mm] + 2 * model.lm_head.weight.numel() * len(row.response_ids))
    flops = ModelFlops(model)
    dense = flops.update([row]) - 6 * 64 * row.tokens**2
    norms = 6 * row.tokens * sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert dense - norms == counted


def test_a_cpu_has_no_peak_unless_it_is_told():
    assert peak_flops(torch.device("cpu"), "auto") is None
    assert peak_flops(torch.device("cpu"), 0.5) == 0.5e12
