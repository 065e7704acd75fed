"""What ends a response of a model without a tokenizer."""

from pathlib import Path
from typing import Any

from tba.common.weights.model_files import eos_ids
from tba.searcher.engines.stopping import Stopping

# Only strings are looked for in the text of a response.
_NO_TOKENIZER: Any = None


def end_tokens(model: str | Path) -> Stopping:
    """Return the end tokens of a model directory."""
    return Stopping(_NO_TOKENIZER, (), eos_ids(Path(model)))
