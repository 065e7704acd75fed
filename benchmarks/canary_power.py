"""How many corruptions of weights canaries of different lengths detect, with an engine in bfloat16.

    python -m benchmarks.canary_power

The engine is transformers' model in bfloat16, with one tensor corrupted; the trainer's log-probabilities are in
float32, of random tokens. Limits are calibrated with the first right weights, as at the start of a run. Each corruption
is scored once with the long canary, of which the shorter ones are parts.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.table import print_table
from tba.common.errors import CanaryMismatch
from tba.searcher.engines.acceptance import Acceptance, mismatch
from tba.searcher.engines.engine import Mismatch

MODEL = Path("examples/arithmetic/model")
COUNT = int(os.environ.get("COUNT", "200"))
TOLERANCE = 0.5
SEQUENCES, TOKENS = 5, 17
# Sequences and tokens of each.
LAYOUTS = ((4, 16), (2, 17), (4, 9), (2, 9), (2, 8), (3, 6), (4, 4), (5, 4))

Corruption = Callable[[PreTrainedModel, torch.Generator], None]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    found = {name: detections(model, one) for name, one in CORRUPTIONS.items()}
    rows = [[name, *(counts[layout] for layout in LAYOUTS)] for name, counts in found.items()]
    headings = ["corruption", *(f"{count} x {length}" for count, length in LAYOUTS)]
    print_table(f"{MODEL}: detected of {COUNT}, by sequences x tokens", headings, rows)


@torch.no_grad()
def detections(model: PreTrainedModel, corrupt: Corruption) -> Counter[tuple[int, int]]:
    """How many of COUNT corruptions each layout detects."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, TOKENS), generator=generator)
    rounded = copy.deepcopy(model).bfloat16()
    expected = logprobs(copy.deepcopy(rounded).float(), tokens)
    limits = {layout: Acceptance({}, vocabulary=1, tolerance=TOLERANCE) for layout in LAYOUTS}
    right = logprobs(rounded, tokens)
    for layout, acceptance in limits.items():
        acceptance.accept(difference(right, expected, layout), 0, calibrate=True)
    detected: Counter[tuple[int, int]] = Counter()
    for number in range(1, COUNT + 1):
        engine = copy.deepcopy(rounded)
        if corrupt is version:
            version(rounded, generator)
            expected = logprobs(copy.deepcopy(rounded).float(), tokens)
            engine = rounded
        else:
            corrupt(engine, generator)
        scores = logprobs(engine, tokens)
        for layout, acceptance in limits.items():
            try:
                acceptance.accept(difference(scores, expected, layout), number)
            except CanaryMismatch:
                detected[layout] += 1
    return detected


def logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Log-probabilities [N, T - 1] of each token after the first."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(2).gather(2, tokens[:, 1:, None])[..., 0]


def difference(scores: Tensor, expected: Tensor, layout: tuple[int, int]) -> Mismatch:
    """The mismatch of a layout's tokens."""
    count, length = layout
    return mismatch(scores[:count, : length - 1].numpy().ravel(), expected[:count, : length - 1].numpy().ravel())


# ------------------------------------------------------------ corruptions, in place


def chosen(model: PreTrainedModel, generator: torch.Generator, *, matrices: bool = False) -> Tensor:
    """A random tensor of a model."""
    tensors = [one for one in model.parameters() if one.dim() == 2 or not matrices]
    return tensors[int(torch.randint(len(tensors), (), generator=generator))]


def zero(model: PreTrainedModel, generator: torch.Generator) -> None:
    """All elements of a tensor."""
    chosen(model, generator).zero_()


def swap(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Swap two matrices of the same shape."""
    while True:
        one, other = chosen(model, generator, matrices=True), chosen(model, generator, matrices=True)
        if one is not other and one.shape == other.shape:
            break
    held = one.clone()
    one.copy_(other)
    other.copy_(held)


def transpose(model: PreTrainedModel, generator: torch.Generator) -> None:
    """The transposed matrix, in the memory of the right one."""
    one = chosen(model, generator, matrices=True)
    one.copy_(one.T.contiguous().view(one.shape))


def shift(model: PreTrainedModel, generator: torch.Generator) -> None:
    """All rows one further, as with a wrong offset."""
    one = chosen(model, generator, matrices=True)
    one.copy_(one.roll(1, 0))


def flip_element(model: PreTrainedModel, generator: torch.Generator) -> None:
    """The highest bit of the exponent of one element."""
    bits = chosen(model, generator, matrices=True).view(torch.int16).view(-1)
    bits[int(torch.randint(len(bits), (), generator=generator))] ^= 1 << 14


def flip_mantissa(model: PreTrainedModel, generator: torch.Generator) -> None:
    """The highest bit of the mantissa of all elements of a tensor."""
    one = chosen(model, generator)
    one.view(torch.int16).bitwise_xor_(1 << 6)


def flip_exponent(model: PreTrainedModel, generator: torch.Generator) -> None:
    """The lowest bit of the exponent of all elements of a tensor: twice or half of each."""
    chosen(model, generator).view(torch.int16).bitwise_xor_(1 << 7)


def stale(model: PreTrainedModel, generator: torch.Generator) -> None:
    """A tensor of 10 optimiser steps of 1e-5 before, all in one direction per element."""
    one = chosen(model, generator)
    one.add_((torch.randint(2, one.shape, generator=generator) * 2 - 1) * 1e-4)


def version(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Right weights of a later version: all elements moved by about a hundredth of them, also for the trainer."""
    for one in model.parameters():
        one.mul_(1 + 0.01 * torch.randn(one.shape, generator=generator))


CORRUPTIONS: dict[str, Corruption] = {
    "a tensor is zero": zero,
    "two tensors are swapped": swap,
    "a tensor is transposed": transpose,
    "rows are shifted by one": shift,
    "one exponent bit of one element": flip_element,
    "a mantissa bit of a tensor": flip_mantissa,
    "an exponent bit of a tensor": flip_exponent,
    "a tensor of 10 steps before": stale,
    "none: later right weights": version,
}

if __name__ == "__main__":
    main()
