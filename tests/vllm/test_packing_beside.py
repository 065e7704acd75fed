"""What swaps on a CPU rest on: oneDNN packs weights in one thread while another one multiplies."""

import random
import threading
import time

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

# Products of many sizes, so that scratch memory is needed and grows. Of such ones, beside products in another thread,
# a tenth is wrong (docs/vllm.md).
SHAPES = [(4000, 256), (768, 256), (256, 256), (1024, 256), (256, 512), (333, 129)]
ROWS = range(1, 60)
SECONDS = 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_beside_packing_are_those_made_alone(dtype):
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from tba.searcher.vllm_worker import _pack

    module = torch.nn.Module()
    module.quant_method = UnquantizedEmbeddingMethod()
    random_numbers = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=random_numbers).to(dtype) for shape in SHAPES]
    served = [_pack(module, weight) for weight in weights]
    inputs = {
        (one, rows): torch.randn(rows, weights[one].shape[1], generator=random_numbers).to(dtype)
        for one in range(len(weights))
        for rows in ROWS
    }
    alone = {key: served[key[0]](value, weights[key[0]], None) for key, value in inputs.items()}
    fresh, stop, packed = {}, threading.Event(), 0

    def packing():
        nonlocal packed
        while not stop.is_set():
            one = packed % len(weights)
            fresh[one] = _pack(module, weights[one].clone())
            packed += 1

    beside = threading.Thread(target=packing)
    beside.start()
    keys, order, wrong, until = list(inputs), random.Random(0), 0, time.monotonic() + SECONDS
    while time.monotonic() < until:
        one, _ = key = order.choice(keys)
        multiply = fresh.pop(one, served[one])
        wrong += not torch.equal(multiply(inputs[key], weights[one], None), alone[key])
    stop.set()
    beside.join()
    assert packed > len(weights)
    assert not wrong
