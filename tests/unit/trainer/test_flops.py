"""Model FLOPs against torch's count, and peaks of devices."""

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from tba.tests.helpers.trainer import make_row, tiny_model
from tba.trainer.metrics.flops import ModelFlops, peak_flops


def test_dense_flops_equal_torchs_count_of_the_matrix_products():
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


def test_a_shared_prompt_counts_once():
    model = tiny_model(vocabulary=32, hidden=64)
    flops = ModelFlops(model)
    prompt, rows = [1, 2, 3, 4], [[5, 6], [7], [8, 9, 10]]
    alone = [flops.update([make_row(n, prompt, response)]) for n, response in enumerate(rows)]
    together = flops.update([make_row(n, prompt, response) for n, response in enumerate(rows)])
    # make_row(_, prompt, []) is the prompt alone: no token is predicted.
    assert together == sum(alone) - 2 * flops.update([make_row(0, prompt, [])])


def test_a_cpu_has_no_peak_unless_it_is_configured():
    assert peak_flops(torch.device("cpu"), "auto") is None
    assert peak_flops(torch.device("cpu"), 0.5) == 0.5e12
