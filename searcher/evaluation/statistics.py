"""Estimators of an evaluation: pass@k, bootstrap intervals, diversity.

Shape suffixes: N prompts, n samples of one prompt, m of these that are left, E dimensions of an embedding.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

_RESAMPLES = 1000
_CONFIDENCE = 0.95


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) with n `samples`, of which c are `correct`.

    It is the probability that k samples drawn without replacement include a correct one. Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", Eq. 1. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    # Exact integers, so that no product of many factors is rounded.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def bootstrap(values_N: Floats, weights_N: Floats | None = None, *, seed: int) -> Interval:
    """Return the 95 % percentile interval of a mean over prompts (Efron 1979), from 1,000 seeded resamples.

    With `weights_N` it is the interval of sum(values) / sum(weights), such as nats per token: a resample draws whole
    prompts. One prompt has no spread: both ends are its value. Raises ValueError without any.
    """
    count = len(values_N)
    if not count:
        raise ValueError("there is no prompt to resample")
    weights_N = np.ones(count) if weights_N is None else weights_N
    generator = np.random.default_rng(seed)
    means = np.full(_RESAMPLES, np.nan)
    # One resample at a time: all of them at once would need a gigabyte for 100,000 prompts.
    for resample in range(_RESAMPLES):
        drawn = generator.integers(count, size=count)
        total = weights_N[drawn].sum()
        if total > 0:
            means[resample] = values_N[drawn].sum() / total
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.nanquantile(means, [tail, 1 - tail])
    return float(low), float(high)


def distinct(responses: Sequence[Sequence[int]], n: int) -> float | None:
    """Return distinct-n: the number of different n-grams of tokens, divided by the number of all n-grams.

    Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models". None without an n-gram.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def cosine_distance(embeddings_nE: Floats) -> float | None:
    """Return the mean cosine distance, 1 - cos, over all pairs of rows. None for fewer than two rows."""
    count = len(embeddings_nE)
    if count < 2:
        return None
    units_nE = _units(embeddings_nE)
    # The sum over all ordered pairs is |sum of units|^2 - n, so that no matrix [n, n] is needed.
    total = float((units_nE.sum(axis=0) ** 2).sum() - (units_nE**2).sum())
    return 1.0 - total / (count * (count - 1))


def without_near_duplicates(embeddings_nE: Floats, least_distance: float) -> list[int]:
    """Return the rows that are left, in order, when near-duplicates are removed.

    Greedy: a row is kept if its cosine distance, 1 - cos, to every row kept before it is at least `least_distance`.
    """
    kept: list[int] = []
    left_m, units_mE = np.arange(len(embeddings_nE)), _units(embeddings_nE)
    # One kept row at a time, so that no matrix [n, n] is needed.
    while len(left_m):
        kept.append(int(left_m[0]))
        # A cosine is above 1 by rounding alone.
        far_m = 1.0 - np.minimum(units_mE @ units_mE[0], 1.0) >= least_distance
        far_m[0] = False
        left_m, units_mE = left_m[far_m], units_mE[far_m]
    return kept


def _units(embeddings_nE: Floats) -> Floats:
    units_nE: Floats = embeddings_nE / np.maximum(np.linalg.norm(embeddings_nE, axis=1, keepdims=True), 1e-12)
    return units_nE
