"""What swaps on a CPU rest on: a weight may be packed in one thread while another one multiplies."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

# For oneDNN, which takes what is large or has a number of rows that is no multiple of 16 (others are SGL's on AMX). Of
# products of so many sizes, beside such products in another thread, some are wrong (docs/vllm.md).
SHAPES = [(4000, 256), (769, 256), (257, 256), (1025, 256), (255, 512), (333, 129)]
ROWS = range(1, 60)
SECONDS = 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_beside_packing_are_those_made_alone(dtype):
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from tba.searcher.vllm_worker import _pack

    generator, order = torch.Generator().manual_seed(0), random.Random(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    keys = [(one, rows) for one in range(len(weights)) for rows in ROWS]
    inputs = {(one, rows): torch.randn(rows, SHAPES[one][1], generator=generator).to(dtype) for one, rows in keys}
    module = torch.nn.Module()
    module.quant_method = UnquantizedEmbeddingMethod()
    module.weight = weights[0]
    served, found, stop, wrong = [_pack(module, weight) for weight in weights], {}, threading.Event(), 0

    def product(key):
        return served[key[0]](inputs[key], weights[key[0]], None)

    def packing() -> int:
        count = 0
        while not stop.is_set():
            one = count % len(weights)
            served[one] = _pack(module, weights[one].clone())
            count += 1
        return count

    with ThreadPoolExecutor(1) as beside:
        packed = beside.submit(packing)
        try:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                key = order.choice(keys)
                result = product(key)  # the first of a size is compiled, beside packing too
                wrong += not torch.equal(found.setdefault(key, result), result)
        finally:
            stop.set()
        assert packed.result() > len(weights)
    wrong += sum(not torch.equal(result, product(key)) for key, result in found.items())
    assert not wrong
