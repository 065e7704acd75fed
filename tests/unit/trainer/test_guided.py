"""Guided responses: they begin with tokens of a demonstration, which are no part of the loss or of log Z."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tba.buffer.service.curriculum import Curriculum
from tba.common.config import Config, CurriculumSection, SearchSection
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError, TaskError
from tba.common.rendering import PromptRenderer
from tba.common.wire.fields import NO_POLICY
from tba.common.wire.messages import Visit
from tba.searcher.build import LoadedTask, check_loaded
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.task import Prompt, Reward, fingerprint
from tba.tests.helpers.chat_tokenizers import chat_tokenizer
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.index import entries_of
from tba.tests.helpers.puts import make_trajectory
from tba.tests.helpers.trainer import make_learner, objective, save_tiny_model
from tba.tests.unit.trainer.test_objectives import by_hand
from tba.trainer.batch.batch import decode
from tba.trainer.objectives.responses import Responses

# A world whose responses can be enumerated, and a policy that is a row of logits for each prefix.
TOKENS, LENGTH, BETA = 3, 3, 0.3
RESPONSES = list(itertools.product(range(TOKENS), repeat=LENGTH))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(TOKENS), repeat=length)]
PLACES = torch.tensor([[PREFIXES.index(one[:length]) for length in range(LENGTH)] for one in RESPONSES])
# The prefixes of guided groups, of one and of two tokens.
GIVEN = PREFIXES[1:]
RNG = np.random.default_rng(0)
START = torch.from_numpy(RNG.normal(0, 1, (len(PREFIXES), TOKENS))).log_softmax(1)
REWARD = torch.from_numpy(RNG.random(len(RESPONSES)))


def logprobs(table: Tensor, first: int = 0) -> Tensor:
    """Return log pi of each response from its token `first` on: [Y]."""
    return table.log_softmax(1)[PLACES, torch.tensor(RESPONSES)][:, first:].sum(1)


def posterior() -> np.ndarray:
    """Return pi* of the whole responses by enumeration: [Y]."""
    weights = np.exp(logprobs(START).numpy() + REWARD.numpy() / BETA)
    return weights / weights.sum()


def optimum() -> Tensor:
    """Return pi* as a table, by summing the posterior below each prefix."""
    mass = {
        prefix: sum(p for p, one in zip(posterior(), RESPONSES, strict=True) if one[: len(prefix)] == prefix)
        for prefix in [*PREFIXES, *RESPONSES]
    }
    return torch.tensor([[math.log(mass[*prefix, token] / mass[prefix]) for token in range(TOKENS)]
                         for prefix in PREFIXES], dtype=torch.float64)  # fmt: skip


def group(prefix: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return each response that begins with a prefix, as (index, tokens that were given)."""
    return [(n, len(prefix)) for n, one in enumerate(RESPONSES) if one[: len(prefix)] == prefix]


def responses_of(table: Tensor, rows: list[tuple[int, int]]) -> Responses:
    """Return one group as the trainer makes it of rows with a mask."""
    chosen, given = torch.tensor(rows).unbind(1)
    mask = torch.arange(LENGTH) >= given[:, None]
    reference = torch.stack([logprobs(START, first)[n] for n, first in rows])
    logprob_R = table.log_softmax(1)[PLACES[chosen], torch.tensor(RESPONSES)[chosen]].flatten()
    fields = {"mask_R": mask.flatten(), "reference_bK": reference[None]}
    return by_hand([LENGTH] * len(rows), logprob_R, torch.zeros(mask.numel()), REWARD[chosen], **fields)


def loss_at(table: Tensor, rows: list[tuple[int, int]], name: str = "tb") -> float:
    return float(objective(name).loss(responses_of(table, rows), BETA))


def test_at_the_posterior_every_group_with_one_prefix_has_no_residual_and_a_mixed_group_has_one():
    for prefix in PREFIXES:
        assert loss_at(optimum(), group(prefix)) < 1e-25
    assert max(loss_at(optimum(), [*group(()), *group(prefix)]) for prefix in GIVEN) > 1e-3
    assert min(loss_at(START, group(prefix)) for prefix in GIVEN) > 1e-4


@pytest.mark.parametrize("guided", [True, False])
def test_guided_groups_alone_train_the_continuations_to_their_posterior_and_with_plain_ones_all(guided):
    table = START.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([table], max_iter=400, tolerance_grad=1e-12, tolerance_change=0)
    groups = [group(prefix) for prefix in (GIVEN if guided else PREFIXES)]

    def closure() -> Any:
        optimizer.zero_grad()
        # The gradient of a group is the covariance with a detached log Z; at K = all it is that of its variance.
        loss = torch.stack([objective("tb").loss(responses_of(table, rows), BETA) for rows in groups]).sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)
    expected, found = posterior(), logprobs(table.detach()).exp().numpy()
    for prefix in PREFIXES:
        own = [n for n, _ in group(prefix)]
        difference = np.abs(found[own] / found[own].sum() - expected[own] / expected[own].sum()).sum() / 2
        assert (difference < 1e-6) == (not guided or len(prefix) > 0)


class WithSolutions:
    """A task whose demonstrations are known."""

    name = "shown"

    def __init__(self, *demonstrations: str) -> None:
        self._prompts = [Prompt(f"p{n}", ids=[1, 2 + n], demonstration=one) for n, one in enumerate(demonstrations)]

    def prompts(self):
        return self._prompts

    def held_out(self):
        return []

    def score(self, prompt, response, finished):
        return Reward(float(response.startswith("3")), {})


class Digits:
    """A tokenizer whose tokens are digits."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    unk_token_id = bos_token_id = eos_token_id = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(str, ids))


def explore(guided: float) -> Exploration:
    return Exploration(SearchSection(engine="transformers", guided=guided), run_seed=3, searcher="s")


def test_the_share_of_guided_visits_and_their_parts_are_drawn_from_seed_prompt_and_epoch():
    visits = [Visit(lease=n, epoch=n % 7, prompt_key=f"p{n // 7}", guide=0.5) for n in range(2000)]
    parts = [explore(0.25).guide(visit) for visit in visits]
    drawn = [part for part in parts if part is not None]
    assert abs(len(drawn) - 500) < 5 * math.sqrt(2000 * 0.25 * 0.75)
    assert 0 <= min(drawn) < 0.01
    assert 0.49 < max(drawn) <= 0.5
    assert parts == [explore(0.25).guide(visit) for visit in visits]
    assert {explore(0.0).guide(visit) for visit in visits} == {None}


class Delivered:
    """Keeps the rows of a pipeline."""

    leases = frozenset[int]()

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def submit(self, rows, lease, *, closes) -> None:
        self.rows += rows


def guided_rows(directory: Any, guided: float, **search: Any) -> list[Any]:
    """Return the rows of eight visits of each of two prompts, of which the second has no demonstration."""
    task, tokenizer, keys = WithSolutions("345", ""), Digits(), {"guided": guided, "max_tokens": 6, **search}
    config = Config.model_validate({"search": {"engine": "transformers", **keys}, "task": {"reward_workers": 0}})
    renderer, stopping = PromptRenderer(tokenizer, config.task), Stopping(tokenizer, (), (9,))
    exploration, engine = Exploration(config.search, run_seed=3, searcher="s"), cpu_engine(directory)
    loaded, rewards, delivery = LoadedTask(task, renderer, stopping), Rewards(task, config.task), Delivered()
    stage = GenerationStage(engine, loaded, task.prompts(), exploration.settings, 2, guide=exploration.guide)
    episodes = Episodes(stage.ask, rewards, renderer, stopping, Limits.of(config), lambda: 0)
    pipeline = Pipeline(stage, ScoringStage(rewards, stopping, "score", episodes), delivery)  # type: ignore[arg-type]
    pipeline.submit(Visit(lease=n + 1, epoch=n // 2, prompt_key=f"p{n % 2}") for n in range(16))
    while len(delivery.rows) < 32:
        pipeline.step(generate=True, wait_seconds=0.0)
    rewards.close()
    return delivery.rows


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.6}])
def test_a_group_has_one_prefix_and_its_fresh_rows_have_ratios_of_1_and_are_batches_of_their_own(
    harness, tmp_path, cut
):
    rows = guided_rows(save_tiny_model(tmp_path), 1.0, **cut)
    shown = [row for row in rows if row.prompt_key == "p0"]
    assert len({(row.lease, row.sampling["guided"]) for row in shown}) == 8
    assert {row.sampling["guided"] for row in shown} == {0, 1, 2}
    assert not any("guided" in row.sampling for row in rows if row.prompt_key == "p1")
    for row in shown:
        given = row.sampling["guided"]
        assert row.prompt_ids.tolist() == [1, 2]
        assert row.response_ids[:given].tolist() == [3, 4, 5][:given]
        assert row.loss_mask.tolist() == ([0] * given + [1] * (len(row.response_ids) - given) if given else [])
        assert given < len(row.response_ids) <= 6
        assert row.text == "".join(map(str, row.response_ids.tolist()))
        assert row.reward == float(row.text.startswith("3"))
    rows = [dataclasses.replace(row, lease=0) for row in rows]
    buffer = harness(fill=(2, 0), search={"guided": 1.0}, buffer={"dedup": False})
    buffer.put(rows, 0)
    contexts = len({row.sampling.get("guided", 0) for row in shown}) + 1
    reply = buffer.sample(0, prompts=contexts, samples=2)
    batch = decode(reply.message, [memoryview(frame) for frame in reply.frames], prompts=contexts, samples=2)
    given = [int((row.loss_mask == 0).sum()) for row in batch.rows]
    assert given[::2] == given[1::2]
    assert sorted(given[::2]) == [0, 0, 1, 2]
    result = make_learner(name="tb_stale").step(batch)
    assert max(abs(not_none(ratio)) for ratio in not_none(result.rows).log_ratio) < 1e-5
    # Also the group that begins with no token is guided: its draws are those of guided visits.
    assert result.metrics["guided_share"] == 0.75
    plain = [reward for reward, key in zip(reply.message.reward, reply.message.prompt_key, strict=True) if key == "p1"]
    assert result.metrics["plain_reward_mean"] == sum(plain) / len(plain)
    # Whatever else is masked.
    metrics = make_learner().step(dataclasses.replace(batch, guided=[])).metrics
    assert not {"guided_share", "plain_reward_mean"} & metrics.keys()


class Asked:
    """An engine that keeps the contexts of its requests."""

    weights_version = in_flight = 0

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []

    def submit(self, request: Any) -> None:
        self.contexts.append(request.prompt_ids.tolist())

    def step(self) -> list[Any]:
        return []


def given_ids(prompt: Prompt, tokenizer: Any, stop: Any = (), ends: Any = (), context: int | None = None) -> list[int]:
    """Return the tokens that a group begins with whose visit asks for the whole demonstration."""
    renderer, stopping = PromptRenderer(tokenizer, Config().task), Stopping(tokenizer, stop, ends)
    settings = Exploration(SearchSection(engine="transformers"), run_seed=3, searcher="s").settings
    task, engine = WithSolutions(), Asked()
    loaded, guide = LoadedTask(task, renderer, stopping), lambda _: 1.0
    stage = GenerationStage(engine, loaded, [prompt], settings, 1, guide=guide, context=context)  # type: ignore[arg-type]
    stage.submit(Visit(lease=1, epoch=0, prompt_key=prompt.key))
    (asked,) = engine.contexts
    before = renderer.ids(prompt)
    assert asked[: len(before)] == before
    return asked[len(before) :]


def test_a_demonstration_ends_where_a_response_would_and_leaves_room_for_a_token():
    prompt, tokenizer = Prompt("p", ids=[1, 2], demonstration="345678"), Digits()
    assert given_ids(prompt, tokenizer) == [3, 4, 5, 6, 7]
    assert given_ids(prompt, tokenizer, stop=["67"]) == [3, 4]
    assert given_ids(prompt, tokenizer, ends=[7]) == [3, 4, 5]
    assert given_ids(prompt, tokenizer, stop=["3"]) == []
    assert given_ids(prompt, tokenizer, context=5) == [3, 4]


@pytest.mark.parametrize("kind", ["mistral", "llama 3"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_demonstration_follows_its_prompt_without_a_space_of_the_tokenizer(kind, chat):
    tokenizer = chat_tokenizer(kind)
    asked = {"messages": [("user", "12+30=")]} if chat else {"text": "12+30="}
    for answer in ("42!", " 42!"):
        prompt = Prompt("p", **asked, demonstration=answer)
        renderer = PromptRenderer(tokenizer, Config().task)
        whole = [*renderer.ids(prompt), *renderer.response_ids(renderer.text(prompt), answer)]
        assert tokenizer.decode(whole).endswith((renderer.text(prompt) + answer)[-8:])
        assert given_ids(prompt, tokenizer) == whole[len(renderer.ids(prompt)) : -1]


def test_a_demonstration_whose_first_letters_the_tokenizer_joins_with_the_prompt_is_encoded_by_itself():
    tokenizer = chat_tokenizer("mistral")
    whole = tokenizer.encode("The answer", add_special_tokens=False)
    renderer, prompt = PromptRenderer(tokenizer, Config().task), Prompt("p", "The answ", demonstration="er")
    assert whole[: len(before := renderer.encode(prompt.text))] != before
    assert tokenizer.decode([*before, *renderer.response_ids(renderer.text(prompt), "er")]) == "The answer"


def make_guided(prompt: str, given: int, tokens: list[int], reward: float, **fields: Any) -> Any:
    mask = np.array([0] * given + [1] * (len(tokens) - given), np.uint8)
    sampling = {"temperature": 1.0, "top_p": 1.0, "guided": given}
    return make_trajectory(prompt, tokens=tokens, loss_mask=mask, sampling=sampling, reward=reward, **fields)


def test_pass_rates_and_contexts_of_guided_responses_are_their_own_also_after_a_restart(harness, tmp_path):
    keys: dict[str, Any] = {"search": {"guided": 0.5}, "curriculum": {"answers": 4, "solved": 1.0}}
    path = tmp_path / "buffer.sqlite"
    buffer = harness(path, fill=(2, 0), **keys)
    first = not_none(buffer.lease(2)).visits
    assert [visit.guide for visit in first] == [1.0, 1.0]
    leases = {visit.prompt_key: visit.lease for visit in first}
    # The same response three times: as one of the policy alone, and after one and two tokens that were given.
    rows = [make_trajectory("p0", lease=leases["p0"], tokens=[5, 6, 7], reward=0.0)]
    rows += [make_guided("p0", given, [5, 6, 7], 1.0, lease=leases["p0"]) for given in (1, 2, 2)]
    rows += [make_guided("p1", 1, [5, 6, 7], 1.0, lease=leases["p1"], error="broken")]
    buffer.put(rows, 0)
    before = buffer.service.state.curriculum.guide
    assert [before(prompt) for prompt in buffer.service.state.prompt_keys] == [0.25, 1.0]
    contexts = entries_of(buffer.service.state.index)
    assert [(prompt >> 32, len(entries)) for prompt, entries in contexts.items()] == [(0, 1), (1, 1), (2, 1)]
    buffer.store.close()
    state = (after := harness(path, **keys)).service.state
    assert [state.curriculum.guide(prompt) for prompt in state.prompt_keys] == [0.25, 1.0]
    assert entries_of(state.index) == contexts
    assert {visit.prompt_key: visit.guide for visit in not_none(after.lease(2)).visits} == {"p0": 0.25, "p1": 1.0}
    ask = state.store.database.all
    assert ask("SELECT guided, AVG(reward) FROM trajectories WHERE error IS NULL GROUP BY guided") == [
        (None, 0.0), (1, 1.0), (2, 1.0)]  # fmt: skip
    assert ask("SELECT SUM(trajectories), MAX(mean_reward) FROM lengths") == [(1, 0.0)]


def test_no_group_mixes_rewards_of_two_phases_also_after_a_restart(harness, tmp_path):
    path = tmp_path / "buffer.sqlite"
    buffer = harness(path, fill=(1, 0))
    samplings = [{"temperature": 1.0, "top_p": 1.0} | more for more in ({"phase": 0}, {"phase": 1, "guided": 1}, {})]
    rows = [make_trajectory("p0", lease=0, tokens=[n], sampling=samplings[n % 3], reward=n % 3) for n in range(6)]
    buffer.put(rows, 0)
    rewards = buffer.sample(0, prompts=3, samples=2).message.reward
    assert sorted(rewards[::2]) == [0, 1, 2]
    assert rewards[::2] == rewards[1::2]
    contexts = entries_of(buffer.service.state.index).keys()
    buffer.store.close()
    assert entries_of(harness(path).service.state.index).keys() == contexts


def test_guided_answers_solve_no_prompt_and_answers_of_no_policy_of_the_run_do_not_count():
    curriculum = Curriculum(CurriculumSection(answers=4, solved=1.0, revisit_every=1000), guided=True)
    curriculum.note(7, [0] * 6, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], guided=True)
    curriculum.note(7, [NO_POLICY], [0.0], guided=True)
    assert (curriculum.guide(7), curriculum.guide(8)) == (0.0, 1.0)
    assert curriculum.decide(1, [7], least=0) == []
    curriculum.note(7, [0] * 4, [0.7 + 0.2 + 0.1] * 4)
    assert [one.decision for one in curriculum.decide(1, [7], least=0)] == ["skipped"]


def test_a_demonstration_is_part_of_what_searchers_must_have_in_common():
    assert len({fingerprint(WithSolutions(*shown).prompts()) for shown in (["1"], ["2"], [""])}) == 3


def test_settings_that_cannot_be_guided_are_refused(tmp_path):
    for name in ("tb_learned_z", "flowrl"):
        with pytest.raises(ConfigError, match=f"objective.name = {name} learns log Z of the prompt alone"):
            resolve(None, environment={}, assignments=["search.guided=0.5", f"objective.name={name}"])
    config = Config.model_validate({"search": {"guided": 0.5}, "model": {"path": str(save_tiny_model(tmp_path))}})
    tokenizer: Any = Digits()
    for demonstration in ("12", ""):
        task: Any = WithSolutions(demonstration)
        loaded = LoadedTask(task, PromptRenderer(tokenizer, config.task), Stopping(tokenizer, (), ()))
        if demonstration:
            check_loaded(config, loaded, task.prompts())
        else:
            with pytest.raises(TaskError, match="no prompt with a demonstration"):
                check_loaded(config, loaded, task.prompts())
