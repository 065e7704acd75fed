"""Warnings that a run is about to be lost: sentences that say what is wrong with the metrics, and what to change.

Each limit applies to an exponential mean over about ten steps, because the metrics of a batch are noisy. Warnings do
not change training, and their means begin again with each start of the trainer.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tba.common.config import ObjectiveSection
from tba.common.log import get_logger

log = get_logger(__name__)

_DECAY = 0.9
# Before it, a mean is of too few batches.
_FIRST_STEPS = 5
# Steps after which a warning that persists is logged again.
_REPEAT_STEPS = 100
# In nats per response. Rounding lowers the mean log-ratio in proportion to the length of the responses, so the
# second limit is per token.
_LOST_NATS = 1.0
_LOST_NATS_PER_TOKEN = 0.005
# In nats per token: rounding of one computation, and of bfloat16 in an engine.
_FLOAT32_MISMATCH, _BFLOAT16_MISMATCH = 1e-3, 0.05
# In nats, of the token that differs most.
_FLOAT32_MOST = 0.01
# In nats. The estimate of log Z may exceed its bound by noise.
_LOG_Z_NOISE = 0.5
# Share of the probability of sampled responses that may be lost, where they have `_MOST` of it: then other responses
# are unlikely to be good.
_LOST_SHARE = 0.15
_MOST = 0.5


_ABOVE = {
    "mismatch_mean": "engine and trainer differ by {mean:.2g} nats per token for the same weights, above {limit:g}: "
    "one of them computes another model than you think; compare their versions and settings",
    "mismatch_max": "engine and trainer differ by {mean:.2g} nats at one token for the same weights, above {limit:g}: "
    "some tokens have another position or mask in one of them; compare their versions and settings",
    "truncated_fraction": "{mean:.0%} of the ratios are outside the range of the objective, above {limit:.0%}: lower "
    "train.learning_rate or buffer.max_staleness",
    "truncated_share": "{mean:.0%} of the responses have no end token, above {limit:.0%}: they are cut off and cannot "
    "be right; raise search.max_tokens, or see docs/prompts.md for what ends a response",
}


def limits(dtype: str) -> dict[str, tuple[float, int, str]]:
    """By metric, the limits of docs/metrics.md that are a number: the largest healthy mean, the steps that it takes,
    and the sentence about a larger one. `dtype` is `model.dtype`."""
    is_exact = dtype == "float32"
    found = {
        # Exact at the first step, and in an asynchronous run there is no other.
        "mismatch_mean": (_FLOAT32_MISMATCH if is_exact else _BFLOAT16_MISMATCH, 1),
        "mismatch_max": (_FLOAT32_MOST, 1),
        "truncated_fraction": (0.2, _FIRST_STEPS),
        "truncated_share": (0.05, _FIRST_STEPS),
    }
    # With bfloat16, rounding moves single unlikely tokens by whole nats.
    return {name: (*one, _ABOVE[name]) for name, one in found.items() if name != "mismatch_max" or is_exact}


@dataclass(slots=True)
class Smoothed:
    """An exponential mean of the values so far, unbiased from the first one on. `count` is their number."""

    count: int = 0
    value: float = math.nan
    _sum: float = 0.0

    def add(self, value: float) -> float:
        self.count += 1
        self._sum = _DECAY * self._sum + (1 - _DECAY) * value
        self.value = self._sum / (1 - _DECAY**self.count)
        return self.value


@dataclass(slots=True)
class Health:
    """Watches the metrics of the steps. `warning` says which limits are exceeded now; empty if none is."""

    objective: ObjectiveSection
    dtype: str = "float32"
    warning: str = ""
    _means: defaultdict[str, Smoothed] = field(default_factory=lambda: defaultdict(Smoothed))
    _largest_reward: float = -math.inf
    _logged_at: dict[str, int] = field(default_factory=dict)

    def update(
        self, step: int, metrics: Mapping[str, float], largest_reward: float, *, at_temperature_1: bool = True
    ) -> None:
        """Take the metrics of a step, and log what exceeds its limit. `largest_reward` is that of the batch.

        `at_temperature_1` is whether all of its responses were sampled so, from the whole vocabulary. A skipped step
        has none of the metrics, and changes nothing.
        """
        found = {
            "policy_mass": self._lost_share(metrics),
            "log_ratio_positive": self._lost_nats(metrics),
            "log_z": self._impossible_log_z(metrics, largest_reward) if at_temperature_1 else "",
        }
        above = {name: self._above(name, metrics) for name in limits(self.dtype)}
        for name, sentence in (found | above).items():
            if sentence and step - self._logged_at.get(name, -_REPEAT_STEPS) >= _REPEAT_STEPS:
                self._logged_at[name] = step
                log.warning(sentence if name in above else f"{sentence}: {self._remedy}", step=step)
        signs = "; ".join(filter(None, found.values()))
        self.warning = "; ".join(filter(None, [signs and f"{signs}: {self._remedy}", *above.values()]))

    def _above(self, name: str, metrics: Mapping[str, float]) -> str:
        """Return the sentence of a limit that the mean of its metric exceeds, else ""."""
        (limit, steps, sentence), mean = limits(self.dtype)[name], self._means[name]
        if name in metrics:
            mean.add(metrics[name])
        exceeded = mean.count >= steps and mean.value > limit
        return sentence.format(mean=mean.value, limit=limit) if exceeded else ""

    @property
    def _remedy(self) -> str:
        if not self.objective.lacks_imitation:
            return "lower train.learning_rate or buffer.max_staleness"
        balance = self.objective.name in ("tb", "tba_prime")
        stale = 'objective.name = "tb_stale"' if balance else "objective.imitation = 1"
        return f"lower train.learning_rate, or set {stale}"

    def _lost_share(self, metrics: Mapping[str, float]) -> str:
        """Return a sentence if the policy gives much of its probability to responses that were not sampled."""
        if "policy_mass" not in metrics:
            return ""
        sampled, policy = (self._means[name].add(metrics[name]) for name in ("sampled_mass", "policy_mass"))
        lost = 1 - policy / max(sampled, _MOST)
        if self._means["policy_mass"].count < _FIRST_STEPS or sampled < _MOST or lost <= _LOST_SHARE:
            return ""
        return f"{lost:.0%} of the probability of stale responses has moved to responses that were never sampled"

    def _lost_nats(self, metrics: Mapping[str, float]) -> str:
        """Return a sentence if good responses have become less likely than they were when they were sampled."""
        if "log_ratio_positive" not in metrics:
            return ""
        lost = -self._means["log_ratio_positive"].add(metrics["log_ratio_positive"])
        limit = max(_LOST_NATS, _LOST_NATS_PER_TOKEN * metrics["response_tokens_mean"])
        if self._means["log_ratio_positive"].count < _FIRST_STEPS or lost <= limit:
            return ""
        return f"stale responses with a reward above the mean of their prompt have lost {lost:.1f} nats"

    def _impossible_log_z(self, metrics: Mapping[str, float], largest_reward: float) -> str:
        """Return a sentence if log Z is above max r / beta, which it never is on fresh data.

        Z is the mean of exp(r / beta) over the reference, so log Z <= max r / beta, over all rewards seen so far. The
        estimate obeys it where the sampler is the policy at temperature 1: it adds KL(sampler || policy).
        """
        if "log_z" not in metrics:
            return ""
        self._largest_reward = max(self._largest_reward, largest_reward)
        log_z = self._means["log_z"].add(metrics["log_z"])
        bound = self._means["bound"].add(self._largest_reward / metrics["beta"])
        if self._means["log_z"].count < _FIRST_STEPS or log_z <= bound + _LOG_Z_NOISE:
            return ""
        return f"the mean log Z of {log_z:.1f} is above its bound of {bound:.1f}, the largest reward / beta"
