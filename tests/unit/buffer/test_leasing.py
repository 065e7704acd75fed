"""Leases: which prompts a searcher receives, and what ends a lease."""

import pytest

from tba.common.errors import EXIT_CONFIG, Refused
from tba.common.wire import messages


def test_every_prompt_of_an_epoch_is_leased_once_before_the_next_epoch(harness):
    buffer = harness(fill=(10, 0))
    visits = [visit for _ in range(4) for visit in buffer.lease(5, held=list(range(1, 100))).visits]
    assert sorted(v.prompt_key for v in visits[:10]) == sorted(v.prompt_key for v in visits[10:])
    assert [v.epoch for v in visits] == [0] * 10 + [1] * 10
    assert len({v.lease for v in visits}) == 20


def test_epochs_are_shuffled_by_the_seed(harness):
    orders = []
    for seed in (0, 0, 1):
        buffer = harness(run={"seed": seed}, fill=(20, 0))
        orders.append([v.prompt_key for v in buffer.lease(20).visits])
    assert orders[0] == orders[1] != orders[2]


def test_leases_whose_reply_was_lost_are_granted_again(harness):
    buffer = harness(fill=(10, 0))
    lost = buffer.lease(3).visits
    assert buffer.lease(3, held=[]).visits == lost


def test_an_expired_lease_goes_to_another_searcher_unchanged(harness):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(4, 0))
    visits = buffer.lease(4, sender="dead.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="alive.1").visits} == {v.lease for v in visits}


def open_leases(buffer) -> set[int]:
    """Return the ids of the visits that are open in the database."""
    return {visit.id for visit in buffer.store.visits.open(buffer.run)}


def test_a_put_closes_no_visit_of_another_sender_and_none_of_another_prompt(harness, trajectory):
    buffer = harness(fill=(2, 0))
    theirs, mine = (buffer.lease(1, sender=sender).visits[0] for sender in ("a.1", "b.1"))
    rows = [trajectory(theirs.prompt_key, theirs.lease), trajectory(theirs.prompt_key, mine.lease, tokens=[9])]
    assert buffer.put(rows, 0, sender="b.1").stored == 2
    assert open_leases(buffer) == {theirs.lease, mine.lease}
    buffer.put([trajectory(mine.prompt_key, mine.lease)], 2, sender="b.1")
    assert open_leases(buffer) == set(buffer.service.state.leases.open) == {theirs.lease}


def test_rows_already_stored_close_no_visit(harness, trajectory):
    buffer = harness(fill=(1, 0))
    # The same prompt in two epochs.
    first, second = buffer.lease(2).visits
    buffer.put([trajectory(first.prompt_key, first.lease)], 0)
    buffer.put([trajectory(second.prompt_key, second.lease)], 0)
    assert open_leases(buffer) == {second.lease}


def test_a_late_put_closes_its_visit_unless_it_is_leased_to_another_searcher(harness, trajectory):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(2, 0))
    first, second = buffer.lease(2, sender="slow.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert buffer.lease(1, sender="other.1").visits == [first]
    late = [trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n, visit in enumerate((first, second))]
    assert buffer.put(late, 0, sender="slow.1").stored == 2
    assert open_leases(buffer) == {first.lease}


def test_a_heartbeat_keeps_leases(harness):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(4, 0))
    buffer.lease(2, sender="slow.1")
    buffer.clock.advance(29)
    buffer.ask(messages.Heartbeat(activity="generating", reason="", weights_version=0, metrics={}), sender="slow.1")
    buffer.clock.advance(29)
    buffer.service.expire_leases()
    assert len(buffer.lease(2, sender="other.1").visits) == 2
    assert buffer.service.state.leases.held_by("slow.1") == 2


HELLO = messages.Hello(host="h", pid=1)


def test_a_restarted_searcher_soon_gets_the_leases_of_its_earlier_start(harness):
    buffer = harness(buffer={"lease_seconds": 120}, fill=(4, 0))
    before = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(4)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits} == before


def test_two_living_searchers_with_one_name_keep_their_own_leases(harness):
    buffer = harness(fill=(8, 0))
    first = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(2)
    buffer.ask(messages.Heartbeat(activity="x", reason="", weights_version=0, metrics={}), sender="node-cpu0.aaaa")
    buffer.clock.advance(2)
    buffer.service.expire_leases()
    assert not first & {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits}


def test_a_searcher_that_was_silent_too_long_keeps_leases_not_granted_to_another(harness):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(8, 0))
    mine = [v.lease for v in buffer.lease(4, sender="slow.1").visits]
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    buffer.lease(1, held=mine, sender="slow.1")
    assert not set(mine) & {v.lease for v in buffer.lease(3, sender="other.1").visits}


def test_after_a_goodbye_the_leases_of_a_searcher_go_to_others_and_it_gets_none(harness):
    buffer = harness(fill=(4, 0))
    left = buffer.lease(4, sender="a.1").visits
    buffer.ask(messages.Goodbye(), sender="a.1")
    assert buffer.lease(4, sender="a.1").visits == []
    assert buffer.lease(4, sender="b.1").visits == left


def test_a_run_keeps_its_seed_so_a_restart_with_another_seed_skips_no_prompt(harness, tmp_path):
    path = tmp_path / "same.sqlite"
    first = harness(path, run={"seed": 0}, fill=(10, 0))
    before = [v.prompt_key for v in first.lease(5).visits]
    first.store.close()
    second = harness(path, run={"seed": 1})
    after = [v.prompt_key for v in second.lease(5, held=[1, 2, 3, 4, 5]).visits]
    assert len(set(before + after)) == 10


def test_the_first_fill_is_not_held_back_by_max_staleness(harness):
    buffer = harness(
        buffer={"max_staleness": 0, "min_fill": 100}, train={"prompts_per_step": 4, "publish_every": 1}, fill=(50, 0)
    )
    assert len(buffer.lease(30).visits) == 30


def test_a_request_with_old_weights_is_answered_immediately_and_not_parked(harness):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1}, fill=(4, 0))
    buffer.lease(1)
    assert buffer.lease(1, held=[1]) is None
    buffer.announce(1, 0)
    assert buffer.lease(1, held=[1], version=0).visits == []


def test_other_prompts_under_the_same_run_are_refused(harness):
    buffer = harness(fill=(4, 0))
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
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 4, "publish_every": 1}, fill=(20, 0))
    assert len(buffer.lease(10).visits) == 4
    assert buffer.lease(10, held=[1, 2, 3, 4], sender="s.1") is None


def test_max_staleness_grants_no_lease_to_searchers_with_old_weights(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1}, fill=(20, 0))
    visit = buffer.lease(1).visits[0]
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    assert buffer.sample(0, 1, 2) is not None
    buffer.report(0)
    assert buffer.lease(1, version=0) is None
    buffer.announce(1, 1)
    assert len(buffer.lease(1, version=1).visits) == 1


def test_a_trainer_ahead_of_an_old_copy_of_the_database_gets_new_data(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1}, fill=(20, 0))
    visit = buffer.lease(1).visits[0]
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    # The stored data was recent for step 0, but the trainer's checkpoint is of step 20.
    buffer.announce(1, 20)
    assert buffer.sample(20, 1, 2) is None
    assert len(buffer.lease(1, version=1).visits) == 1


def test_prompts_are_added_in_their_order_and_only_once(harness):
    buffer = harness()
    chunks = {offset: ["p0", "p1", "p2", "p3"][offset : offset + 2] for offset in (0, 1, 2)}

    def register(offset: int) -> int:
        message = messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=4, offset=offset, keys=chunks[offset])
        return buffer.ask(message).message.known

    # The chunk at 2 leaves a gap at first, the one at 1 overlaps.
    assert [register(offset) for offset in (2, 0, 0, 1, 2)] == [0, 2, 2, 3, 4]
    state = buffer.service.state
    order, ids = state.leases.order, dict(state.prompt_ids)
    state.rebuild()
    assert (state.leases.order, list(state.prompt_ids.items())) == (order, list(ids.items()))
    assert list(ids) == ["p0", "p1", "p2", "p3"]


def test_one_searcher_sends_the_prompts_and_another_goes_on_if_it_falls_silent(harness):
    buffer = harness()

    def register(sender: str, offset: int, keys: list[str]) -> messages.Registered:
        message = messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=4, offset=offset, keys=keys)
        return buffer.ask(message, sender=sender).message

    assert not register("a.1", 0, []).wait
    assert register("b.1", 0, []).wait
    assert not register("a.1", 0, ["p0"]).wait
    buffer.clock.advance(9)
    assert register("b.1", 1, []).wait
    buffer.clock.advance(2)
    assert not register("b.1", 1, []).wait
    # The first one was only slow: what it sends counts, and it leaves the rest to the other.
    assert register("a.1", 1, ["p1"]) == messages.Registered(known=2, complete=False, wait=True)
    assert register("b.1", 1, ["p1", "p2", "p3"]) == messages.Registered(known=4, complete=True)
    assert register("a.1", 2, []) == messages.Registered(known=4, complete=True)


@pytest.mark.parametrize("keys", [["p0", "p1", "p0"], ["a", "p2"]])
def test_two_equal_prompt_keys_are_refused_and_leave_nothing(harness, keys):
    buffer = harness()
    if keys[0] == "a":
        buffer.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=5, offset=0, keys=["p0", "p1", "p2"]))
    known = len(buffer.service.state.prompt_ids)
    chunk = messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=5, offset=known, keys=keys)
    with pytest.raises(Refused, match=f"two prompts of task t have the key '{keys[-1]}'") as refused:
        buffer.ask(chunk)
    assert refused.value.exit_code == EXIT_CONFIG
    assert len(buffer.service.state.prompt_ids) == known
    assert (buffer.service.state.task.name is None) == (known == 0), "a corrected task can be registered"


def crowd(harness, searchers: int, leases: int):
    """Return a buffer whose searchers hold all prompts that bounded staleness has room for, and their next requests."""
    prompts = searchers * leases
    buffer = harness(buffer={"max_staleness": 1}, train={"prompts_per_step": prompts // 2, "publish_every": 1})
    buffer.register(2 * prompts)
    buffer.announce(0, 0)
    assert buffer.service.with_room(()) == []
    # All are alive before the first one asks, and each gets its part.
    for n in range(searchers):
        buffer.ask(messages.Heartbeat(activity="x", reason="", weights_version=0, metrics={}), sender=f"s{n}.1")
    buffer.held = {
        f"s{n}.1": [v.lease for v in buffer.lease(leases, sender=f"s{n}.1").visits] for n in range(searchers)
    }
    wait = {
        sender: messages.LeasePrompts(want=leases, held=held, weights_version=0, wait_seconds=1.0)
        for sender, held in buffer.held.items()
    }
    assert all(buffer.ask(request, sender=sender) is None for sender, request in wait.items())
    return buffer, wait


def test_waiting_searchers_wake_only_for_room_and_as_many_as_there_is_room_for(harness, trajectory):
    buffer, waiting = crowd(harness, searchers=6, leases=4)
    asked = waiting.items()
    assert buffer.service.with_room(asked) == []
    # Two visits fail, so two prompts are no longer under way.
    for n, lease in enumerate(buffer.held["s3.1"][:2]):
        prompt = buffer.service.state.prompt_keys[buffer.service.state.leases.open[lease].prompt]
        failed = trajectory(prompt, lease, tokens=[], error="no number", stop_reason="error", reward=0.0)
        buffer.put([failed], n, sender="s3.1")
    assert buffer.service.with_room(asked) == ["s3.1"], "the others have their part"
    assert len(buffer.ask(waiting["s3.1"], sender="s3.1").message.visits) == 2
    assert buffer.service.with_room(asked) == []


def test_new_weights_wake_every_waiting_searcher_once(harness):
    buffer, waiting = crowd(harness, searchers=3, leases=2)
    assert buffer.service.with_room(waiting.items()) == []
    buffer.announce(1, 1)
    assert buffer.service.with_room(waiting.items()) == list(waiting)
    assert buffer.service.with_room(waiting.items()) == []
