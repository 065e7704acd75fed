"""What the training thread pays for a publication and for a checkpoint, in memcpys of the weights.

A random Llama of about 30 million parameters on the CPU. A memcpy is one `Tensor.copy_` of all float32 weights between
buffers that were used before, measured anew beside each part. "As it was": rounding, the canary's forward pass and a
new copy, all in the training thread. Best of seven, in CPU time of the calling thread.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.table import print_table
from tba.common.config import LoraSection, TrainSection
from tba.tests.unit.tb_lab import objective
from tba.trainer.adapters import FACTORS, MERGED, add_adapters, gathered
from tba.trainer.canary import canary_sequences, make_canary
from tba.trainer.checkpoint import tensors_of
from tba.trainer.host_copies import HostCopies
from tba.trainer.model import weights_of
from tba.trainer.step import Learner

ROUNDS = 7
CPU = torch.device("cpu")


def main() -> None:
    model = random_model()
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        sequences = canary_sequences(Path(folder), model.config.vocab_size)
    rows = [publication(model, sequences, dtype) for dtype in (torch.float32, torch.bfloat16)]
    print_table("a publication, in memcpys of the float32 weights", ["published as", "as it was", "now"], rows)
    print_table(
        "a publication with adapters of rank 16", ["lora.publish", "memcpys of the float32 weights"], lora(model)
    )
    rows = [checkpoint_row(random_model())]
    print_table("a checkpoint, in memcpys of what it holds", ["", "a copy in new memory", "now"], rows)


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


def publication(model: Any, sequences: list[list[int]], dtype: torch.dtype) -> list[str]:
    weights = weights_of(model)
    memcpy = memcpy_of(weights)
    copies = HostCopies(CPU)

    def before() -> None:
        rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
        make_canary(model, rounded, sequences)
        _ = {name: tensor.to("cpu", copy=True) for name, tensor in rounded.items()}

    def now() -> None:
        copies.give_back(copies.copy(weights_of(model).items(), dtype))

    return [str(dtype).removeprefix("torch."), f"{best(before) / best(memcpy):.1f}", f"{best(now) / best(memcpy):.2f}"]


def lora(model: Any) -> list[list[str]]:
    """What the training thread does of it: all weights merged and rounded, or a copy of the adapters."""
    memcpy = memcpy_of(weights_of(model))
    add_adapters(model, LoraSection(rank=16))
    copies = HostCopies(CPU)

    def publish(what: str, dtype: torch.dtype) -> float:
        return best(lambda: copies.give_back(copies.copy(gathered(model, what), dtype))) / best(memcpy)

    merged, adapter = publish(MERGED, torch.bfloat16), publish(FACTORS, torch.float32)
    return [["merged", f"{merged:.2f}"], ["adapter", f"{adapter:.3f}"]]


def checkpoint_row(model: Any) -> list[str]:
    learner = Learner(model, random_model(), TrainSection(), objective("tb"), autocast=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    memcpy = memcpy_of(dict(tensors_of(learner)))
    copies = HostCopies(CPU)

    def before() -> None:
        _ = {name: tensor.clone() for name, tensor in tensors_of(learner)}

    def now() -> None:
        copies.give_back(copies.copy(tensors_of(learner)))

    return ["weights and moments", f"{best(before) / best(memcpy):.2f}", f"{best(now) / best(memcpy):.2f}"]


def memcpy_of(tensors: dict[str, Tensor]) -> Callable[[], None]:
    """Copies the tensors into buffers that have been written to before."""
    buffers = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def memcpy() -> None:
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)

    return memcpy


def best(part: Callable[[], None]) -> float:
    """Seconds of the fastest of a few rounds, after one that does not count."""
    part()
    seconds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        part()
        seconds.append(time.thread_time() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
