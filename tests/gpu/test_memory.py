"""What publishing and checkpoints take: pinned memory on the host, and memory of the trainer's GPU."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.tests.helpers.checks import not_none
from tba.trainer.model.host_buffers import HostBuffers, own_stream
from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing.canary import make_canary, skeleton

# A few seconds of the GPU's clock, and elements that are far from a power of two.
LONG, ODD = 1 << 33, 30_000_001


def test_a_copy_from_the_gpu_goes_to_pinned_memory_and_is_not_waited_for():
    copies, source = HostBuffers(torch.device("cuda")), torch.randn(ODD, device="cuda")
    # The first copy maps and pins the buffer.
    copies.release(copies.copy([("a", source)]))
    torch.cuda._sleep(LONG)
    copy = copies.copy([("a", source)])
    assert not not_none(copy.done).query()
    assert copy.tensors["a"].is_pinned()
    assert torch.equal(copy.wait()["a"], source.cpu())


def test_a_copy_of_a_tensor_on_the_host_is_not_pinned():
    master = torch.randn(ODD)
    copy = HostBuffers(torch.device("cuda")).copy([("a", master)])
    assert torch.equal(copy.wait()["a"], master)
    assert not copy.tensors["a"].is_pinned()


def test_pinned_memory_that_is_dropped_can_be_pinned_again():
    source = torch.randn(ODD, device="cuda")
    for value in range(3):
        copy = HostBuffers(torch.device("cuda")).copy([("a", source + value)])
        assert torch.equal(copy.wait()["a"], (source + value).cpu())
        del copy
    # Nothing that failed meanwhile is left for the next kernel to report.
    torch.cuda.synchronize()


def test_canaries_of_one_writer_use_the_same_memory_of_the_gpu(record_property):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=152_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16
    )
    model: Any = LlamaForCausalLM(config)
    weights = {name: tensor.detach().bfloat16() for name, tensor in weights_of(model).items()}
    modules, device = skeleton(model), torch.device("cuda", torch.cuda.current_device())
    sequences, stream, reserved = [list(range(16))] * 4, own_stream(device), []
    for _ in range(40):
        make_canary(modules, weights, sequences, device, stream)
        reserved.append(torch.cuda.memory_reserved())
    record_property("reserved_mib_first", reserved[0] >> 20)
    record_property("reserved_mib_last", reserved[-1] >> 20)
    assert reserved[-1] == reserved[2]
