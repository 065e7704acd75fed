"""The canary of a snapshot: fixed token sequences with the log-probabilities that its weights give.

Shape suffixes: T tokens of a sequence, V vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoTokenizer, PreTrainedModel

from tba.common.snapshot import Canary
from tba.trainer.model import structure_of

_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Question: What is 12 + 30?\nAnswer: 12 + 30 = 42",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))  # 5",
    "Der schnelle braune Fuchs springt über den faulen Hund. 1, 2, 3, 4, 5, 6, 7",
)
_TOKENS = 32
_DISTINCT = 8  # fewer different tokens would leave most of the embedding untouched
_RANDOM_TOKENS = 16
_SEED = 20250319


def canary_sequences(directory: Path, vocabulary: int) -> list[list[int]]:
    """A few short texts as the model's tokenizer cuts them, or seeded token ids where it makes little of them.

    Text is the better canary: an engine in bfloat16 is off by more on tokens that nobody would expect. But a
    tokenizer of a few characters makes every text a row of unknowns.
    """
    texts = [ids for ids in _tokenized(directory) if len(set(ids)) >= _DISTINCT and max(ids) < vocabulary]
    generator = torch.Generator().manual_seed(_SEED)
    shape = (len(_TEXTS) - len(texts), _RANDOM_TOKENS)
    seeded: list[list[int]] = torch.randint(vocabulary, shape, generator=generator).tolist()
    return texts + seeded


def _tokenized(directory: Path) -> list[list[int]]:
    if not any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return []
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [[int(id_) for id_ in tokenizer.encode(text)[:_TOKENS]] for text in _TEXTS]


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The modules of a model on the host, without its weights: another thread can compute while the model trains."""
    made = structure_of(model).eval()
    if model.device.type != "cpu":  # an attention of the device may have no other
        made.set_attn_implementation("sdpa")
    return made


@torch.no_grad()
def make_canary(modules: PreTrainedModel, weights: dict[str, Tensor], sequences: list[list[int]]) -> Canary:
    """Log-probabilities, computed in float32 on the host, under `weights`. `modules` is the model's skeleton."""
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    logprobs = []
    for sequence in sequences:
        tokens_1T = torch.tensor([sequence])
        call = {"input_ids": tokens_1T, "use_cache": False}
        logits_TV = functional_call(modules, wide, (), call).logits[0, :-1].float()
        logprob_T = logits_TV.log_softmax(dim=1).gather(1, tokens_1T[0, 1:, None])[:, 0]
        logprobs.append([float(value) for value in logprob_T])
    return Canary(sequences, logprobs)
