"""Responses of a policy at temperature 1 or greedy, with their log-probabilities.

Shape suffixes: N rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.off_policy.tasks import Problem, Task
from tba.searcher.engines.kv_cache import cache_argument


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its reward. `logprobs` are those with which its tokens were sampled."""

    problem: Problem
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    reward: float
    step: int


def respond(
    policy: PreTrainedModel, task: Task, problems: Sequence[Problem], generator: torch.Generator | None, step: int
) -> list[Response]:
    """Return one response to each problem, sampled at temperature 1, or greedy without a generator."""
    prompts = torch.tensor([problem.prompt for problem in problems])
    tokens_NT, logprobs_NT = _generate(policy, prompts, task, generator)
    responses = []
    for problem, row, logprobs in zip(problems, tokens_NT.tolist(), logprobs_NT.numpy(), strict=True):
        tokens = tuple(row[: row.index(task.end) + 1] if task.end in row else row)
        responses.append(Response(problem, tokens, logprobs[: len(tokens)], task.reward(problem, tokens), step))
    return responses


@torch.no_grad()
def _generate(
    policy: PreTrainedModel, prompt_NT: Tensor, task: Task, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probabilities until every row has ended. All prompts have the same length."""
    # Filled by each pass.
    cache, fed_NT = {cache_argument(policy): DynamicCache()}, prompt_NT
    ended_N = torch.zeros(len(prompt_NT), dtype=torch.bool)
    tokens, logprobs = [], []
    for _ in range(task.longest):
        output = policy(input_ids=fed_NT, use_cache=True, logits_to_keep=1, **cache)
        logprob_NV = output.logits[:, -1].log_softmax(dim=1)
        if generator is None:
            fed_NT = logprob_NV.argmax(dim=1, keepdim=True)
        else:
            fed_NT = torch.multinomial(logprob_NV.exp(), 1, generator=generator)
        tokens.append(fed_NT)
        logprobs.append(logprob_NV.gather(1, fed_NT))
        ended_N |= fed_NT[:, 0] == task.end
        if ended_N.all():
            break
    return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)
