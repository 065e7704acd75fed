"""The response of a trajectory token by token, coloured by log-probability, policy version or mismatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STRIP_TOKENS = 2000
# Upper ends of the classes of log-probabilities, in nats: e^-0.1 is 90 %, e^-7 is 0.1 %.
_LOGPROB_LIMITS = (-7.0, -4.0, -2.0, -1.0, -0.3, -0.05)
# The classes of log-ratios that lead away from 0 on either side, in nats: e^0.1 is a factor of 1.1, e^1 of 2.7.
_RATIO_LIMITS = (0.01, 0.1, 1.0)
COLOURS = ("logprob", "version", "mismatch")


@dataclass(frozen=True)
class Token:
    """One token as a page shows it: its text, the CSS class of its colour, and a sentence about it."""

    text: str
    style: str
    about: str


def strip(
    known: dict[str, Any],
    decode: Callable[[list[int]], str] | None,
    *,
    colour: str,
    first: int = 0,
    log_ratios: Sequence[float] = (),
) -> list[Token]:
    """Return the tokens of a response from the position `first` on, STRIP_TOKENS at most; [] if they were dropped.

    `known` is a trajectory of `tba.buffer.tools.show.describe`. Without `decode`, a token is shown by its id.
    `log_ratios` has one value per token, in nats, or none; the colour "mismatch" is theirs.
    """
    ids = known["response_ids"] or []
    versions = [version for version, count in known["version_runs"] or [] for _ in range(count)]
    distinct = {version: position for position, version in enumerate(dict.fromkeys(versions))}
    mask, logprobs = known["loss_mask"] or [], known["logprobs"]
    tokens = []
    for position in range(first, min(len(ids), first + STRIP_TOKENS)):
        counts = not mask or mask[position]
        about = f"token {position}, id {ids[position]}, {logprobs[position]:.3f} nats, version {versions[position]}"
        if colour == "version":
            style = f"v{distinct[versions[position]] % 6}"
        elif colour == "logprob":
            style = _logprob_style(logprobs[position])
        elif log_ratios and counts:
            style = _ratio_style(log_ratios[position])
            about = f"{about}, log-ratio {log_ratios[position]:+.3g} nats"
        else:
            style = ""
        tokens.append(
            Token(
                text=_piece(ids, position, decode),
                style=style if counts else f"{style} masked".strip(),
                about=about if counts else f"{about}, masked: not trained on",
            )
        )
    return tokens


def _logprob_style(logprob: float) -> str:
    return f"p{sum(logprob > limit for limit in _LOGPROB_LIMITS)}"


def _ratio_style(log_ratio: float) -> str:
    """Return r0 (far below 0) to r6 (far above), r3 in between."""
    away = sum(abs(log_ratio) > limit for limit in _RATIO_LIMITS)
    return f"r{3 + (away if log_ratio > 0 else -away)}"


def _piece(ids: list[int], position: int, decode: Callable[[list[int]], str] | None) -> str:
    """Return the text that a token adds to those before it: some tokenizers drop the space before a single token."""
    if decode is None:
        return str(ids[position])
    before = ids[max(0, position - 3) : position]
    prefix, whole = decode(before), decode([*before, ids[position]])
    text = whole[len(prefix) :] if whole.startswith(prefix) else decode([ids[position]])
    # A token with no text of its own, such as the end of the response.
    return text or f"‹{ids[position]}›"
