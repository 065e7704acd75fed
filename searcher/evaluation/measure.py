"""The metrics of an evaluation, from its answers, and their estimators. docs/evaluation.md lists them.

Shape suffixes: N prompts, n samples of one prompt, m of these that are left, E dimensions of an embedding.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from tba.common.evaluations import why_not_measured
from tba.common.wire.messages import MAX_NOT_MEASURED
from tba.common.wire.trajectory import STOP_EOS, STOP_ERROR, STOP_LENGTH, Int32, Trajectory
from tba.searcher.episodes import CUT_OFF
from tba.searcher.tasks.task import CORRECT

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

_GRAMS = (1, 2, 4)
# The k of pass@k, up to the number of sampled responses.
_PASS_AT = (1, 4, 16, 64)
# The cosine distance of embeddings below which a correct response is a near-duplicate of another one.
NEAR_DUPLICATE_DISTANCE = 0.2
_RESAMPLES = 1000
_CONFIDENCE = 0.95
# Its quantile of the normal distribution.
_QUANTILE = 1.959964
# Shares, whose values can be nothing but 0 or 1 where there is one answer to a prompt and no partial credit.
_SHARE = re.compile(rf"(sampled_)?(accuracy(_of_.*)?|pass_at_.*|unfinished|failed|stopped_.*|reward_part_{CORRECT})")
_CUT_OFF = (STOP_LENGTH, *CUT_OFF)

# The embeddings [n, E] of some texts.
Embed = Callable[[Sequence[str]], Floats]


@dataclass(slots=True)
class Measured:
    """Metrics by name, 95 % intervals of those that are means over prompts, and why what has no score is `missing`."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def not_measured(self) -> str:
        """Why metrics are missing, "" if none are."""
        return "; ".join(self.missing.values())[:MAX_NOT_MEASURED]

    def has_scores(self, what: str, errors: Sequence[str | None]) -> bool:
        """Whether enough of `what` has a score for a mean to be a measurement; `errors` has None for each that has."""
        if reason := why_not_measured(errors, what):
            self.missing[what] = reason
        return not reason

    def add(self, name: str, sums: Sequence[float], counts: Sequence[float] | None = None) -> None:
        """Add the mean sum(sums) / sum(counts) over prompts, which have one value each. Without a count: nothing."""
        sums_N = np.asarray(sums, np.float64)
        counts_N = np.ones(len(sums_N)) if counts is None else np.asarray(counts, np.float64)
        if counts_N.sum() > 0:
            self.metrics[name] = float(sums_N.sum() / counts_N.sum())
            # Each prompt is right or wrong, or does not count. A reward may be 0 everywhere, and is no share.
            is_share = np.isin(counts_N, (0, 1)).all() and ((sums_N == 0) | ((sums_N == 1) & (counts_N == 1))).all()
            if is_share and _SHARE.fullmatch(name):
                self.intervals[name] = wilson(float(sums_N.sum()), float(counts_N.sum()))
            else:
                self.intervals[name] = bootstrap(sums_N, counts_N, seed=self.seed)

    def exponentiate(self, source: str, name: str) -> None:
        """Add exp of a metric, if it is there and its exp is finite."""
        if source in self.metrics and self.metrics[source] < math.log(1e300):
            low, high = self.intervals[source]
            self.metrics[name] = math.exp(self.metrics[source])
            self.intervals[name] = math.exp(low), math.exp(min(high, math.log(1e300)))


def measure_greedy(measured: Measured, answers: Sequence[Trajectory], tasks: Sequence[str] = ()) -> None:
    """Add the metrics of the greedy answers, one per prompt. `tasks` are the tasks of a mixture that they belong to."""
    groups = [[answer] for answer in answers]
    graded = _graded(groups, tasks)
    if _measure_rewards(measured, groups, graded, ""):
        measured.add("accuracy", [_correct(answer) for answer in answers], graded)
    for task in sorted(set(tasks)):
        own = [answer for answer, name in zip(answers, tasks, strict=True) if name == task]
        if not measured.has_scores(f"responses of {task}", _errors([own], [_has_correct(own)])[0]):
            continue
        measured.add(f"reward_of_{task}", [answer.reward for answer in own])
        if _has_correct(own):
            measured.add(f"accuracy_of_{task}", [_correct(answer) for answer in own])


def measure_sampled(measured: Measured, groups: Sequence[Sequence[Trajectory]], tasks: Sequence[str] = ()) -> None:
    """Add the metrics of the sampled answers, n per prompt. `tasks` are the tasks of a mixture, one per prompt."""
    graded = _graded(groups, tasks)
    has_scores = _measure_rewards(measured, groups, graded, "sampled_")
    # A part between 0 and 1 counts as correct at 1. Without the part there is no correct answer, and no count.
    right = [sum(_correct(answer) >= 1 for answer in group) for group in groups]
    for k in (k for k in _PASS_AT if has_scores and k <= len(groups[0])):
        estimates = [pass_at_k(len(group), c, k) for group, c in zip(groups, right, strict=True)]
        measured.add(f"pass_at_{k}", estimates, graded)
    if len(groups[0]) > 1:
        found = [len({answer.text for answer in group if _correct(answer) >= 1}) for group in groups]
        if has_scores:
            measured.add("distinct_correct", found, graded)
        for n in _GRAMS:
            _add_known(measured, f"distinct_{n}", [distinct([_sampled(a).tolist() for a in g], n) for g in groups])


def measure_divergence(
    measured: Measured, groups: Sequence[Sequence[Trajectory]], references: Sequence[Sequence[float | None]]
) -> None:
    """Add the KL divergence from the reference, estimated as the mean of log mu - log pi_ref over the samples.

    `references` has the log-probability of each answer under the reference, None where there is none.
    """
    flat = [r for found in references for r in found]
    if not measured.has_scores(
        "sampled responses (reference)", [None if r is not None else "no tokens, or not finite" for r in flat]
    ):
        return
    ratios, logprobs, tokens, counts, prompts = [], [], [], [], []
    for group, found in zip(groups, references, strict=True):
        pairs = [(a, r) for a, r in zip(group, found, strict=True) if r is not None and np.isfinite(a.logprobs).all()]
        ratios.append(sum(float(a.logprobs.sum(dtype=np.float64)) - r for a, r in pairs))
        logprobs.append(-sum(r for _, r in pairs))
        tokens.append(sum(len(_sampled(a)) for a, _ in pairs))
        counts.append(len(pairs))
        prompts.append(sum(len(a.prompt_ids) for a, _ in pairs))
    measured.add("kl", ratios, counts)
    measured.add("kl_per_token", ratios, tokens)
    measured.add("reference_nll", logprobs, tokens)
    measured.exponentiate("reference_nll", "reference_perplexity")
    # The paper's perplexity: log-probabilities of responses, divided by the tokens of prompts and responses.
    measured.add("diluted_nll", logprobs, [one + other for one, other in zip(tokens, prompts, strict=True)])
    measured.exponentiate("diluted_nll", "diluted_perplexity")


def measure_diversity(
    measured: Measured,
    groups: Sequence[Sequence[Trajectory]],
    embed: Embed,
    *,
    tasks: Sequence[str] = (),
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Add the metrics of the embeddings of the sampled answers, without empty ones; nothing if `go_on` is False.

    Of correct answers closer than NEAR_DUPLICATE_DISTANCE one counts. `tasks` as in `measure_sampled`.
    """
    distances: list[float | None] = []
    found: list[int] = []
    for group in groups:
        if not go_on():
            return
        answers = [answer for answer in group if (answer.text or "").strip()]
        embeddings_nE = embed([answer.text or "" for answer in answers]) if answers else np.zeros((0, 1))
        distances.append(cosine_distance(embeddings_nE))
        right: dict[str, int] = {}
        for number, answer in enumerate(answers):
            if _correct(answer) >= 1:
                right.setdefault(answer.text or "", number)
        found.append(len(without_near_duplicates(embeddings_nE[list(right.values())], NEAR_DUPLICATE_DISTANCE)))
    _add_known(measured, "embedding_distance", distances)
    graded = _graded(groups, tasks)
    if len(groups[0]) > 1 and measured.has_scores("sampled responses", list(chain(*_errors(groups, graded)))):
        measured.add("distinct_correct_by_embedding", found, graded)


def _measure_rewards(
    measured: Measured, groups: Sequence[Sequence[Trajectory]], graded: Sequence[bool], prefix: str
) -> bool:
    """Add the means over answers. Returns False, without those of rewards, if too many have none."""
    size, errors = [len(group) for group in groups], _errors(groups, graded)
    measured.add(f"{prefix}response_tokens", [sum(len(_sampled(a)) for a in group) for group in groups], size)
    measured.add(f"{prefix}unfinished", [sum(a.stop_reason in _CUT_OFF for a in group) for group in groups], size)
    measured.add(f"{prefix}failed", [sum(error is not None for error in group) for group in errors], size)
    _measure_episodes(measured, groups, prefix)
    if not measured.has_scores("sampled responses" if prefix else "responses", list(chain(*errors))):
        return False
    measured.add(f"{prefix}reward", [sum(a.reward for a in group) for group in groups], size)
    for part in sorted({part for group in groups for answer in group for part in answer.reward_parts}):
        have = [[value for a in group if (value := _part(a, part)) is not None] for group in groups]
        measured.add(f"{prefix}reward_part_{part}", [sum(h) for h in have], [len(h) for h in have])
    return True


def _measure_episodes(measured: Measured, groups: Sequence[Sequence[Trajectory]], prefix: str) -> None:
    """Add the mean number of turns, and the share of each reason why an episode ended, over all episodes."""
    # One that failed before its first turn has no turns.
    single = STOP_EOS, STOP_LENGTH, STOP_ERROR
    episodes = [[answer for answer in group if answer.turns or answer.stop_reason not in single] for group in groups]
    if not any(episodes):
        return
    counts = [len(group) for group in episodes]
    measured.add(f"{prefix}turns", [sum(len(one.turns) for one in group) for group in episodes], counts)
    for reason in sorted({one.stop_reason for group in episodes for one in group}):
        ended = [sum(one.stop_reason == reason for one in group) for group in episodes]
        measured.add(f"{prefix}stopped_{reason}", ended, counts)


def _errors(groups: Sequence[Sequence[Trajectory]], graded: Sequence[bool]) -> list[list[str | None]]:
    """Return why each answer has no score, or lacks the part that others of its task have; None if it has."""
    lacks = f"the reward has no part `{CORRECT}`"
    return [
        # The parts of an episode are sums over its turns, in which one that is not given is 0.
        [a.error or (lacks if demanded and CORRECT not in a.reward_parts and not a.turns else None) for a in group]
        for group, demanded in zip(groups, graded, strict=True)
    ]


def _add_known(measured: Measured, name: str, values: Sequence[float | None]) -> None:
    measured.add(name, [value or 0.0 for value in values], [value is not None for value in values])


def _graded(groups: Sequence[Sequence[Trajectory]], tasks: Sequence[str]) -> list[bool]:
    """Return for each prompt whether its task says what is correct."""
    names = tasks or [""] * len(groups)
    by_task: dict[str, list[Trajectory]] = {name: [] for name in names}
    for group, name in zip(groups, names, strict=True):
        by_task[name] += group
    graded = {name: _has_correct(answers) for name, answers in by_task.items()}
    return [graded[name] for name in names]


def _has_correct(answers: Sequence[Trajectory]) -> bool:
    """Whether the task says what is correct, or every answer failed, so that it is unknown."""
    return any(CORRECT in a.reward_parts for a in answers) or all(a.error is not None for a in answers)


def _part(answer: Trajectory, name: str) -> float | None:
    """Return a part of the reward. Those of an episode are sums over its turns, in which one that is not given is 0."""
    is_sum = answer.turns and answer.error is None
    return answer.reward_parts.get(name, 0.0 if is_sum else None)


def _sampled(answer: Trajectory) -> Int32:
    return answer.response_ids[answer.loss_mask != 0] if len(answer.loss_mask) else answer.response_ids


def _correct(answer: Trajectory) -> float:
    return answer.reward_parts.get(CORRECT, 0.0)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) with n `samples`, of which c are `correct`.

    It is the probability that k samples drawn without replacement include a correct one. Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", Eq. 1. It is defined for 1 <= k <= n and 0 <= c <= n.
    """
    # Exact integers, so that no product of many factors is rounded.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson(successes: float, count: float) -> Interval:
    """Return the 95 % interval of a share of `count` prompts (Wilson 1927), which has a width also at 0 and at 1."""
    weight = _QUANTILE**2
    centre = successes + weight / 2
    half = _QUANTILE * math.sqrt(successes * (count - successes) / count + weight / 4)
    # Rounding would miss 0 and 1.
    low = (centre - half) / (count + weight) if successes else 0.0
    return low, (centre + half) / (count + weight) if successes < count else 1.0


def bootstrap(values_N: Floats, weights_N: Floats, *, seed: int) -> Interval:
    """Return the 95 % percentile interval of sum(values) / sum(weights) over prompts, such as nats per token.

    It is from 1,000 seeded resamples of whole prompts (Efron 1979). One prompt has no spread: both ends are its value.
    """
    count = len(values_N)
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
    """Return distinct-n (Li et al. 2016): different n-grams of tokens, divided by all. None without an n-gram."""
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
