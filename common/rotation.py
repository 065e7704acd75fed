"""Models that rotate positions by the longest sequence of a forward pass: LongRoPE and dynamic NTK in transformers.

What a model computes for a row must not depend on the others of its pass, so each pass has rows that are rotated alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rotation:
    """The RoPE type of a model that depends on the length, and the longest sequence that is rotated as shorter ones.

    LongRoPE has two sets of frequencies, for sequences up to the limit and for longer ones; dynamic NTK has others for
    each length above it. Without such a type, `kind` is "" and `limit` None.
    """

    kind: str = ""
    limit: int | None = None

    @classmethod
    def of(cls, config: Any) -> "Rotation":
        """Read a configuration of transformers, which has parameters for all layers, or for each type of layer."""
        config = config.get_text_config()
        parameters = getattr(config, "rope_parameters", None) or {}
        for one in [parameters, *parameters.values()]:
            kind = str(one.get("rope_type", "")) if isinstance(one, dict) else ""
            if kind == "longrope":
                return cls(kind, int(one.get("original_max_position_embeddings") or config.max_position_embeddings))
            if "dynamic" in kind:
                return cls("dynamic", int(config.max_position_embeddings))
        return cls()

    def split(self, lengths: Sequence[int], cut: Callable[[Sequence[int]], list[list[int]]]) -> list[list[int]]:
        """Cut sequences of these lengths into passes as `cut` does, but each with sequences that are rotated alike."""
        groups: dict[int, list[int]] = {}
        for n, tokens in enumerate(lengths):
            above = self.limit is not None and tokens > self.limit
            groups.setdefault(above and (tokens if self.kind == "dynamic" else 1), []).append(n)
        return [[rows[n] for n in part] for rows in groups.values() for part in cut([lengths[n] for n in rows])]

    def forget(self, model: Any) -> None:
        """Reset the frequencies of dynamic NTK, which transformers keeps from longer passes; call it before each."""
        # transformers resets them when it gets a short sequence.
        for module in model.modules() if self.kind == "dynamic" else ():
            kinds = getattr(module, "rope_type", None)
            for arguments in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()] * (kinds is not None):
                one = next(module.buffers()).new_zeros(1, 1)
                module(one, one.long(), *arguments)
