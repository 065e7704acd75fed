"""Measures a policy on held-out problems: expected reward at temperature 1, greedy accuracy and pass@8."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.off_policy.sampling import respond
from benchmarks.off_policy.tasks import Problem, Task

PASS_AT = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """`reward` is the expected reward at temperature 1, `greedy` the mean reward without sampling, `pass_at_8` the
    probability that one of 8 samples is right in full."""

    reward: float
    greedy: float
    pass_at_8: float


def measure(policy: PreTrainedModel, task: Task, problems: Sequence[Problem]) -> Measurement:
    """Measure a policy. Without graded rewards everything follows from probabilities, so there is no sampling noise."""
    return _from_samples(policy, task, problems) if task.graded else _exact(policy, problems)


@torch.no_grad()
def _exact(policy: PreTrainedModel, problems: Sequence[Problem]) -> Measurement:
    """Measure with one forward pass over the right answers.

    Their probability is the expected reward, and pass@8 of a problem is 1 - (1 - p)^8. Greedy decoding gives the
    answer if and only if each of its tokens is the most likely one after those before it.
    """
    longest = max(len(problem.answer) for problem in problems)
    start = len(problems[0].prompt)
    rows = [(*problem.prompt, *problem.answer, *[0] * (longest - len(problem.answer))) for problem in problems]
    tokens_NT = torch.tensor(rows)
    logprob_NTV = policy(input_ids=tokens_NT[:, :-1]).logits[:, start - 1 :].double().log_softmax(dim=2)
    answer_NT = tokens_NT[:, start:]
    counted_NT = torch.arange(longest) < torch.tensor([[len(problem.answer)] for problem in problems])
    found_NT = logprob_NTV.gather(2, answer_NT[:, :, None])[:, :, 0]
    right_N = torch.where(counted_NT, found_NT, 0.0).sum(dim=1).exp()
    greedy_N = ((logprob_NTV.argmax(dim=2) == answer_NT) | ~counted_NT).all(dim=1)
    return Measurement(
        reward=float(right_N.mean()),
        greedy=float(greedy_N.double().mean()),
        pass_at_8=float((1 - (1 - right_N) ** PASS_AT).mean()),
    )


def _from_samples(policy: PreTrainedModel, task: Task, problems: Sequence[Problem]) -> Measurement:
    """Measure with 8 samples of each problem and one greedy response. The same seed is used in every measurement."""
    generator = torch.Generator().manual_seed(0)
    repeated = [problem for problem in problems for _ in range(PASS_AT)]
    sampled = np.array([response.reward for response in respond(policy, task, repeated, generator, 0)])
    greedy = [response.reward for response in respond(policy, task, problems, None, 0)]
    return Measurement(
        reward=float(sampled.mean()),
        greedy=float(np.mean(greedy)),
        # With n = k the unbiased estimate 1 - C(n - c, k) / C(n, k) is whether any sample is right.
        pass_at_8=float((sampled.reshape(-1, PASS_AT).max(axis=1) == 1.0).mean()),
    )
