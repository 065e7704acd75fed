"""Which rewards are equal: a sum of the same parts in another order, 0.3 and 0.1 + 0.2, is the same reward."""

from typing import Any

import numpy as np
import numpy.typing as npt

# The largest difference by rounding, of the largest reward or of 1: 16 units in the last place.
ROUNDING = 2.0**-48


def are_equal(least: Any, largest: Any) -> Any:
    """Return whether the least and the largest reward of a group, or of each of several, differ by rounding alone."""
    return largest - least <= ROUNDING * np.maximum(np.maximum(np.abs(least), np.abs(largest)), 1.0)


def level(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Make rewards equal that differ by rounding from the next one in order, along the last axis: the least of them."""
    order = np.argsort(rewards, axis=-1, kind="stable")
    ordered = np.take_along_axis(rewards, order, -1)
    scale = np.abs(rewards).max(axis=-1, keepdims=True, initial=1.0)
    with np.errstate(invalid="ignore"):
        apart = np.diff(ordered, axis=-1, prepend=ordered[..., :1]) > ROUNDING * scale
    first = np.maximum.accumulate(np.where(apart, np.arange(rewards.shape[-1]), 0), axis=-1)
    found = np.empty_like(rewards)
    np.put_along_axis(found, order, np.take_along_axis(ordered, first, -1), -1)
    return np.where(np.isfinite(scale), found, rewards)
