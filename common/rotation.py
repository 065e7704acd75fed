"""Models that rotate positions by the longest sequence of a forward pass: LongRoPE and dynamic NTK in transformers.

What a model computes for a row must not depend on the others of its pass, so each pass has rows that are rotated alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE types of a model that depend on the length, each with the number of tokens up to which it does not."""

    limits: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, config: Any) -> "Rotation":
        """Read a configuration of transformers, which has parameters for all layers, or for each type of layer."""
        config = config.get_text_config()
        parameters = getattr(config, "rope_parameters", None) or {}
        limits = set()
        for one in [parameters, *parameters.values()]:
            kind = str(one.get("rope_type", "")) if isinstance(one, dict) else ""
            if kind == _LONGROPE:
                limits.add((kind, int(one.get("original_max_position_embeddings") or config.max_position_embeddings)))
            elif _DYNAMIC in kind:
                limits.add((_DYNAMIC, int(config.max_position_embeddings)))
        return cls(tuple(sorted(limits)))

    @property
    def limit(self) -> int | None:
        """The longest sequence that is rotated as every shorter one; None if all are."""
        return min((limit for _, limit in self.limits), default=None)

    @property
    def switches(self) -> bool:
        """Whether there are two sets of frequencies, for sequences up to the limit and for longer ones (LongRoPE)."""
        return any(kind == _LONGROPE for kind, _ in self.limits)

    def split(self, lengths: Sequence[int], cut: Callable[[Sequence[int]], list[list[int]]]) -> list[list[int]]:
        """Cut sequences of these lengths into passes as `cut` does, but each with sequences that are rotated alike."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for n, tokens in enumerate(lengths):
            of_limits = tuple(tokens if kind == _DYNAMIC else 1 for kind, limit in self.limits if tokens > limit)
            groups.setdefault(of_limits, []).append(n)
        return [[rows[n] for n in part] for rows in groups.values() for part in cut([lengths[n] for n in rows])]

    def forget(self, model: Any) -> None:
        """Reset the frequencies of dynamic NTK, which transformers keeps from longer passes; call it before each."""
        if all(kind != _DYNAMIC for kind, _ in self.limits):
            return
        # transformers resets them when it gets a short sequence.
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            for arguments in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()] * (kinds is not None):
                one = next(module.buffers()).new_zeros(1, 1)
                module(one, one.long(), *arguments)
