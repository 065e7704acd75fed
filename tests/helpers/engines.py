"""Engines of small models without a tokenizer."""

from pathlib import Path
from typing import Any

from tba.common.weights.model_files import eos_ids
from tba.searcher.engines.stopping import Stopping


def logprobs_of(model: Any, prompt: Any, response: Any, temperature: float = 1.0) -> Any:
    """Return those of a response, by one pass of a model of transformers over the whole, without cache or padding."""
    import torch

    ids_1T = torch.tensor([[*map(int, prompt), *map(int, response)]])
    with torch.no_grad():
        logits_TV = model(ids_1T).logits[0, len(prompt) - 1 : -1] / temperature
    return logits_TV.log_softmax(-1).gather(1, ids_1T[0, len(prompt) :, None])[:, 0].numpy()


# Only strings are looked for in the text of a response.
_NO_TOKENIZER: Any = None


def end_tokens(model: str | Path) -> Stopping:
    """Return the end tokens of a model directory."""
    return Stopping(_NO_TOKENIZER, (), eos_ids(Path(model)))


def cpu_engine(model: str | Path, kind: Any = None, **changes: Any) -> Any:
    """Return an engine of transformers, or of a derived `kind`, that serves a model directory in float32 on the CPU."""
    from tba.searcher.engines.transformers_engine import TransformersEngine

    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_in_flight": 4,
        "seed": 0,
        "canary_tolerance": 1e-3,
    }
    return (kind or TransformersEngine)(str(model), **{"stopping": end_tokens(model)} | settings | changes)
