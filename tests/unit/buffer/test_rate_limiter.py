"""The ratio of samples to inserts, and no configuration that waits for a batch that can never form."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tba.buffer.sampling.rate_limiter import RateLimiter
from tba.common.config import Config
from tba.common.config.root import check_batches
from tba.common.wire import messages
from tba.common.wire.messages import GetStatus
from tba.tests.helpers.random_configurations import draw_sections, run_until_it_waits
from tba.tests.runner import FULL_SIZE, size


@pytest.mark.slow
@given(
    ratio=st.floats(0.01, 50),
    prompts=st.integers(1, 20),
    samples=st.integers(2, 20),
    responses=st.integers(1, 30),
    extra=st.integers(0, 50),
    actions=st.lists(st.sampled_from(["lease", "put", "sample"]), min_size=1, max_size=300),
)
@settings(deadline=None, derandomize=True, max_examples=size(60, 200))
def test_at_most_one_side_waits(ratio, prompts, samples, responses, extra, actions):
    config = Config.model_validate(
        {
            "train": {"prompts_per_step": prompts, "samples_per_prompt": samples},
            "search": {"samples_per_prompt": responses},
            "buffer": {"samples_per_insert": ratio},
        }
    )
    batch = prompts * samples
    limiter = RateLimiter(ratio, config.least_slack + extra)
    inserted = leases = sampled = 0
    for action in actions:
        may_lease = limiter.room(inserted, leases * responses, sampled) >= responses
        may_sample = limiter.shortage(inserted, sampled, batch) is None
        assert may_lease or may_sample or leases
        leases += action == "lease" and may_lease
        if action == "put" and leases:
            leases, inserted = leases - 1, inserted + responses
        sampled += batch * (action == "sample" and may_sample)
        assert sampled <= ratio * inserted + 1e-6
        assert inserted - sampled / ratio <= limiter.slack + 1e-6


# ------------------------------------------------------------ service


def limited(harness, prompts: int, **buffer: object):
    """A buffer with one sample per insert, groups of 4 responses, batches of 2 x 2, and this number of prompts."""
    made = harness(
        train={"prompts_per_step": 2, "samples_per_prompt": 2},
        search={"samples_per_prompt": 4},
        buffer={"samples_per_insert": 1, **buffer},
    )
    made.register(prompts)
    made.announce(0, 0)
    return made


def test_the_trainer_waits_for_inserts(harness):
    buffer = harness(
        buffer={"samples_per_insert": 1}, train={"prompts_per_step": 2, "samples_per_prompt": 2}, fill=(2, 3)
    )
    assert buffer.config.samples_per_insert_slack == 2 * buffer.config.least_slack
    assert buffer.sample(0, prompts=2, samples=2) is not None
    assert buffer.sample(1, prompts=2, samples=2) is None
    assert buffer.ask(GetStatus()).message.trainer_waits_for == "", "it still trains on step 0"
    buffer.report(0)
    assert buffer.sample(1, prompts=2, samples=2) is None
    reason = buffer.ask(GetStatus()).message.trainer_waits_for
    assert reason == "6 of 8 trajectories for 1 sample per insert"


@pytest.mark.parametrize(("prompts", "slack", "granted"), [(20, 12, 3), (2, 16, 4)], ids=["", "two epochs"])
def test_searchers_that_are_ahead_are_held_back(harness, prompts, slack, granted):
    """Visits of one prompt in two epochs count as two."""
    buffer = limited(harness, prompts, samples_per_insert_slack=slack)
    visits = buffer.lease(4 if prompts == 2 else 10).visits
    assert len(visits) == granted
    assert buffer.lease(10, held=[visit.lease for visit in visits]) is None


def test_responses_of_unfinished_groups_count_when_their_visit_is_answered(harness, trajectory):
    buffer = limited(harness, 20, samples_per_insert_slack=12)
    visits = buffer.lease(3).visits
    for n, visit in enumerate(visits):
        rows = [trajectory(visit.prompt_key, visit.lease, tokens=[n, i]) for i in range(3)]
        buffer.put(rows, 3 * n, closes=False)
    # Two prompts have a group of 2 each, in sampling: the limit holds, since no visit is answered.
    assert buffer.sample(0, prompts=2, samples=2) is None
    assert buffer.ask(GetStatus()).message.trainer_waits_for == "0 of 4 trajectories for 1 sample per insert"
    assert buffer.lease(10, held=[one.lease for one in visits]) is None
    last = trajectory(visits[0].prompt_key, visits[0].lease, tokens=[0, 3])
    buffer.put([last], 9)
    assert buffer.sample(0, prompts=2, samples=2) is not None
    assert buffer.service.state.leases.stored == 6
    # As after a restart.
    opened = buffer.store.visits.open(buffer.run)
    assert [(one.id, one.stored) for one in opened] == [(one.lease, 3) for one in visits[1:]]


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_searchers_are_not_held_back_while_a_trainer_that_is_there_lacks_prompts(harness, trajectory, says_goodbye):
    """Trajectories of one prompt, however many, cannot fill a batch of two prompts."""
    buffer = limited(harness, 20, samples_per_insert_slack=12, min_fill=20, lease_seconds=30)
    buffer.put([trajectory(lease=0, tokens=[n]) for n in range(30)], 0)
    assert buffer.lease(2) is None
    assert buffer.sample(0, prompts=2, samples=2) is None
    assert len(buffer.lease(2).visits) == 2
    if says_goodbye:
        buffer.ask(messages.Goodbye(), role="trainer", sender="t.1")
    else:
        buffer.clock.advance(31)
    assert buffer.lease(2, held=[1, 2]) is None
    again = messages.SampleBatch(step=0, prompts=2, samples=2, reference="initial", wait_seconds=0.0)
    assert buffer.ask(again, role="trainer", sender="t.2") is None
    assert len(buffer.lease(2, held=[1, 2]).visits) == 2, "another trainer lacks prompts"


PROMPTS = 40
SIZES: dict[str, Any] = {
    "search": {"samples_per_prompt": 4},
    "train": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "objective": {"name": "tb"},
}


def refusal_of(prompts: int, sections: dict[str, dict[str, Any]]) -> str:
    try:
        merged = {name: SIZES.get(name, {}) | sections.get(name, {}) for name in {**SIZES, **sections}}
        check_batches(Config.model_validate(merged), prompts)
    except (ValidationError, ValueError) as error:
        return str(error)
    return ""


NEVER = {"replacement": "never"}
GREEDY = {"temperature": 0}
BY_8: dict[str, Any] = {"train": {"samples_per_prompt": 8}, "search": {"samples_per_prompt": 8}}
PHASES = {"phases": [{"until": 5, "weights": {"correct": 1.0}}]}
SINGLE: dict[str, Any] = {"search": {"put": "sample"}}
IMPOSSIBLE: list[tuple[int, dict[str, Any], str]] = [
    (40, {"buffer": {"max_payload_bytes": 100}}, "no room for the 13 trajectories"),
    (40, {"buffer": {"max_trajectories": 12}}, "set at least 13"),
    (40, {"buffer": {"max_trajectories": 54}, "search": {"samples_per_prompt": 9}, "train": {"prompts_per_step": 7}},
     "set at least 55"),
    (40, {"buffer": NEVER | {"max_trajectories": 16}, "search": {"samples_per_prompt": 2}}, "set at least 88"),
    (40, {"buffer": {"max_trajectories": 25, "keep": "both"}}, "half of the room is theirs: set at least 26"),
    (40, {"buffer": {"max_trajectories": 30, "keep": "reservoir", "prompt_cap": 10}}, "set at least 31"),
    (40, {"buffer": NEVER | {"max_trajectories": 141, "keep": "reservoir", "prompt_cap": 10}}, "set at least 142"),
    (40, {"buffer": {"keep": "both"}}, "set that to a number"),
    (40, {"buffer": {"keep": "both", "max_trajectories": 40, "max_payload_bytes": 9000}}, "would prefer short ones"),
    (40, {"buffer": {"keep": "reservoir", "max_trajectories": 900, "max_staleness": 4}}, 'Set buffer.keep = "both"'),
    (40, {"buffer": {"prompt_cap": 1, "min_fill": 50}}, "at most 40 sampleable"),
    (5, {"buffer": {"prompt_cap": 2, "min_fill": 16}}, "at most 10 sampleable"),
    (40, {"buffer": {"min_fill": 50}, "search": GREEDY}, "at most 40 sampleable"),
    (40, {"buffer": NEVER, "search": GREEDY}, "set search.temperature above 0, or buffer.dedup = false"),
    (3, {}, "the task has 3 prompts and a batch needs 4 different ones: lower train.prompts_per_step"),
    (40, BY_8 | {"buffer": {"samples_per_insert": 2, "samples_per_insert_slack": 24}}, "= 24 must be at least 25"),
    (40, BY_8 | {"buffer": {"samples_per_insert": 0.5, "max_staleness": 4}},
     "must be at least train.samples_per_prompt / search.samples_per_prompt = 1"),
    (40, BY_8 | {"buffer": NEVER | {"prompt_cap": 7}}, "needs buffer.prompt_cap"),
    (40, BY_8 | {"buffer": NEVER | {"max_trajectories": 31}}, "less than the 32"),
    (40, BY_8 | {"buffer": {"min_fill": 50, "max_trajectories": 49}}, "less than the 50"),
    (40, BY_8 | {"buffer": NEVER | {"max_staleness": 9}, "search": {"samples_per_prompt": 7}},
     "one visit must give a whole group"),
    (40, BY_8 | {"buffer": NEVER, "search": {"samples_per_prompt": 7, "guided": 0.5}},
     "with search.guided needs search.samples_per_prompt >= train.samples_per_prompt = 8"),
    (40, BY_8 | {"buffer": NEVER, "search": {"samples_per_prompt": 8, "guided": 0.5}}, ""),
    # Visits of one phase fill a group together.
    (40, BY_8 | {"buffer": NEVER, "search": {"samples_per_prompt": 7}, "task": PHASES}, ""),
    (40, SINGLE, 'set buffer.replacement = "never"'),
    (40, SINGLE | {"buffer": {"replacement": "always"}}, "would train on the first response"),
    (40, SINGLE | {"buffer": NEVER}, ""),
    (40, SINGLE | {"buffer": NEVER, "train": {"samples_per_prompt": 3}},
     "would train on the first 3 responses, the shortest"),
]  # fmt: skip


@pytest.mark.parametrize(("prompts", "sections", "words"), IMPOSSIBLE)
def test_settings_under_which_no_batch_can_form_are_refused_with_a_value_that_works(prompts, sections, words):
    said = refusal_of(prompts, sections)
    assert words in said
    assert bool(words) == bool(said)


@pytest.mark.parametrize("seed", range(2000 if FULL_SIZE else 60))
def test_a_random_valid_configuration_trains_or_is_refused_or_says_why_it_waits(seed, harness):
    rng = random.Random(seed)
    sections = draw_sections(rng)
    if refused := refusal_of(PROMPTS, sections):
        assert any(f"{name}." in refused for name in sections)
        return
    config = Config.model_validate(sections)
    waits = run_until_it_waits(harness(**sections), config, PROMPTS, rng)
    assert not waits or waits.startswith("no_growth: "), sections
    assert not waits or "left sampling by buffer." in waits, sections
