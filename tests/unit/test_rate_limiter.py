"""The ratio of samples to inserts: neither side runs away, and never do both wait."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tba.buffer.rate_limiter import RateLimiter
from tba.common import wire
from tba.common.config import Config


def test_the_trainer_waits_until_a_batch_is_within_the_ratio():
    limiter = RateLimiter(samples_per_insert=2.0, slack=100)
    assert limiter.shortage(inserted=9, sampled=10, batch=10) == "9 of 10 trajectories for 2 samples per insert"
    assert limiter.shortage(inserted=10, sampled=10, batch=10) is None


def test_searchers_have_room_for_the_slack_and_for_what_was_sampled():
    limiter = RateLimiter(samples_per_insert=2.0, slack=100)
    assert limiter.room(inserted=80, under_way=30, sampled=40) == 10
    assert limiter.room(inserted=200, under_way=0, sampled=40) == 0


def test_without_a_ratio_nobody_waits():
    limiter = RateLimiter(samples_per_insert=None, slack=1)
    assert limiter.shortage(0, 10**9, 10) is None
    assert limiter.room(10**9, 10, 0) is None


@given(
    ratio=st.floats(0.01, 50),
    prompts=st.integers(1, 20),
    samples=st.integers(2, 20),
    responses=st.integers(1, 30),
    extra=st.integers(0, 50),
    turns=st.lists(st.sampled_from(["lease", "put", "sample"]), min_size=1, max_size=300),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_never_do_both_sides_wait(ratio, prompts, samples, responses, extra, turns):
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
    for turn in turns:
        may_lease = limiter.room(inserted, leases * responses, sampled) >= responses
        may_sample = limiter.shortage(inserted, sampled, batch) is None
        assert may_lease or may_sample or leases
        leases += turn == "lease" and may_lease
        if turn == "put" and leases:
            leases, inserted = leases - 1, inserted + responses
        sampled += batch * (turn == "sample" and may_sample)
        assert sampled <= ratio * inserted + 1e-6
        assert inserted - sampled / ratio <= limiter.slack + 1e-6


# ------------------------------------------------------------ in the configuration


def refusal(**sections: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(sections)
    return str(caught.value)


def test_a_slack_that_would_stop_both_sides_is_refused():
    train, search = {"prompts_per_step": 4, "samples_per_prompt": 8}, {"samples_per_prompt": 8}
    message = refusal(train=train, search=search, buffer={"samples_per_insert": 2, "samples_per_insert_slack": 24})
    assert "samples_per_insert_slack = 24 must be at least 25" in message
    config = Config.model_validate({"train": train, "search": search, "buffer": {"samples_per_insert": 2}})
    assert config.samples_per_insert_slack == 50


def test_a_ratio_that_a_staleness_limit_cannot_serve_is_refused():
    buffer = {"samples_per_insert": 0.5, "max_staleness": 4}
    groups = {"train": {"samples_per_prompt": 8}, "search": {"samples_per_prompt": 8}}
    assert "must be at least train.samples_per_prompt / search.samples_per_prompt = 1" in refusal(
        buffer=buffer, **groups
    )


def test_limits_that_no_batch_fits_are_refused():
    train = {"prompts_per_step": 4, "samples_per_prompt": 8}
    assert "needs buffer.prompt_cap" in refusal(train=train, buffer={"replacement": "never", "prompt_cap": 7})
    assert "less than the 32" in refusal(train=train, buffer={"replacement": "never", "max_trajectories": 31})
    assert "less than the 50" in refusal(train=train, buffer={"min_fill": 50, "max_trajectories": 49})
    stale = {"replacement": "never", "max_staleness": 9}
    assert "one visit must give a whole group" in refusal(train=train, search={"samples_per_prompt": 7}, buffer=stale)


# ------------------------------------------------------------ in the service


def test_the_service_makes_the_trainer_wait_for_inserts(harness):
    buffer = harness(buffer={"samples_per_insert": 1}, train={"prompts_per_step": 2, "samples_per_prompt": 2})
    buffer.fill(2, 3)
    assert buffer.sample(0, prompts=2, samples=2) is not None
    assert buffer.sample(1, prompts=2, samples=2) is None
    assert buffer.ask(wire.GetStatus()).message.trainer_waits_for == "", "it is at work on step 0"
    buffer.report(0)
    assert buffer.sample(1, prompts=2, samples=2) is None
    reason = buffer.ask(wire.GetStatus()).message.trainer_waits_for
    assert reason == "6 of 8 trajectories for 1 sample per insert"


def test_the_service_holds_searchers_back_that_are_ahead(harness):
    sections = {
        "train": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "search": {"samples_per_prompt": 4},
        "buffer": {"samples_per_insert": 1, "samples_per_insert_slack": 12},
    }
    buffer = harness(**sections)
    buffer.register(20)
    buffer.announce(0, 0)
    assert len(buffer.lease(10).visits) == 3
    assert buffer.lease(10, held=[1, 2, 3]) is None


def test_visits_of_one_prompt_in_two_epochs_are_two_that_are_under_way(harness):
    sections = {
        "train": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "search": {"samples_per_prompt": 4},
        "buffer": {"samples_per_insert": 1, "samples_per_insert_slack": 16},
    }
    buffer = harness(**sections)
    buffer.register(2)
    buffer.announce(0, 0)
    assert len(buffer.lease(4).visits) == 4
    assert buffer.lease(4, held=[1, 2, 3, 4]) is None


def test_searchers_are_not_held_back_while_the_trainer_lacks_prompts(harness, trajectory):
    """Many trajectories of one prompt are no batch of two prompts, however far ahead the searchers are."""
    sections = {
        "train": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "search": {"samples_per_prompt": 4},
        "buffer": {"samples_per_insert": 1, "samples_per_insert_slack": 12},
    }
    buffer = harness(**sections)
    buffer.register(20)
    buffer.announce(0, 0)
    buffer.put([trajectory(lease=0, tokens=[n]) for n in range(30)], 0)
    assert buffer.lease(2) is None
    assert buffer.sample(0, prompts=2, samples=2) is None
    assert len(buffer.lease(2).visits) == 2


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_searchers_are_held_back_again_when_the_trainer_that_lacked_prompts_has_gone(harness, trajectory, says_goodbye):
    sections = {
        "train": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "search": {"samples_per_prompt": 4},
        "buffer": {"samples_per_insert": 1, "samples_per_insert_slack": 12, "min_fill": 20, "lease_seconds": 30},
    }
    buffer = harness(**sections)
    buffer.register(20)
    buffer.announce(0, 0)
    buffer.put([trajectory(lease=0, tokens=[n]) for n in range(30)], 0)
    assert buffer.sample(0, prompts=2, samples=2) is None
    assert len(buffer.lease(2).visits) == 2
    if says_goodbye:
        buffer.ask(wire.Goodbye(), role="trainer", sender="t.1")
    else:
        buffer.clock.advance(31)
    assert buffer.lease(2, held=[1, 2]) is None
    again = wire.SampleBatch(step=0, prompts=2, samples=2, reference="initial", wait_seconds=0.0)
    assert buffer.ask(again, role="trainer", sender="t.2") is None
    assert len(buffer.lease(2, held=[1, 2]).visits) == 2, "another trainer lacks them again"


def test_a_limit_on_bytes_holds_after_a_restart(harness, trajectory):
    buffer = harness(buffer={"max_payload_bytes": 200})
    buffer.fill(1, 0)
    buffer.put([trajectory(tokens=[n]) for n in range(30)], 0)
    before = buffer.service._served.index.entries(1)
    buffer.service.rebuild()
    assert buffer.service._served.index.entries(1) == before
