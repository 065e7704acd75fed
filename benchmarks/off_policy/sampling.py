"""Responses of a policy with their log-probabilities, and what they measure: reward, greedy accuracy and pass@8.

Shape suffixes: N rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.off_policy.tasks import Problem, Task
from tba.common.wire.trajectory import encode_kept
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.engines.kv_cache import cache_argument
from tba.searcher.engines.transformers_engine import sample
from tba.trainer.batch.batch import Row, TrainBatch

PASS_AT = 8


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its reward. `logprobs` are those with which its tokens were sampled, by the weights of `step`
    or, `explored`, by an explorer. `kept` are the tokens that top-p left to sample from, as in a row of the buffer."""

    problem: Problem
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    reward: float
    step: int
    explored: bool = False
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


def respond(
    policy: PreTrainedModel,
    task: Task,
    problems: Sequence[Problem],
    generator: torch.Generator | None,
    step: int,
    top_p: float = 1.0,
) -> list[Response]:
    """Return one response to each problem, sampled at temperature 1, or greedy without a generator."""
    prompts = torch.tensor([problem.prompt for problem in problems])
    tokens_NT, logprobs_NT, left = _generate(policy, prompts, task, generator, top_p)
    responses = []
    for number, (problem, row, logprobs) in enumerate(
        zip(problems, tokens_NT.tolist(), logprobs_NT.numpy(), strict=True)
    ):
        tokens = tuple(row[: row.index(task.end) + 1] if task.end in row else row)
        kept = encode_kept(tokens, [ids[number] for ids in left[: len(tokens)]]) if left else np.zeros(0, np.int32)
        reward = task.reward(problem, tokens)
        responses.append(Response(problem, tokens, logprobs[: len(tokens)], reward, step, False, kept))
    return responses


@torch.no_grad()
def _generate(
    policy: PreTrainedModel, prompt_NT: Tensor, task: Task, generator: torch.Generator | None, top_p: float
) -> tuple[Tensor, Tensor, list[dict[int, np.ndarray]]]:
    """Return tokens, log-probabilities, and for each token what top-p left of each row, until every row has ended.

    All prompts have the same length.
    """
    # Filled by each pass.
    cache, fed_NT = {cache_argument(policy): DynamicCache()}, prompt_NT
    ended_N = torch.zeros(len(prompt_NT), dtype=torch.bool)
    tokens, logprobs, left = [], [], list[dict[int, np.ndarray]]()
    settings = [SamplingSettings(1.0, top_p, 1)] * len(prompt_NT)
    for _ in range(task.longest):
        output = policy(input_ids=fed_NT, use_cache=True, logits_to_keep=1, **cache)
        logprob_NV = output.logits[:, -1].log_softmax(dim=1)
        if top_p < 1 and generator is not None:
            uniform_N = torch.rand(len(prompt_NT), generator=generator, dtype=torch.float64)
            drawn = sample(output.logits[:, -1], settings, uniform_N)
            fed_NT, logprob_N1 = drawn.tokens_B[:, None], drawn.logprobs_B[:, None].float()
            left.append(drawn.kept)
        elif generator is None:
            fed_NT = logprob_NV.argmax(dim=1, keepdim=True)
        else:
            fed_NT = torch.multinomial(logprob_NV.exp(), 1, generator=generator)
        tokens.append(fed_NT)
        logprobs.append(logprob_N1 if left else logprob_NV.gather(1, fed_NT))
        ended_N |= fed_NT[:, 0] == task.end
        if ended_N.all():
            break
    return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1), left


def as_batch(groups: Sequence[Sequence[Response]], step: int) -> TrainBatch:
    """Return the groups as the trainer's batch. Reference log-probabilities are left to the learner."""
    shape = (len(groups), len(groups[0]))
    responses = [response for group in groups for response in group]
    rows = [
        Row(
            id=step * len(responses) + number,
            prompt_ids=np.array(response.problem.prompt, np.int32),
            response_ids=np.array(response.tokens, np.int32),
            sampling_logprobs=response.logprobs.astype(np.float32),
            loss_mask=np.ones(len(response.tokens), np.uint8),
            on_policy=response.step == step and not response.explored,
            explored=response.explored,
            kept=response.kept,
        )
        for number, response in enumerate(responses)
    ]
    return TrainBatch(
        step=step,
        rows=rows,
        reward_BK=torch.tensor([response.reward for response in responses], dtype=torch.float64).view(shape),
        reference_BK=torch.full(shape, torch.nan, dtype=torch.float64),
        staleness_BK=torch.tensor([step - response.step for response in responses], dtype=torch.float64).view(shape),
    )


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
