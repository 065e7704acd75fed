"""Model FLOPs against torch's count, and peaks of devices."""

import logging

import numpy as np
import pytest
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


def test_a_row_with_segments_costs_what_its_sequences_cost():
    flops = ModelFlops(tiny_model(vocabulary=32, hidden=64))
    mask = np.array([1, 0, 0, 1, 1], np.uint8)
    row = make_row(1, [1, 2], [3, 4, 5, 6, 7], loss_mask=mask, segments=np.array([1], np.int32))
    assert flops.update([row]) == flops.update([make_row(1, [1, 2], [3])]) + flops.update([make_row(2, [4, 5], [6, 7])])


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 NVL", 835.5), ("NVIDIA H200", 989.5),
    ("NVIDIA H200 NVL", 835.5), ("NVIDIA H20", 148), ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500),
    ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA A100-SXM4-80GB", 312), ("A100-SXM4-40GB", 312), ("NVIDIA A10", 125),
    ("NVIDIA A10G", 70), ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA RTX 6000 Ada Generation", 364.2),
])  # fmt: skip
def test_a_gpu_has_the_peak_of_its_whole_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == tflops * 1e12


# A part of a card, older cards without bfloat16, and small ones whose names contain those of large ones.
@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "Tesla V100-SXM2-16GB", "Quadro RTX 4000"]
)
def test_an_unknown_gpu_has_no_peak_and_is_named(monkeypatch, caplog, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    with caplog.at_level(logging.INFO, logger="tba"):
        assert peak_flops(torch.device("cuda")) is None
    (record,) = caplog.records
    assert record.fields == {"gpu": name}
