"""What the buffer does with each message, on a real database file."""

import dataclasses

import numpy as np
import pytest

from tba.buffer.store import Store
from tba.common import wire
from tba.common.errors import ConfigError, Refused, WireError
from tba.common.trajectory import RESPONSE_IDS


def test_a_put_is_stored_and_a_repeated_put_is_not(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    first = buffer.put([trajectory(), trajectory(tokens=[9])], first_sequence=0)
    again = buffer.put([trajectory(), trajectory(tokens=[9])], first_sequence=0)
    assert (first.stored, first.duplicates) == (2, 0)
    assert (again.stored, again.duplicates) == (0, 2)


def test_a_put_that_overlaps_an_earlier_one_stores_only_what_is_new(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory()], first_sequence=0)
    assert buffer.put([trajectory(), trajectory()], first_sequence=0).stored == 1


def test_of_a_put_that_overlaps_an_earlier_one_each_new_row_has_its_own_values(harness, trajectory):
    buffer = harness()
    buffer.fill(3, 0)
    group = [trajectory(f"p{n % 3}", tokens=[n] * (n + 1), reward=float(n)) for n in range(6)]
    buffer.put(group[1:2], first_sequence=1)
    buffer.put(group[4:5], first_sequence=4)
    assert buffer.put(group, first_sequence=0).stored == 4
    query = "SELECT id, sequence, prompt, reward, response_tokens FROM trajectory_rows ORDER BY sequence"
    rows = buffer.store.database.all(query)
    prompts = buffer.store.prompts.ids(buffer.run)
    assert [row[1:] for row in rows] == [(n, prompts[f"p{n % 3}"], float(n), n + 1) for n in range(6)]
    payloads = buffer.store.trajectories.payloads([row[0] for row in rows])
    assert [np.frombuffer(blobs[RESPONSE_IDS], "<i4").tolist() for blobs in payloads] == [
        [n] * (n + 1) for n in range(6)
    ]
    index = buffer.service._served.index
    entries = sorted((e.id, e.reward) for prompt in index.prompts() for e in index.entries(prompt))
    assert entries == sorted((row[0], row[3]) for row in rows)


def test_payloads_come_in_the_order_asked_and_as_often(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(tokens=[n]) for n in range(4)], first_sequence=0)
    ids = [id_ for (id_,) in buffer.store.database.all("SELECT id FROM trajectory_rows ORDER BY id")]
    asked = [ids[place] for place in (3, 0, 3, 2)]
    tokens = [np.frombuffer(blobs[RESPONSE_IDS], "<i4").tolist() for blobs in buffer.store.trajectories.payloads(asked)]
    assert tokens == [[3], [0], [3], [2]]


def test_two_senders_may_use_the_same_sequence_numbers(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    assert buffer.put([trajectory()], 0, sender="a.1").stored == 1
    assert buffer.put([trajectory()], 0, sender="b.1").stored == 1


def test_a_put_of_an_unknown_prompt_or_version_is_refused(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    with pytest.raises(Refused, match="prompt 'p9' is not registered"):
        buffer.put([trajectory("p9")], 0)
    with pytest.raises(Refused, match="policy version 5 was never announced"):
        buffer.put([trajectory(version=5)], 0)


def test_an_error_row_is_kept_and_never_sampled(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(error="reward: ValueError: no", stop_reason="error")], 0)
    status = buffer.ask(wire.GetStatus()).message
    assert (status.trajectories, status.errors, status.sampleable) == (1, 1, 0)


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


def test_leases_whose_reply_was_lost_are_given_again(harness):
    buffer = harness()
    buffer.register(10)
    lost = buffer.lease(3).visits
    assert buffer.lease(3, held=[]).visits == lost


def test_an_expired_lease_goes_to_another_searcher_as_it_is(harness):
    buffer = harness(buffer={"lease_seconds": 30})
    buffer.register(4)
    visits = buffer.lease(4, sender="dead.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="alive.1").visits} == {v.lease for v in visits}


def open_leases(buffer) -> set[int]:
    """Visits that are not done, by the file."""
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
    assert open_leases(buffer) == set(buffer.service._served.leases.open) == {theirs.lease}


def test_rows_that_are_there_already_close_no_visit(harness, trajectory):
    buffer = harness()
    buffer.register(2)
    buffer.announce(0, 0)
    first, second = buffer.lease(2).visits
    buffer.put([trajectory(first.prompt_key, first.lease)], 0)
    buffer.put([trajectory(second.prompt_key, second.lease)], 0)
    assert open_leases(buffer) == {second.lease}


def test_a_late_put_closes_its_visit_unless_another_searcher_has_got_it(harness, trajectory):
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
    buffer.ask(wire.Heartbeat(activity="generating", reason="", weights_version=0, metrics={}), sender="slow.1")
    buffer.clock.advance(29)
    buffer.service.expire_leases()
    assert len(buffer.lease(2, sender="other.1").visits) == 2
    assert buffer.service._served.leases.held_by("slow.1") == 2


HELLO = wire.Hello(host="h", pid=1, software="x")


def test_a_restarted_searcher_soon_gets_the_leases_of_its_earlier_start(harness):
    buffer = harness(buffer={"lease_seconds": 120})
    buffer.register(4)
    before = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(4)
    buffer.service.expire_leases()
    assert {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits} == before


def test_two_living_searchers_of_one_name_keep_their_own_leases(harness):
    buffer = harness()
    buffer.register(8)
    first = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(HELLO, sender="node-cpu0.bbbb")
    buffer.clock.advance(2)
    buffer.ask(wire.Heartbeat(activity="x", reason="", weights_version=0, metrics={}), sender="node-cpu0.aaaa")
    buffer.clock.advance(2)
    buffer.service.expire_leases()
    assert not first & {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits}


def test_a_searcher_that_was_silent_too_long_keeps_what_nobody_else_has_got(harness):
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
    buffer.ask(wire.Goodbye(), sender="a.1")
    assert buffer.lease(4, sender="a.1").visits == []


def test_a_run_keeps_its_seed_so_that_a_restart_with_another_skips_no_prompt(harness, tmp_path):
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


def test_a_searcher_with_old_weights_is_told_at_once_and_not_parked(harness):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1})
    buffer.register(4)
    buffer.announce(0, 0)
    buffer.lease(1)
    assert buffer.lease(1, held=[1]) is None
    buffer.announce(1, 0)
    assert buffer.lease(1, held=[1], version=0).visits == []


def test_goodbye_frees_leases_at_once(harness):
    buffer = harness()
    buffer.register(4)
    before = {v.lease for v in buffer.lease(4, sender="a.1").visits}
    buffer.ask(wire.Goodbye(), sender="a.1")
    assert {v.lease for v in buffer.lease(4, sender="b.1").visits} == before


def test_other_prompts_under_the_same_run_are_refused(harness):
    buffer = harness()
    buffer.register(4)
    other = wire.RegisterPrompts(task="t", fingerprint="1" * 64, total=4, offset=0, keys=["q0"])
    with pytest.raises(Refused, match="other data"):
        buffer.ask(other)


def test_a_task_with_fewer_prompts_than_a_batch_is_refused(harness):
    buffer = harness(train={"prompts_per_step": 5})
    with pytest.raises(Refused, match="lower train.prompts_per_step"):
        buffer.register(4)


def test_prompts_arrive_in_chunks_and_are_leased_only_when_complete(harness):
    buffer = harness()
    half = wire.RegisterPrompts(task="t", fingerprint="0" * 64, total=4, offset=0, keys=["p0", "p1"])
    assert buffer.ask(half).message == wire.Registered(known=2, complete=False)
    with pytest.raises(Refused, match="not registered yet"):
        buffer.lease(1)


def test_asking_for_a_step_again_gives_the_same_batch(harness):
    buffer = harness()
    buffer.fill(8, 4)
    first = buffer.sample(0, prompts=4, samples=4)
    buffer.fill(8, 4, version=1)
    again = buffer.sample(0, prompts=4, samples=4)
    assert first.message == again.message
    assert first.frames == again.frames


def test_a_batch_carries_the_payload_that_was_put(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(tokens=[11, 12]), trajectory(tokens=[13])], 0)
    answer = buffer.sample(0, prompts=1, samples=2)
    tokens = memoryview(answer.frames[1]).cast("i").tolist()
    assert sorted(tokens) == [11, 12, 13]
    assert answer.message.prompt_key == ["p0", "p0"]


def test_a_batch_that_fits_no_message_is_refused_and_not_recorded(harness, monkeypatch):
    buffer = harness()
    buffer.fill(2, 2)
    tokens = buffer.service._store.trajectories.tokens([1, 2, 3, 4])
    monkeypatch.setattr("tba.buffer.batches.MAX_FRAME_BYTES", 4 * max(tokens) - 1)
    with pytest.raises(Refused, match="at most"):
        buffer.sample(0, 2, 2)
    assert not buffer.service._store.batches.has(buffer.service.run, 0)
    monkeypatch.setattr("tba.buffer.batches.MAX_FRAME_BYTES", 4 * max(tokens))
    frames = buffer.sample(0, 2, 2).frames
    assert max(map(len, frames)) <= 4 * max(tokens) < sum(map(len, frames)), "each frame fits, all together would not"


def test_a_batch_that_cannot_be_filled_waits_with_a_reason(harness):
    buffer = harness()
    buffer.fill(2, 2)
    assert buffer.sample(0, prompts=4, samples=2) is None
    assert buffer.ask(wire.GetStatus()).message.trainer_waits_for == "2 of 4 prompts have trajectories"


def test_reference_logprobs_are_stored_once_and_come_back_with_the_batch(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    buffer.put([trajectory(tokens=[1]), trajectory(tokens=[2])], 0)
    ids = buffer.sample(0, 1, 2).message.trajectory_ids
    buffer.report(0, ids, [-1.25, -2.5])
    after = buffer.sample(1, 1, 2).message
    assert dict(zip(after.trajectory_ids, after.reference_logprobs, strict=True)) == dict(
        zip(ids, [-1.25, -2.5], strict=True)
    )


def test_reference_logprobs_that_came_with_a_put_are_in_the_first_batch(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    rows = [trajectory(tokens=[1], reference_logprob=-1.25), trajectory(tokens=[2])]
    buffer.put(rows[:1], 0)
    # Again, with one that is new: what is there stays as it is.
    buffer.put([trajectory(tokens=[1], reference_logprob=-9.0), rows[1]], 0)
    buffer.put([trajectory(tokens=[3], reference_logprob=-3.5)], 2)
    batch = buffer.sample(0, 1, 3).message
    known = dict(zip(batch.trajectory_ids, batch.reference_logprobs, strict=True))
    assert [known[id_] for id_ in sorted(known)] == [-1.25, None, -3.5]
    buffer.report(0, sorted(known)[1:2], [-2.5])
    again = buffer.sample(1, 1, 3).message
    assert sorted(again.reference_logprobs) == [-3.5, -2.5, -1.25]


def test_staleness_is_counted_in_steps_from_the_oldest_version_of_a_response(harness, trajectory):
    import numpy as np

    buffer = harness(buffer={"recency_window": 20})
    buffer.fill(1, 0)
    buffer.announce(1, step=10)
    spanning = trajectory(tokens=[1, 2, 3], version_runs=np.array([[0, 1], [1, 2]], np.int32))
    buffer.put([spanning, trajectory(tokens=[4], version=1)], 0)
    batch = buffer.sample(12, 1, 2).message
    assert dict(zip(batch.policy_version, batch.staleness, strict=True)) == {0: 12, 1: 2}


def test_staleness_counts_from_the_earliest_step_even_if_its_version_is_newer(harness, trajectory):
    """As after a resume: version 1 was published by a trainer that had gone back to step 5."""
    import numpy as np

    buffer = harness(buffer={"recency_window": 20})
    buffer.register(1)
    buffer.announce(0, step=10)
    buffer.announce(1, step=5)
    runs = np.array([[0, 1], [1, 2]], np.int32)
    buffer.put([trajectory(version_runs=runs), trajectory(tokens=[4], version_runs=np.array([[1, 1]], np.int32))], 0)
    assert set(buffer.sample(12, 1, 2).message.staleness) == {7}


def test_every_version_of_a_response_must_be_known(harness, trajectory):
    import numpy as np

    buffer = harness()
    buffer.fill(1, 0)
    with pytest.raises(Refused, match="policy version 999"):
        buffer.put([trajectory(version_runs=np.array([[0, 1], [999, 2]], np.int32))], 0)


def test_a_put_is_refused_whole_or_not_at_all(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)
    with pytest.raises(WireError, match="JSON cannot hold"):
        buffer.put([trajectory(), trajectory(tokens=[9], metadata={"x": b"bytes"})], 0)
    with pytest.raises(Refused, match="was never announced"):
        buffer.put([trajectory(), trajectory(tokens=[9], version=7)], 0)
    assert buffer.ask(wire.GetStatus()).message.trajectories == 0


def test_max_staleness_limits_what_searchers_may_start(harness):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 4, "publish_every": 1})
    buffer.register(20)
    buffer.announce(0, 0)
    assert len(buffer.lease(10).visits) == 4
    assert buffer.lease(10, held=[1, 2, 3, 4], sender="s.1") is None


def test_max_staleness_gives_no_work_to_searchers_with_old_weights(harness, trajectory):
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


def test_the_memory_equals_one_rebuilt_from_the_file(harness, trajectory):
    buffer = harness(buffer={"prompt_cap": 3})
    buffer.fill(4, 5)
    buffer.lease(3)
    buffer.sample(0, 2, 2)
    buffer.report(0)

    def memory():
        service = buffer.service
        entries = {prompt: service._served.index.entries(prompt) for prompt in service._served.index.prompts()}
        leases = (service._served.leases.epoch, service._served.leases.place, service._served.leases.open)
        return entries, leases, service.state(), service._served.trajectories

    before = memory()
    buffer.service.rebuild()
    assert memory() == before


def test_a_sender_of_another_run_is_refused(harness):
    buffer = harness()
    buffer.run = dataclasses.replace(buffer.run, uuid="f" * 32)
    with pytest.raises(Refused, match="another one"):
        buffer.ask(wire.GetStatus())


def test_a_version_is_never_announced_with_other_content(harness):
    buffer = harness()
    buffer.announce(0, 0)
    with pytest.raises(Refused, match="announced before"):
        buffer.announce(0, 5)


def test_a_finished_run_says_so_and_goes_on_when_a_trainer_comes_back(harness):
    buffer = harness()
    buffer.ask(wire.FinishRun(step=3), role="trainer", sender="t.1")
    assert buffer.service.state().finished
    buffer.ask(wire.Hello(host="h", pid=1, software="x"), role="trainer", sender="t.2")
    assert not buffer.service.state().finished


def test_a_second_server_on_the_same_database_is_refused(harness):
    buffer = harness()
    with pytest.raises(ConfigError, match="a buffer server has"):
        Store(buffer.store.path, durability="process")


def test_rewards_and_timestamps_are_indexed(harness):
    buffer = harness()
    for column in ("reward", "received_at"):
        plan = buffer.store.database.all(
            f"EXPLAIN QUERY PLAN SELECT id FROM trajectory_rows WHERE run = 1 AND {column} > 0"
        )
        assert "USING" in plan[0][3]
        assert column in plan[0][3]


def test_a_failed_transaction_leaves_nothing(harness, trajectory):
    buffer = harness()
    buffer.fill(1, 0)

    def fail_after_a_write():
        with buffer.store.transaction():
            buffer.store.visits.add(buffer.run, 0, 0, 1, "s.1", 0.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_a_write()
    assert buffer.store.visits.open(buffer.run) == []


def test_a_database_of_a_newer_release_is_refused(harness, tmp_path):
    from sqlite_utils import Database

    from tba.common.errors import StorageError

    buffer = harness()
    buffer.store.close()
    database = Database(buffer.store.path)
    database["_sqlite_migrations"].insert({"migration_set": "tba", "name": "9999_future", "applied_at": "now"})
    database.close()
    with pytest.raises(StorageError, match="9999_future"):
        Store(buffer.store.path, durability="process")


def test_a_trainer_that_is_ahead_of_an_old_database_gets_new_data(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1})
    buffer.register(20)
    buffer.announce(0, 0)
    visit = buffer.lease(1).visits[0]
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    buffer.announce(1, 20)  # what is there was fresh for step 0, and the trainer's checkpoint is of step 20
    assert buffer.sample(20, 1, 2) is None
    assert len(buffer.lease(1, version=1).visits) == 1


def test_rows_of_a_batch_are_taken_before_it_is_reported(harness):
    buffer = harness(buffer={"recency_fraction": 1.0}, train={"prompts_per_step": 2})
    buffer.fill(4, 2)
    first, second = ({*buffer.sample(step, 2, 2).message.prompt_key} for step in (0, 1))
    assert first.isdisjoint(second)
