"""Leases: which prompts a searcher receives, and what ends a lease."""

import pytest

from tba.common.errors import Refused
from tba.common.wire import messages


def test_every_prompt_of_an_epoch_is_leased_once_before_the_next_epoch(harness):
    buffer = harness()
    buffer.register(10)
    visits = [visit for _ in range(4) for visit in buffer.lease(5, held=list(range(1, 100))).visits]
    assert sorted(v.prompt_key for v in visits[:10]) == sorted(v.prompt_key for v in visits[10:])
    assert [v.epoch for v in visits] == [0] * 10 + [1] * 10
    assert len({v.lease for v in visits}) == 20


def test_epochs_are_shuffled_by_the_seed(harness):
    orders = []
    for seed in (0, 0, 1):
        buffer = harness(run={"seed": seed})
        buffer.register(20)
        orders.append([v.prompt_key for v in buffer.lease(20).visits])
    assert orders[0] == orders[1] != orders[2]


def test_leases_whose_reply_was_lost_are_granted_again(harness):
    buffer = harness()
    buffer.register(10)
    lost = buffer.lease(3).visits
    assert buffer.lease(3, held=[]).visits == lost


def test_an_expired_lease_goes_to_another_searcher_unchanged(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    buffer.register(4)
    visits = buffer.lease(4, sender="dead.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="alive.1").visits} == {v.lease for v in visits}


def open_leases(buffer) -> set[int]:
    """Return the ids of the visits that are open in the database."""
    return {visit.id for visit in buffer.store.visits.open(buffer.run)}


def test_a_put_closes_no_visit_of_another_sender_and_none_of_another_prompt(harness, trajectory):
    buffer = harness()
    buffer.register(2)
    buffer.announce(0, 0)
    theirs, mine = (buffer.lease(1, sender=sender).visits[0] for sender in ("a.1", "b.1"))
    rows = [trajectory(theirs.prompt_key, theirs.lease), trajectory(theirs.prompt_key, mine.lease, tokens=[9])]
    assert buffer.put(rows, 0, sender="b.1").stored == 2
    assert open_leases(buffer) == {theirs.lease, mine.lease}
    buffer.put([trajectory(mine.prompt_key, mine.lease)], 2, sender="b.1")
    assert open_leases(buffer) == set(buffer.service.state.leases.open) == {theirs.lease}


def test_rows_already_stored_close_no_visit(harness, trajectory):
    buffer = harness()
    buffer.register(2)
    buffer.announce(0, 0)
    first, second = buffer.lease(2).visits
    buffer.put([trajectory(first.prompt_key, first.lease)], 0)
    buffer.put([trajectory(second.prompt_key, second.lease)], 0)
    assert open_leases(buffer) == {second.lease}


def test_a_late_put_closes_its_visit_unless_it_is_leased_to_another_searcher(harness, trajectory):
    buffer = harness(buffer={"lease_seconds": 30})
    buffer.register(2)
    buffer.announce(0, 0)
    first, second = buffer.lease(2, sender="slow.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert buffer.lease(1, sender="other.1").visits == [first]
    late = [trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n, visit in enumerate((first, second))]
    assert buffer.put(late, 0, sender="slow.1").stored == 2
    assert open_leases(buffer) == {first.lease}


def test_a_heartbeat_keeps_leases(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    buffer.register(4)
    buffer.lease(2, sender="slow.1")
    buffer.clock.advance(29)
    buffer.ask(messages.Heartbeat(activity="generating", reason="", weights_version=0, metrics={}), sender="slow.1")
    buffer.clock.advance(29)
    buffer.service.expire_leases()
    assert len(buffer.lease(2, sender="other.1").visits) == 2
    assert buffer.service.state.leases.held_by("slow.1") == 2


HELLO = messages.Hello(host="h", pid=1, software="x")


def test_a_restarted_searcher_soon_gets_the_leases_of_its_earlier_start(harness):
    buffer = harness(buffer={"lease_seconds": 120})
    buffer.register(4)
    before = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(4)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits} == before


def test_two_living_searchers_with_one_name_keep_their_own_leases(harness):
    buffer = harness()
    buffer.register(8)
    first = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(2)
    buffer.ask(messages.Heartbeat(activity="x", reason="", weights_version=0, metrics={}), sender="node-cpu0.aaaa")
    buffer.clock.advance(2)
    buffer.service.expire_leases()
    assert not first & {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits}


def test_a_searcher_that_was_silent_too_long_keeps_leases_not_granted_to_another(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    buffer.register(8)
    mine = [v.lease for v in buffer.lease(4, sender="slow.1").visits]
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    buffer.lease(1, held=mine, sender="slow.1")
    assert not set(mine) & {v.lease for v in buffer.lease(3, sender="other.1").visits}


def test_nothing_is_leased_after_goodbye(harness):
    buffer = harness()
    buffer.register(4)
    buffer.ask(messages.Goodbye(), sender="a.1")
    assert buffer.lease(4, sender="a.1").visits == []


def test_a_run_keeps_its_seed_so_a_restart_with_another_seed_skips_no_prompt(harness, tmp_path):
    path = tmp_path / "same.sqlite"
    first = harness(path, run={"seed": 0})
    first.register(10)
    before = [v.prompt_key for v in first.lease(5).visits]
    first.store.close()
    second = harness(path, run={"seed": 1})
    after = [v.prompt_key for v in second.lease(5, held=[1, 2, 3, 4, 5]).visits]
    assert len(set(before + after)) == 10


def test_the_first_fill_is_not_held_back_by_max_staleness(harness):
    buffer = harness(buffer={"max_staleness": 0, "min_fill": 100}, train={"prompts_per_step": 4, "publish_every": 1})
    buffer.register(50)
    buffer.announce(0, 0)
    assert len(buffer.lease(30).visits) == 30


def test_a_request_with_old_weights_is_answered_immediately_and_not_parked(harness):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1})
    buffer.register(4)
    buffer.announce(0, 0)
    buffer.lease(1)
    assert buffer.lease(1, held=[1]) is None
    buffer.announce(1, 0)
    assert buffer.lease(1, held=[1], version=0).visits == []


def test_other_prompts_under_the_same_run_are_refused(harness):
    buffer = harness()
    buffer.register(4)
    other = messages.RegisterPrompts(task="t", fingerprint="1" * 64, total=4, offset=0, keys=["q0"])
    with pytest.raises(Refused, match="other data"):
        buffer.ask(other)


def test_a_task_with_fewer_prompts_than_a_batch_is_refused(harness):
    buffer = harness(train={"prompts_per_step": 5})
    with pytest.raises(Refused, match="lower train.prompts_per_step"):
        buffer.register(4)


def test_prompts_arrive_in_chunks_and_are_leased_only_when_complete(harness):
    buffer = harness()
    half = messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=4, offset=0, keys=["p0", "p1"])
    assert buffer.ask(half).message == messages.Registered(known=2, complete=False)
    with pytest.raises(Refused, match="not registered yet"):
        buffer.lease(1)


def test_max_staleness_limits_leases(harness):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 4, "publish_every": 1})
    buffer.register(20)
    buffer.announce(0, 0)
    assert len(buffer.lease(10).visits) == 4
    assert buffer.lease(10, held=[1, 2, 3, 4], sender="s.1") is None


def test_max_staleness_grants_no_lease_to_searchers_with_old_weights(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1})
    buffer.register(20)
    buffer.announce(0, 0)
    visit = buffer.lease(1).visits[0]
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    assert buffer.sample(0, 1, 2) is not None
    buffer.report(0)
    assert buffer.lease(1, version=0) is None
    buffer.announce(1, 1)
    assert len(buffer.lease(1, version=1).visits) == 1


def test_a_trainer_ahead_of_an_old_copy_of_the_database_gets_new_data(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1})
    buffer.register(20)
    buffer.announce(0, 0)
    visit = buffer.lease(1).visits[0]
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    # The stored data was recent for step 0, but the trainer's checkpoint is of step 20.
    buffer.announce(1, 20)
    assert buffer.sample(20, 1, 2) is None
    assert len(buffer.lease(1, version=1).visits) == 1
