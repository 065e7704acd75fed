"""Warnings before a run is lost, by metrics and on real steps of the arithmetic example."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import tba
from tba.common.config import ObjectiveSection, TrainSection
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.trainer import learner_of, make_batch, make_row, objective
from tba.trainer.batch.batch import TrainBatch
from tba.trainer.metrics.health import Health, limits
from tba.trainer.model.scorer import Scorer, load_model, sequence_logprobs


def watch(name: str = "tb", **keys) -> Health:
    return Health(ObjectiveSection.model_validate({"name": name, **keys}))


def after(health: Health, steps: range, *, largest_reward: float = 1.0, **metrics: float) -> str:
    """Return the warning after steps with these metrics."""
    fields = {"log_ratio_positive": 0.0, "log_z": 5.0, "beta": 0.1, "response_tokens_mean": 5.0} | metrics
    for step in steps:
        health.update(step, fields, largest_reward)
    return health.warning


def test_good_answers_that_have_lost_probability_are_reported_with_the_remedy(caplog):
    warning = after(watch("dr_grpo"), range(5), log_ratio_positive=-1.2)
    assert warning == (
        "stale responses with a reward above the mean of their prompt have lost 1.2 nats: lower train.learning_rate, "
        "or set objective.imitation = 1"
    )
    assert caplog.text.count(warning) == 1


def test_probability_that_moves_to_answers_that_were_never_sampled_is_reported():
    assert after(watch(), range(5), sampled_mass=0.95, policy_mass=0.85) == ""
    assert after(watch(), range(5), sampled_mass=0.95, policy_mass=0.76) == (
        "20% of the probability of stale responses has moved to responses that were never sampled: lower "
        'train.learning_rate, or set objective.name = "tb_stale"'
    )


def test_where_sampled_answers_are_a_small_part_of_all_their_share_says_nothing():
    assert after(watch(), range(9), sampled_mass=0.4, policy_mass=0.01) == ""


@pytest.mark.parametrize("health", [watch("tb_stale"), watch("dr_grpo", imitation=0.5), watch("grpo")])
def test_imitation_is_not_advised_where_it_is_on_or_impossible(health):
    assert after(health, range(5), log_ratio_positive=-2.0).endswith(
        ": lower train.learning_rate or buffer.max_staleness"
    )


def test_a_log_z_above_its_bound_is_reported():
    assert after(watch(), range(9), log_z=10.4) == ""
    assert after(watch(), range(9), log_z=13.2).startswith("the mean log Z of 13.2 is above its bound of 10.0, the l")


def test_the_bound_is_that_of_the_largest_reward_so_far():
    health = watch()
    after(health, range(5), log_z=-5.0, largest_reward=1.0)
    assert after(health, range(5, 40), log_z=9.0, largest_reward=0.0) == ""
    assert "bound of 0.0" in after(watch(), range(5), log_z=9.0, largest_reward=0.0)


def test_the_bound_of_log_z_does_not_hold_for_data_of_another_temperature():
    """Of fresh data the estimate is KL(pi_T || pi) - KL(pi_T || ref) + mean r / beta."""
    health = watch()
    for step in range(9):
        fields = {"log_z": 13.2, "beta": 0.1, "response_tokens_mean": 5.0}
        health.update(step, fields, 1.0, at_temperature_1=False)
    assert health.warning == ""


def test_one_batch_and_the_first_steps_give_no_warning():
    assert after(watch(), range(4), log_ratio_positive=-9.0) == ""
    health = watch()
    after(health, range(20), log_ratio_positive=0.2)
    assert after(health, range(20, 21), log_ratio_positive=-9.0) == ""


@pytest.mark.parametrize(("tokens", "warns"), [(200, True), (1000, False)])
def test_long_responses_may_lose_more_by_rounding(tokens, warns):
    assert bool(after(watch(), range(9), log_ratio_positive=-3.0, response_tokens_mean=tokens)) == warns


def test_a_warning_ends_with_its_cause_and_is_logged_again_after_a_hundred_steps(caplog):
    health = watch()
    after(health, range(150), log_ratio_positive=-2.0)
    assert caplog.text.count("have lost 2.0 nats") == 2
    assert after(health, range(150, 180)) == ""
    assert after(health, range(180, 190), log_ratio_positive=-9.0) != ""
    assert caplog.text.count("have lost") == 2


def test_a_skipped_step_and_a_run_without_reference_give_no_warning():
    health = watch()
    health.update(0, {"skipped": 1.0}, float("inf"))
    assert after(health, range(1, 9)) == ""
    health.update(9, {"log_ratio_positive": 0.0, "response_tokens_mean": 5.0}, 1.0)
    assert health.warning == ""


DOCUMENT = (Path(tba.__file__).parent / "docs/metrics.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"(?:above|below|at least|more than) (?:about )?[−-]?(\d[\d.e-]*\d|\d)")


def documented_limits():
    """By metric, the numbers that the column "when to worry" names."""
    rows = [
        line.strip("| ").split(" | ") for line in DOCUMENT.split("## Warnings")[0].splitlines() if line[:3] == "| `"
    ]
    found: dict[str, list[float]] = {}
    for row in rows:
        first, *others = re.findall(r"`(\w+)`", row[0])
        # `_max` after `x_mean` is `x_max`.
        names = [first, *(first.rpartition("_")[0] + one if one[0] == "_" else one for one in others)]
        found |= {name: [float(one) for one in NUMBER.findall(row[-1])] for name in names}
    return found


def test_every_limit_that_the_page_of_metrics_names_has_its_rule():
    exact, rounded = limits("float32"), limits("bfloat16")
    rules = {name: sorted({one[name][0] for one in (exact, rounded) if name in one}) for name in exact}
    assert not re.search(r"\| as `\w+` \|", DOCUMENT.replace("as `log_ratio_std` |", "")), "a limit by reference"
    assert {name: numbers for name, numbers in documented_limits().items() if numbers} == rules
    signs = re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("## Warnings")[1].split("## ")[0], re.M)
    assert set(signs) == {"policy_mass", "log_ratio_positive", "log_z"}


@pytest.mark.parametrize("name", limits("float32"))
def test_a_metric_above_its_limit_is_reported_with_its_own_remedy(name, caplog):
    limit, steps, _ = limits("float32")[name]
    assert after(watch(), range(9), **{name: 0.9 * limit}) == ""
    warning = after(watch(), range(steps), **{name: 3 * limit})
    assert f"above {limit:g}" in warning or f"above {limit:.0%}" in warning
    assert caplog.text.count(warning) == 1


def test_in_bfloat16_engine_and_trainer_may_differ_by_more():
    health = Health(ObjectiveSection(), "bfloat16")
    assert after(health, range(1), mismatch_mean=0.04) == ""
    assert after(health, range(1, 9), mismatch_mean=0.2).startswith("engine and trainer differ by 0.1")


def test_one_token_that_differs_is_reported_although_the_mean_is_healthy():
    """One of 4,000 tokens with another position: 1.6 nats are 4e-4 in the mean."""
    assert after(watch(), range(1), mismatch_mean=1.6 / 4000, mismatch_max=1.6).startswith(
        "engine and trainer differ by 1.6 nats at one token"
    )
    assert after(Health(ObjectiveSection(), "bfloat16"), range(9), mismatch_mean=0.02, mismatch_max=3.0) == ""


def test_responses_of_1_5_nats_of_mismatch_are_reported_at_the_first_step_with_another_sign():
    warning = after(watch("dr_grpo"), range(5), log_ratio_positive=-1.2, mismatch_mean=1.5)
    assert "have lost 1.2 nats" in warning
    assert "; engine and trainer differ by 1.5 nats per token" in warning


# All data of the first 64 steps is of the initial policy, so this is the beginning of the run with staleness 64 in
# benchmarks/off_policy.py.
STEPS, PROMPTS, SAMPLES, LONGEST, BETA = 32, 8, 8, 5, 0.1
CPU = torch.device("cpu")


class Run:
    """A run of `tb` on the example; `reward` is the expected reward on held-out problems."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._policy = load_model(model, CPU)
        train = TrainSection(
            steps=128, learning_rate=1e-4, schedule="constant", warmup_steps=5, beta=BETA, beta_final=BETA
        )
        self.learner = learner_of(self._policy, load_model(model, CPU), train, objective())
        self._choice = np.random.default_rng(1)
        self._generator = torch.Generator().manual_seed(1)
        self._problems = ArithmeticTask().prompts()
        self._scorer = Scorer(self._policy)
        held_out = ArithmeticTask().held_out()[::4]
        self._exam = [
            make_row(n, self._tokenizer.encode(problem.text), self._answer(problem))
            for n, problem in enumerate(held_out)
        ]

    def batches(self) -> list[TrainBatch]:
        """Sample the batches of all steps from the current policy, at temperature 1."""
        drawn = [self._choice.choice(len(self._problems), PROMPTS, False) for _ in range(STEPS)]
        problems = [self._problems[n] for numbers in drawn for n in numbers]
        rows, rewards = self._sample([problem for problem in problems for _ in range(SAMPLES)])
        size = PROMPTS * SAMPLES
        return [
            make_batch(rows[at : at + size], np.reshape(rewards[at : at + size], (PROMPTS, SAMPLES)), step=step)
            for step, at in zip(range(STEPS), range(0, len(rows), size), strict=True)
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


@pytest.mark.slow
def test_the_warning_comes_before_the_reward_is_lost(example_model):
    run, health = Run(example_model), watch()
    start, at_warning = run.reward(), None
    for batch in run.batches():
        health.update(batch.step, run.learner.step(batch).metrics, float(batch.reward_BK.max()))
        if health.warning and at_warning is None:
            at_warning = run.reward()
            assert health.warning.endswith(
                'responses that were never sampled: lower train.learning_rate, or set objective.name = "tb_stale"'
            )
    assert at_warning is not None
    assert run.reward() < start - 0.08 < at_warning
