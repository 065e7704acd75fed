"""The sampling settings of each response, and the pipeline, in which every response becomes a row."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tba.common.config import Config, SearchSection
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError, EngineError
from tba.common.rendering import PromptRenderer
from tba.common.wire.messages import Visit
from tba.searcher.build import LoadedTask
from tba.searcher.engines.engine import Generation
from tba.searcher.engines.stopping import Stopping
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.pipeline import Exploration, GenerationStage, Pipeline, ScoringStage, draw
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, phased
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Reward
from tba.tests.helpers.checks import not_none

VISITS = [Visit(lease=lease, epoch=lease % 3, prompt_key=f"p{lease // 3}") for lease in range(60)]


def explore(run_seed: int = 0, searcher: str = "node-gpu0", **keys):
    """Return the settings of 8 samples of 60 visits as [visit][sample]."""
    config = SearchSection.model_validate({"engine": "transformers"} | keys)
    exploration = Exploration(config, run_seed=run_seed, searcher=searcher)
    return [[exploration.settings(visit, sample) for sample in range(8)] for visit in VISITS]


def temperatures(explored):
    return [{settings.temperature for settings in group} for group in explored]


def test_every_response_of_a_run_has_its_own_seed_and_settings_but_vllm_gets_no_seeds():
    seeds = [s.seed for run_seed in (0, 1) for group in explore(run_seed) for s in group]
    assert len(set(seeds)) == len(seeds) == 960
    assert {s.seed for group in explore(engine="vllm") for s in group} == {None}
    keys: dict[str, Any] = {"temperature": {"min": 0.5, "max": 1.5}, "top_p": [0.9, 1.0]}
    assert explore(3, "a", **keys) == explore(3, "b", **keys)
    assert explore(3, "a", **keys) != explore(4, "a", **keys)


def test_lists_are_drawn_from_with_equal_probability_and_independently():
    drawn = [
        (s.temperature, s.top_p) for group in explore(temperature=[0.7, 1.0, 1.3], top_p=[0.9, 1.0]) for s in group
    ]
    assert len(set(drawn)) == 6
    counts = np.array([[one for one, _ in drawn].count(value) for value in (0.7, 1.0, 1.3)])
    assert counts.sum() == 480
    assert (np.abs(counts - 160) < 5 * np.sqrt(160)).all()


def test_a_group_or_a_searcher_may_have_its_own_settings():
    drawn = temperatures(explore(temperature=[0.7, 1.0, 1.3], explore="group"))
    assert {len(group) for group in drawn} == {1}
    assert set.union(*drawn) == {0.7, 1.0, 1.3}
    keys: dict[str, Any] = {"temperature": {"min": 0.5, "max": 1.5}, "explore": "searcher"}
    own = [set.union(*temperatures(explore(searcher=f"gpu{n}", **keys))) for n in range(20)]
    assert {len(values) for values in own} == {1}
    assert len(set.union(*own)) > 10


def test_a_range_is_drawn_from_in_steps_that_include_its_ends():
    generator = random.Random(0)
    drawn = {draw({"min": 0.904, "max": 1.0}, generator) for _ in range(1000)}
    assert drawn == {0.904, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0}


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("temperature=-1", "0 (greedy) or at least 0.01"),
        ("temperature=[1.0, 0.001]", "0 (greedy) or at least 0.01"),
        ("temperature=[]", "the list is empty"),
        ("temperature=hot", "write a number, a list of numbers, or a range"),
        ("temperature=true", "write a number"),
        ("temperature={min = 1.0}", "a range has two ends"),
        ("temperature={min = 1.3, max = 0.7}", "min is above its max"),
        ("top_p=0", "top_p must be more than 0 and at most 1"),
        ("top_p=[0.9, 1.1]", "top_p must be more than 0 and at most 1"),
        ("explore=prompt", "it must be 'sample', 'group' or 'searcher'"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_sentence(assignment, sentence):
    with pytest.raises(ConfigError, match=r"^search\.\w+ = .* \(--set\): ") as caught:
        resolve(None, environment={}, assignments=[f"search.{assignment}"])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("0.7", 0.7), ("[0.7, 1]", (0.7, 1.0)), ("{min = 0.7, max = 1.3}", {"min": 0.7, "max": 1.3})]
)
def test_each_form_can_be_written_as_one_assignment(text, value):
    assert resolve(None, environment={}, assignments=[f"search.temperature={text}"]).config.search.temperature == value


SAMPLES = 2


class FakeEngine:
    """Answers each request with tokens 1 and 2 at the next step; refuses every `refuse_every`-th request."""

    weights_version = 0

    def __init__(self, refuse_every: int = 0, stop_reason: str = "eos") -> None:
        self._refuse_every = refuse_every
        self._stop_reason = stop_reason
        self._requests: list[Any] = []
        self._seen = 0

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def submit(self, request) -> None:
        self._seen += 1
        if self._refuse_every and self._seen % self._refuse_every == 0:
            raise EngineError("too long")
        self._requests.append(request)

    def step(self) -> list[Generation]:
        requests, self._requests = self._requests, []
        ids, logprobs, runs = np.array([1, 2], np.int32), np.full(2, -0.5, np.float32), np.array([[0, 2]], np.int32)
        kept = np.array([0, 3, 0], np.int32)
        return [Generation(request.id, ids, logprobs, runs, self._stop_reason, 0.0, kept) for request in requests]


class FakeTokenizer:
    bos_token_id = None

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def encode(self, text: str, **_: bool) -> list[int]:
        return [len(text)]

    def decode(self, token_ids: list[int], **_: bool) -> str:
        if self._broken:
            raise IndexError("no such token")
        return "85"


class FakeDelivery:
    def __init__(self) -> None:
        self.groups: list[Any] = []

    def submit(self, rows, lease, *, closes) -> None:
        self.groups.append((lease, rows))


@pytest.fixture
def make():
    """Create a pipeline, its scoring stage and its delivery."""
    opened = []

    def make(engine, tokenizer, search=None, **keys):
        sections = {"task": {"reward_workers": 0} | keys, "search": search or {}}
        config, task = Config.model_validate(sections), arithmetic()
        rewards = Rewards(task, config.task)
        delivery: Any = FakeDelivery()
        opened.append(rewards)
        settings = Exploration(config.search, run_seed=0, searcher="s").settings
        renderer, stopping = PromptRenderer(tokenizer, config.task), Stopping(tokenizer, (), ())
        generation = GenerationStage(engine, LoadedTask(task, renderer, stopping), task.prompts(), settings, SAMPLES)
        episodes = Episodes(generation.ask, rewards, renderer, stopping, Limits.of(config), lambda: 0)
        phases = config.task.phases
        scoring = ScoringStage(rewards, stopping, config.task.truncated, episodes, phases=phases)
        return Pipeline(generation, scoring, delivery), scoring, delivery

    yield make
    for rewards in opened:
        rewards.close()


# It takes long to make.
arithmetic = cache(ArithmeticTask)


def visits(count: int) -> list[Visit]:
    prompts = arithmetic().prompts()
    return [Visit(lease=n + 1, epoch=0, prompt_key=prompts[n].key) for n in range(count)]


def rows_of(pipeline: Any, delivery: Any) -> Any:
    """Return the rows of one visit."""
    pipeline.submit(visits(1))
    pipeline.step(generate=True, wait_seconds=0.0)
    ((_, rows),) = delivery.groups
    return rows


@pytest.mark.parametrize(
    ("refuse_every", "broken", "errors", "kind"),
    [
        (2, False, ["", "not generated: too long"], "generation"),
        (0, True, ["reward: not decoded: IndexError: no such token"] * SAMPLES, "decoding"),
    ],
)
def test_a_response_that_cannot_be_generated_or_decoded_is_a_row_with_its_error(
    make, refuse_every, broken, errors, kind
):
    pipeline, scoring, delivery = make(FakeEngine(refuse_every), FakeTokenizer(broken=broken))
    rows = rows_of(pipeline, delivery)
    assert sorted(row.error or "" for row in rows) == errors
    assert [row.error_kind for row in rows] == [kind if row.error else None for row in rows]
    assert scoring.errors == sum(error != "" for error in errors)


def test_a_visit_that_another_searcher_left_gets_what_it_lacks_with_other_seeds(make):
    engine = FakeEngine()
    pipeline, _, delivery = make(engine, FakeTokenizer(), search={"engine": "transformers"})
    (visit,) = visits(1)
    pipeline.submit([visit])
    seeds = {request.sampling.seed for request in engine._requests}
    for stored in range(1, SAMPLES + 2):
        pipeline.submit([replace(visit, stored=stored)])
    pipeline.step(generate=True, wait_seconds=0.0)
    # At least one, which closes the visit.
    assert [len(rows) for _, rows in delivery.groups] == [
        SAMPLES,
        *(max(1, SAMPLES - n) for n in range(1, SAMPLES + 2)),
    ]
    assert len(seeds) == SAMPLES
    engine._requests.clear()
    pipeline.submit([replace(visit, stored=1)])
    assert not seeds & {request.sampling.seed for request in engine._requests}


@pytest.mark.parametrize(("spare", "stored"), [(0, [0, 3, 0]), (-1, [])])
def test_kept_tokens_are_stored_with_the_row_if_they_fit_a_message(make, monkeypatch, caplog, spare, stored):
    monkeypatch.setattr("tba.searcher.pipeline.MAX_REQUEST_FRAME_BYTES", 12 * SAMPLES + spare)
    pipeline, _, delivery = make(FakeEngine(), FakeTokenizer(), search={"top_k": 2, "min_p": 0.1})
    rows = rows_of(pipeline, delivery)
    assert [row.kept.tolist() for row in rows] == [stored] * SAMPLES
    assert rows[0].sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": 2, "min_p": 0.1}
    assert caplog.text.count("the ratios of a response are not known") == (not stored)


@pytest.mark.slow
@pytest.mark.parametrize(("stop_reason", "warnings"), [("length", 1), ("eos", 0)])
def test_responses_of_which_most_reach_the_length_limit_are_told_once(make, caplog, stop_reason, warnings):
    pipeline, _, _ = make(FakeEngine(stop_reason=stop_reason), FakeTokenizer(), truncated="mask")
    for _ in range(3):
        pipeline.submit(visits(100))
        pipeline.step(generate=True, wait_seconds=0.0)
    assert [record.getMessage() for record in caplog.records].count("responses do not end") == warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truncated", "reward", "error"),
    [("score", 0.0, None), (-1.0, -1.0, None), ("mask", 0.0, "not trained on: cut off after 2 tokens, and task.trunc")],
)
def test_a_response_that_was_cut_off_is_scored_penalised_or_left_out_of_training(make, truncated, reward, error):
    for stop_reason in ("eos", "length"):
        engine = FakeEngine(stop_reason=stop_reason)
        pipeline, scoring, delivery = make(engine, FakeTokenizer(), truncated=truncated)
        rows = rows_of(pipeline, delivery)
        # The parts of the task's reward stay. A finished answer is not affected.
        assert all({"correct", "format"} == row.reward_parts.keys() for row in rows)
        assert {row.reward for row in rows} == {reward if stop_reason == "length" else 0.0}
        assert {(row.error or "")[:50] for row in rows} == {(error or "")[:50] if stop_reason == "length" else ""}
        assert {row.error_kind for row in rows} == {"masked" if error and stop_reason == "length" else None}
        assert scoring.errors == 0


PHASES = [{"until": 2, "weights": {"format": 0.5, "reward": 4.0}}, {"until": 5, "weights": {"correct": -1.0}}]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "phase"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, None)])
def test_the_rewards_of_a_group_are_those_of_the_phase_in_which_its_visit_began(make, version, phase):
    engine = FakeEngine()
    engine.weights_version = version
    pipeline, _, delivery = make(engine, FakeTokenizer(), phases=PHASES)
    prompts = arithmetic().prompts()
    right = next(prompt for prompt in prompts if prompt.answer == "85")
    wrong = next(prompt for prompt in prompts if prompt.answer != "85")
    pipeline.submit(Visit(lease=n, epoch=0, prompt_key=one.key) for n, one in enumerate((right, wrong), 1))
    engine.weights_version = 9
    pipeline.step(generate=True, wait_seconds=0.0)
    found = {lease: [row.reward for row in rows] for lease, rows in delivery.groups}
    # By hand: "85" has the format, and is right for one of the prompts.
    by_hand = {0: (0.5 + 4.0, 0.5), 1: (-1.0, 0.0), None: (1.0, 0.0)}
    assert found == {1: [by_hand[phase][0]] * SAMPLES, 2: [by_hand[phase][1]] * SAMPLES}
    for lease, rows in delivery.groups:
        own = {} if phase is None else {"reward": float(lease == 1)}
        assert [row.reward_parts for row in rows] == [{"correct": float(lease == 1), "format": 1.0} | own] * SAMPLES
        assert {row.sampling.get("phase") for row in rows} == {phase}


@pytest.mark.parametrize(
    ("truncated", "stop_reason", "reward", "kind"),
    [
        ("score", "eos", 0.0, "reward"),
        ("score", "length", 0.0, "reward"),
        (-1.0, "length", -1.0, None),
        ("mask", "length", 0.0, "masked"),
    ],
)
def test_a_part_of_the_phase_that_a_response_lacks_is_an_error_unless_it_was_cut_off_and_has_another_reward(
    make, truncated, stop_reason, reward, kind
):
    phases = [{"until": 1, "weights": {"judge": 1.0}}]
    pipeline, _, delivery = make(FakeEngine(0, stop_reason), FakeTokenizer(), truncated=truncated, phases=phases)
    rows = rows_of(pipeline, delivery)
    assert {(row.reward, row.error_kind) for row in rows} == {(reward, kind)}
    assert all("the response has no part judge" in row.error for row in rows if kind == "reward")


@pytest.mark.parametrize(
    ("parts", "weights", "sentence"),
    [
        ({"a": 1e300, "b": 1e300}, {"a": 1e300, "b": -1e300}, "a reward of nan with 3 parts is beyond"),
        ({"a": 1e300}, {"a": 1e300}, "a reward of inf with 2 parts is beyond"),
        ({"reward": 1.0}, {"reward": 1.0}, "the task has a part reward of its own"),
    ],
)
def test_a_reward_of_a_phase_that_is_no_number_or_ambiguous_is_an_error_of_its_row(parts, weights, sentence):
    found = phased(Scored(1, "85", Reward(0.5, parts), None), weights)
    assert (found.reward, found.error_kind) == (Reward(0.0, {}), "reward")
    assert sentence in not_none(found.error)


def test_phases_that_follow_each_other_and_a_model_that_exists_are_needed():
    def set_phases(phases: str, *more: str) -> Config:
        return resolve(None, environment={}, assignments=[f"task.phases=[{phases}]", *more]).config

    with pytest.raises(ConfigError, match="give each phase a larger `until`"):
        set_phases("{until=3,weights={a=1}},{until=3,weights={a=2}}")
    many = [f"{{until={n},weights={{a=1}}}}" for n in range(1, 66)]
    assert len(set_phases(",".join(many[:64])).task.phases) == 64
    with pytest.raises(ConfigError, match="task.phases has 65 phases: at most 64"):
        set_phases(",".join(many))
    with pytest.raises(ConfigError, match=r"set reward_model\.path"):
        set_phases("{until=3,weights={reward_model=1}}")
    assert set_phases("{until=3,weights={reward_model=1}}", "reward_model.path=judge").task.phases
