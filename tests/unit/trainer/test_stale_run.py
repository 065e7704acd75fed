"""Warnings on real steps of the arithmetic example: `tb` on data that is up to 64 steps old loses the run.

All data of the first 64 steps is of the initial policy, so this is the beginning of the run with staleness 64 in
benchmarks/off_policy.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tba.common.config import ObjectiveSection, TrainSection
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.trainer import learner_of, make_batch, make_row
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.metrics.health import Health
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs
from tba.trainer.objectives.from_config import make_objective

STEPS, PROMPTS, SAMPLES, LONGEST, BETA = 32, 8, 8, 5, 0.1
CPU = torch.device("cpu")


class Run:
    """A run of an objective on the example; `reward` is the expected reward on held-out problems."""

    def __init__(self, model: Path, name: str) -> None:
        self.objective = ObjectiveSection.model_validate({"name": name})
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._policy = load_model(model, CPU)
        train = TrainSection(
            steps=128, learning_rate=1e-4, schedule="constant", warmup_steps=5, beta=BETA, beta_final=BETA
        )
        objective = make_objective(self.objective, longest_response=LONGEST)
        self.learner = learner_of(self._policy, load_model(model, CPU), train, objective)
        self._choice = np.random.default_rng(1)
        self._generator = torch.Generator().manual_seed(1)
        self._problems = ArithmeticTask().prompts()
        self._scorer = Scorer(self._policy)
        held_out = ArithmeticTask().held_out()[::4]
        self._exam = [
            make_row(n, self._tokenizer.encode(problem.text), self._answer(problem))
            for n, problem in enumerate(held_out)
        ]

    def batches(self, steps: Sequence[int]) -> list[TrainBatch]:
        """Sample the batches of some steps from the current policy, at temperature 1."""
        problems = [self._problems[n] for _ in steps for n in self._choice.choice(len(self._problems), PROMPTS, False)]
        rows, rewards = self._sample([problem for problem in problems for _ in range(SAMPLES)])
        size = PROMPTS * SAMPLES
        return [
            make_batch(rows[at : at + size], np.reshape(rewards[at : at + size], (PROMPTS, SAMPLES)), step=step)
            for step, at in zip(steps, range(0, len(rows), size), strict=True)
        ]

    @torch.no_grad()
    def _sample(self, problems: Sequence[Prompt]):
        tokens_NT = torch.tensor([self._tokenizer.encode(problem.text) for problem in problems])
        first, logprobs = tokens_NT.shape[1], []
        for _ in range(LONGEST):
            logprob_NV = (
                self._policy(input_ids=tokens_NT, use_cache=False, logits_to_keep=1).logits[:, -1].log_softmax(1)
            )
            chosen = torch.multinomial(logprob_NV.exp(), 1, generator=self._generator)
            tokens_NT = torch.cat([tokens_NT, chosen], dim=1)
            logprobs.append(logprob_NV.gather(1, chosen))
        logprob_NT = torch.cat(logprobs, dim=1).numpy()
        rows, rewards = [], []
        for n, (problem, tokens) in enumerate(zip(problems, tokens_NT.tolist(), strict=True)):
            response = self._until_end(tokens[first:])
            rewards.append(float(response == self._answer(problem)))
            sampled = logprob_NT[n, : len(response)]
            rows.append(make_row(n, tokens[:first], response, sampling_logprobs=sampled))
        return rows, rewards

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens

    def _answer(self, problem: Prompt) -> list[int]:
        return [*self._tokenizer.encode(problem.answer), self._tokenizer.eos_token_id]

    @torch.no_grad()
    def reward(self) -> float:
        logprob_R = self._scorer.score(self._exam).logprob_R
        return float(sequence_logprobs(logprob_R, self._exam).exp().mean())


def warnings(run: Run, batches: Iterator[TrainBatch]) -> Iterator[str]:
    """Yield the warning after each step."""
    health = Health(run.objective)
    for batch in batches:
        metrics = run.learner.step(batch).metrics
        health.update(batch.step, metrics, float(batch.reward_BK.max()))
        yield health.warning


@pytest.mark.slow
def test_the_warning_comes_before_the_reward_is_lost(example_model):
    run = Run(example_model, "tb")
    start, at_warning = run.reward(), None
    for warning in warnings(run, iter(run.batches(range(STEPS)))):
        if warning and at_warning is None:
            at_warning = run.reward()
            assert warning.endswith(
                'responses that were never sampled: lower train.learning_rate, or set objective.name = "tb_stale"'
            )
    assert at_warning is not None
    assert run.reward() < start - 0.08 < at_warning


@pytest.mark.slow
def test_fresh_data_gives_no_warning(example_model):
    run = Run(example_model, "tb")
    fresh = (run.batches([step])[0] for step in range(STEPS))
    assert set(warnings(run, fresh)) == {""}


@pytest.mark.slow
def test_the_objective_for_stale_data_learns_where_tb_loses_the_run(example_model):
    run = Run(example_model, "tb_stale")
    start = run.reward()
    for batch in run.batches(range(STEPS)):
        run.learner.step(batch)
    assert run.reward() > start + 0.05
