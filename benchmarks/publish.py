"""The cost of a publication and of a checkpoint for the training thread, in memcpys of the weights.

A random Llama of about 30 million parameters on the CPU. A memcpy is one `Tensor.copy_` of all float32 weights between
buffers that were used before, measured again for each part. Best of seven, in CPU time of the calling thread.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.table import print_table
from tba.common.config import LoraSection, TrainSection
from tba.tests.helpers.trainer import objective
from tba.trainer.checkpoints.checkpoint import tensors_of
from tba.trainer.model.adapters import FACTORS, MERGED, add_adapters, gathered
from tba.trainer.model.host_buffers import HostBuffers
from tba.trainer.model.scorer import weights_of
from tba.trainer.step.learner import Learner

ROUNDS = 7
CPU = torch.device("cpu")


def main() -> None:
    model = random_model()
    rows = [publication(model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    unit = "memcpys of the float32 weights"
    print_table("a publication", ["published as", unit], rows)
    print_table("a publication with adapters of rank 16", ["lora.publish", unit], lora(model))
    print_table("a checkpoint", ["", "memcpys of its tensors"], [checkpoint(random_model())])


def random_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def publication(model: Any, dtype: torch.dtype) -> list[str]:
    memcpy = memcpy_of(weights_of(model))
    copies = HostBuffers(CPU)
    publish = best(lambda: copies.release(copies.copy(weights_of(model).items(), dtype)))
    return [str(dtype).removeprefix("torch."), f"{publish / best(memcpy):.2f}"]


def lora(model: Any) -> list[list[str]]:
    """Publish all weights, merged and rounded, or a copy of the adapters."""
    memcpy = memcpy_of(weights_of(model))
    add_adapters(model, LoraSection(rank=16))
    copies = HostBuffers(CPU)

    def publish(what: str, dtype: torch.dtype) -> float:
        return best(lambda: copies.release(copies.copy(gathered(model, what), dtype))) / best(memcpy)

    merged, adapter = publish(MERGED, torch.bfloat16), publish(FACTORS, torch.float32)
    return [["merged", f"{merged:.2f}"], ["adapter", f"{adapter:.3f}"]]


def checkpoint(model: Any) -> list[str]:
    learner = Learner(model, random_model(), TrainSection(), objective("tb"), autocast=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    memcpy = memcpy_of(dict(tensors_of(learner)))
    copies = HostBuffers(CPU)
    save = best(lambda: copies.release(copies.copy(tensors_of(learner))))
    return ["weights and moments", f"{save / best(memcpy):.2f}"]


def memcpy_of(tensors: dict[str, Tensor]) -> Callable[[], None]:
    """Return a function that copies the tensors into buffers whose memory is already mapped."""
    buffers = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def memcpy() -> None:
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)

    return memcpy


def best(part: Callable[[], None]) -> float:
    """Return the seconds of the fastest of a few rounds, after one that does not count."""
    part()
    seconds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        part()
        seconds.append(time.thread_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
