"""Leases: which prompts a searcher receives, what ends a lease, and what the curriculum skips or postpones."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tba.buffer.service.curriculum import Curriculum
from tba.buffer.service.leases import LeaseBook
from tba.buffer.store.tables.prompts import Decision
from tba.buffer.tools.check import check
from tba.buffer.tools.prune import prune_rows, prune_tokens
from tba.common.config import Config, CurriculumSection
from tba.common.errors import EXIT_CONFIG, Refused
from tba.common.wire import messages
from tba.common.wire.fields import NO_POLICY
from tba.tests.helpers.buffer import ServiceHarness, change
from tba.tests.helpers.puts import make_trajectory, put_message


def test_every_prompt_of_an_epoch_is_leased_once_before_the_next_epoch_shuffled_by_the_seed(harness):
    orders = []
    for seed in (0, 0, 1):
        buffer = harness(run={"seed": seed}, fill=(10, 0))
        visits = [visit for _ in range(4) for visit in buffer.lease(5, held=list(range(1, 100))).visits]
        orders.append([v.prompt_key for v in visits])
        assert sorted(orders[-1][:10]) == sorted(orders[-1][10:])
        assert [v.epoch for v in visits] == [0] * 10 + [1] * 10
        assert len({v.lease for v in visits}) == 20
    assert orders[0] == orders[1] != orders[2]


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
    # Rows that are stored already close none: here the same prompt in another epoch.
    later = next(visit for visit in buffer.lease(2, sender="b.1").visits if visit.prompt_key == mine.prompt_key)
    buffer.put([trajectory(later.prompt_key, later.lease)], 2, sender="b.1")
    assert later.lease in open_leases(buffer)


def test_a_visit_is_open_until_the_last_of_its_single_responses_is_stored(harness, trajectory):
    buffer = harness(fill=(1, 0))
    (visit,) = buffer.lease(1).visits
    rows = [trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(3)]
    for n, row in enumerate(rows):
        assert open_leases(buffer) == {visit.lease}
        assert buffer.put([row], n, closes=n == 2).stored == 1
        # A duplicate, as of a put whose reply was lost.
        assert buffer.put([row], n, closes=n == 2).duplicates == 1
    assert visit.lease not in open_leases(buffer)
    assert buffer.store.database.all("SELECT visit FROM trajectory_rows") == [(visit.lease,)] * 3


def test_a_visit_whose_searcher_died_between_its_responses_is_leased_for_those_that_are_missing(harness, trajectory):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(2, 0))
    (visit,) = buffer.lease(1, sender="dead.1").visits
    rows = [trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(5)]
    buffer.put(rows[:1], 0, sender="dead.1", closes=False)
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert buffer.lease(1, sender="other.1").visits == [replace(visit, stored=1)]
    buffer.put(rows[1:2], 0, sender="other.1", closes=False)
    # From its spool, the second one the last of its group.
    buffer.put(rows[:1], 0, sender="dead.1", closes=False)
    buffer.put(rows[2:3], 1, sender="dead.1", closes=True)
    assert open_leases(buffer) == {visit.lease}
    buffer.put(rows[3:4], 1, sender="other.1", closes=True)
    assert open_leases(buffer) == set()
    sql = "SELECT s.sender, t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender WHERE visit = ?"
    found = sorted(buffer.store.database.all(sql, visit.lease))
    assert found == [("dead.1", 0), ("dead.1", 1), ("other.1", 0), ("other.1", 1)]


def test_a_late_put_closes_its_visit_unless_it_is_leased_to_another_searcher(harness, trajectory):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(2, 0))
    first, second = buffer.lease(2, sender="slow.1").visits
    buffer.clock.advance(31)
    buffer.service.expire_leases()
    assert buffer.lease(1, sender="other.1").visits == [first]
    late = [trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n, visit in enumerate((first, second))]
    assert buffer.put(late, 0, sender="slow.1").stored == 2
    assert open_leases(buffer) == {first.lease}


BEAT = messages.Heartbeat(activity="generating", reason="", weights_version=0, metrics={})


@pytest.mark.parametrize("lives", [False, True])
def test_a_restarted_searcher_soon_gets_the_leases_of_its_earlier_start_unless_that_lives(harness, lives):
    buffer = harness(buffer={"lease_seconds": 120}, fill=(8, 0))
    before = {v.lease for v in buffer.lease(4, sender="node-cpu0.aaaa").visits}
    buffer.ask(messages.Hello(host="h", pid=1), sender="node-cpu0.bbbb")
    buffer.clock.advance(2)
    if lives:
        buffer.ask(BEAT, sender="node-cpu0.aaaa")
    buffer.clock.advance(2)
    buffer.service.expire_leases()
    found = {v.lease for v in buffer.lease(4, sender="node-cpu0.bbbb").visits}
    assert found == before if not lives else not found & before


def test_a_heartbeat_keeps_leases_and_after_a_silence_those_not_granted_to_another_are_kept(harness):
    buffer = harness(buffer={"lease_seconds": 30}, fill=(8, 0))
    mine = [v.lease for v in buffer.lease(4, sender="slow.1").visits]
    buffer.clock.advance(29)
    buffer.ask(BEAT, sender="slow.1")
    buffer.clock.advance(29)
    buffer.service.expire_leases()
    assert buffer.service.state.leases.held_by("slow.1") == 4
    buffer.clock.advance(2)
    buffer.service.expire_leases()
    assert buffer.service.state.leases.held_by("slow.1") == 0
    buffer.lease(1, held=mine, sender="slow.1")
    assert not set(mine) & {v.lease for v in buffer.lease(3, sender="other.1").visits}


def test_leases_whose_reply_was_lost_are_granted_again_and_after_a_goodbye_to_others(harness):
    buffer = harness(fill=(4, 0))
    left = buffer.lease(4, sender="a.1").visits
    assert buffer.lease(4, held=[], sender="a.1").visits == left
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


# Of 30 prompts that one searcher asks for: all before the first fill, then those of the batches that staleness allows.
FILLS = [(0, 0, 4), (1, 0, 8), (3, 0, 16), (7, 0, 30), (0, 1, 30), (0, 100, 30), (1, 3, 30), ("unbounded", 0, 30)]


@pytest.mark.parametrize(("staleness", "min_fill", "granted"), FILLS)
def test_the_first_fill_is_not_held_back_by_max_staleness(harness, staleness, min_fill, granted):
    buffer = harness(
        buffer={"max_staleness": staleness, "min_fill": min_fill},
        train={"prompts_per_step": 4, "publish_every": 1},
        fill=(50, 0),
    )
    assert len(buffer.lease(30).visits) == granted


def register(buffer, offset: int, keys: list[str], sender: str = "s.1", total: int = 4, fingerprint: str = "0" * 64):
    message = messages.RegisterPrompts(task="t", fingerprint=fingerprint, total=total, offset=offset, keys=keys)
    return buffer.ask(message, sender=sender).message


def test_prompts_are_leased_only_when_complete_and_others_are_refused(harness):
    buffer = harness()
    assert register(buffer, 0, ["p0", "p1"]) == messages.Registered(known=2, complete=False)
    with pytest.raises(Refused, match="not registered yet"):
        buffer.lease(1)
    with pytest.raises(Refused, match="other data"):
        register(buffer, 0, ["q0"], fingerprint="1" * 64)
    with pytest.raises(Refused, match="lower train.prompts_per_step"):
        harness(train={"prompts_per_step": 5}).register(4)


def test_max_staleness_limits_leases_and_grants_none_to_searchers_with_old_weights(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 0}, train={"prompts_per_step": 1, "publish_every": 1}, fill=(20, 0))
    (visit,) = buffer.lease(10).visits
    assert buffer.lease(10, held=[visit.lease]) is None
    buffer.put([trajectory(visit.prompt_key, visit.lease, tokens=[n]) for n in range(2)], 0)
    assert buffer.sample(0, 1, 2) is not None
    buffer.report(0)
    assert buffer.lease(1, version=0) is None
    buffer.announce(1, 1)
    # A request with old weights is answered at once, and not parked.
    assert buffer.lease(1, version=0).visits == []
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
    buffer, keys = harness(), ["p0", "p1", "p2", "p3"]
    # The chunk at 2 leaves a gap at first, the one at 1 overlaps.
    known = [register(buffer, offset, keys[offset : offset + 2]).known for offset in (2, 0, 0, 1, 2)]
    assert known == [0, 2, 2, 3, 4]
    state = buffer.service.state
    order, ids = state.leases.order, list(state.prompt_ids.items())
    state.rebuild()
    assert (state.leases.order, list(state.prompt_ids.items())) == (order, ids)
    assert [key for key, _ in ids] == keys


def test_one_searcher_sends_the_prompts_and_another_goes_on_if_it_falls_silent(harness):
    buffer = harness()
    assert not register(buffer, 0, [], "a.1").wait
    assert register(buffer, 0, [], "b.1").wait
    assert not register(buffer, 0, ["p0"], "a.1").wait
    buffer.clock.advance(9)
    assert register(buffer, 1, [], "b.1").wait
    buffer.clock.advance(2)
    assert not register(buffer, 1, [], "b.1").wait
    # The first one was only slow: what it sends counts, and it leaves the rest to the other.
    assert register(buffer, 1, ["p1"], "a.1") == messages.Registered(known=2, complete=False, wait=True)
    assert register(buffer, 1, ["p1", "p2", "p3"], "b.1") == messages.Registered(known=4, complete=True)
    assert register(buffer, 2, [], "a.1") == messages.Registered(known=4, complete=True)


@pytest.mark.parametrize("keys", [["p0", "p1", "p0"], ["a", "p2"]])
def test_two_equal_prompt_keys_are_refused_and_leave_nothing(harness, keys):
    buffer = harness()
    if keys[0] == "a":
        register(buffer, 0, ["p0", "p1", "p2"], total=5)
    state = buffer.service.state
    known = len(state.prompt_ids)
    with pytest.raises(Refused, match=f"two prompts of task t have the key '{keys[-1]}'") as refused:
        register(buffer, known, keys, total=5)
    assert refused.value.exit_code == EXIT_CONFIG
    assert len(state.prompt_ids) == known
    assert (state.task.name is None) == (known == 0), "a corrected task can be registered"


def test_waiting_searchers_wake_for_new_weights_and_room_and_as_many_as_there_is_room_for(harness, trajectory):
    buffer = harness(buffer={"max_staleness": 1}, train={"prompts_per_step": 12, "publish_every": 1}, fill=(48, 0))
    assert buffer.service.leasing.with_room(()) == []
    senders = [f"s{n}.1" for n in range(6)]
    # All are alive before the first one asks, and each gets its part. Together they hold all that staleness allows.
    for sender in senders:
        buffer.ask(BEAT, sender=sender)
    held = {sender: [v.lease for v in buffer.lease(4, sender=sender).visits] for sender in senders}
    waiting = {
        sender: messages.LeasePrompts(want=4, held=own, weights_version=0, wait_seconds=1.0)
        for sender, own in held.items()
    }
    assert all(buffer.ask(request, sender=sender) is None for sender, request in waiting.items())
    asked = waiting.items()
    assert buffer.service.leasing.with_room(asked) == []
    # Two visits fail, so two prompts are no longer under way.
    for n, lease in enumerate(held["s3.1"][:2]):
        prompt = buffer.service.state.prompt_keys[buffer.service.state.leases.open[lease].prompt]
        failed = trajectory(prompt, lease, tokens=[], error="no number", stop_reason="error", reward=0.0)
        buffer.put([failed], n, sender="s3.1")
    assert buffer.service.leasing.with_room(asked) == ["s3.1"], "the others have their part"
    assert len(buffer.ask(waiting["s3.1"], sender="s3.1").message.visits) == 2
    assert buffer.service.leasing.with_room(asked) == []
    buffer.announce(1, 1)
    assert [buffer.service.leasing.with_room(asked) for _ in range(2)] == [senders, []]


ANSWERS = 4
ON = {"solved": 0.75, "unsolved_last": True, "answers": ANSWERS, "revisit_every": 1000}


class Searching:
    """A searcher without an engine: leases prompts, and answers each with `ANSWERS` answers of which some pass."""

    def __init__(self, buffer: ServiceHarness, passes: dict[str, int], sequence: int = 0) -> None:
        self._buffer = buffer
        self.passes = passes
        self._sequence = sequence

    def visit(self, count: int) -> list[str]:
        """Lease and answer this many prompts, one after another. Returns their keys."""
        keys = []
        for _ in range(count):
            (visit,) = self._buffer.lease(1).visits
            key = visit.prompt_key
            rewards = [float(n < self.passes.get(key, 2)) for n in range(ANSWERS)]
            rows = [
                make_trajectory(key, visit.lease, tokens=[self._sequence + n], reward=reward)
                for n, reward in enumerate(rewards)
            ]
            self._buffer.put(rows, self._sequence)
            self._sequence += ANSWERS
            keys.append(key)
        return keys


def start(harness, path=None, **curriculum: object) -> ServiceHarness:
    return harness(path, curriculum={**ON, **curriculum}, fill=(8, 0))


def test_an_epoch_skips_what_is_solved_and_ends_with_what_never_passed(harness):
    buffer = start(harness)
    searching = Searching(buffer, {"p1": 4, "p2": 3, "p5": 0, "p6": 0})
    assert len(searching.visit(8)) == 8
    shuffled = [buffer.service.state.prompt_keys[prompt] for prompt in buffer.service.state.leases.shuffled(1)]
    first = [key for key in shuffled if key not in ("p1", "p2", "p5", "p6")]
    last = [key for key in shuffled if key in ("p5", "p6")]
    assert searching.visit(6) == [*first, *last]
    status = buffer.service.status()
    assert (status.epoch, status.skipped_prompts, status.postponed_prompts) == (1, 2, 2)
    query = "SELECT epoch, prompt, decision, pass_rate, answers FROM curriculum ORDER BY prompt"
    assert buffer.store.database.all(query) == [
        (1, "p1", "skipped", 1.0, 4),
        (1, "p2", "skipped", 0.75, 4),
        (1, "p5", "postponed", 0.0, 4),
        (1, "p6", "postponed", 0.0, 4),
    ]


@pytest.mark.parametrize(
    ("visited", "count", "changes"),
    [(8, 30, {}), (9, 30, {}), (11, 30, {}), (14, 30, {}), (10, 14, {"solved": "off", "unsolved_last": False})],
)
def test_a_restart_within_an_epoch_keeps_its_order_and_the_settings_then_decide_of_the_next_one(
    harness, tmp_path, visited, count, changes
):
    passes = {"p1": 4, "p2": 3, "p5": 0, "p6": 0}
    whole = Searching(start(harness, tmp_path / "whole.sqlite"), passes).visit(count)
    before = start(harness, tmp_path / "parts.sqlite")
    keys = Searching(before, passes).visit(visited)
    before.store.close()
    restarted = harness(tmp_path / "parts.sqlite", curriculum={**ON, **changes})
    after = Searching(restarted, passes, sequence=visited * ANSWERS)
    assert keys + after.visit(count - visited) == whole
    if changes:
        assert len(set(after.visit(8))) == 8


def test_answers_that_were_compacted_still_count(harness, tmp_path):
    path = tmp_path / "compacted.sqlite"
    before = harness(path, curriculum=ON, buffer={"prompt_cap": 1}, fill=(8, 0))
    Searching(before, {"p1": 4}).visit(8)
    before.store.close()
    config = Config.model_validate(
        {"run": {"name": "test"}, "buffer": {"database": str(path), "prompt_cap": 1}, "curriculum": ON}
    )
    done = prune_tokens(config, keep_steps=0, dry_run=False)
    assert done["trajectories_compacted"] == 8 * (ANSWERS - 1)
    after = harness(path, curriculum=ON, buffer={"prompt_cap": 1})
    assert "p1" not in Searching(after, {}, sequence=8 * ANSWERS).visit(7)


def test_a_failed_transaction_takes_back_the_epoch_that_it_began(harness):
    buffer = start(harness)
    searching = Searching(buffer, {"p1": 4})
    searching.visit(8)
    state = buffer.service.state

    def fail() -> None:
        with buffer.service.transaction():
            state.begin_epoch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert state.leases.epoch == 1
    state.rebuild()
    assert state.leases.epoch == 0
    assert "p1" not in searching.visit(7)


def test_a_solved_prompt_is_revisited_and_comes_back_when_it_is_forgotten(harness):
    buffer = start(harness, revisit_every=3)
    searching = Searching(buffer, {"p1": 4})
    searching.visit(8)
    state = buffer.service.state
    # `p1` has id 2, so it is visited in epochs 1, 4, ...
    assert state.prompt_ids["p1"] == 2
    assert ["p1" in searching.visit(count) for count in (8, 7, 7)] == [True, False, False]
    searching.passes["p1"] = 2
    assert ["p1" in searching.visit(8) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize(("max_staleness", "kept"), [("unbounded", 3), (1, 6)])
def test_an_epoch_keeps_enough_prompts_for_the_batches_under_way(harness, max_staleness, kept):
    train, limits = {"prompts_per_step": 3, "publish_every": 1}, {"max_staleness": max_staleness}
    buffer = harness(curriculum=ON, train=train, buffer=limits, fill=(8, 0))
    state = buffer.service.state
    for prompt, key in state.prompt_keys.items():
        state.curriculum.note(prompt, [0] * 4, [1.0, 1.0, 1.0, float(key not in ("p0", "p1"))])
    state.begin_epoch()
    assert len(state.leases.order) == kept
    assert {"p0", "p1"} <= {state.prompt_keys[prompt] for prompt in state.leases.order}, "the least solved are kept"


def test_only_the_newest_answers_of_the_run_count():
    curriculum = Curriculum(CurriculumSection.model_validate(ON))

    def decisions() -> list[tuple[int, str, int]]:
        return [(one.prompt, one.decision, one.passed) for one in curriculum.decide(1, [7], least=0)]

    curriculum.note(7, [0, 0, 0], [0.0, 0.0, 0.0])
    assert decisions() == [], "too few answers"
    # A demonstration says nothing of the policy.
    curriculum.note(7, [NO_POLICY], [1.0])
    assert decisions() == []
    curriculum.note(7, [0], [0.5])
    assert decisions() == [(7, "postponed", 0)]
    curriculum.note(7, [1, 1, 1], [1.0, 2.0, 1.0])
    assert decisions() == [(7, "skipped", 3)]
    curriculum.note(7, [1, 1], [0.0, 0.0])
    assert decisions() == []
    # In binary, 0.28 * 25 is a little more than 7.
    exact = Curriculum(CurriculumSection(solved=0.28, answers=25, revisit_every=1000))
    exact.note(7, [0] * 25, [1.0] * 7 + [0.0] * 18)
    assert [one.decision for one in exact.decide(1, [7], least=0)] == ["skipped"]


def test_check_counts_skipped_prompts_finds_a_missing_decision_and_none_is_left_of_a_pruned_run(harness):
    buffer = start(harness)
    Searching(buffer, {"p1": 4}).visit(20)
    path = buffer.store.path
    assert {row["result"] for row in check(path)} == {"ok"}
    change(path, "DELETE FROM curriculum_rows WHERE epoch = 1")
    assert {row["check"]: row["result"] for row in check(path)}["past epochs are complete"] == "fail"
    buffer.store.open_run("other", seed=0, config={}, software={})
    buffer.store.close()
    prune_rows(path, "test", None, keep_steps=0, archive=None, dry_run=False)
    assert {row["result"] for row in check(path)} == {"ok"}


WINDOW = 4
LONGEST = {"curriculum": {"longest_first": True}, "train": {"prompts_per_step": WINDOW}}


def answer(buffer: ServiceHarness, visits: list[messages.Visit], length: Callable[[str], int]) -> list[str]:
    """Put two responses to each visit, of these lengths. Returns the keys of the prompts."""
    for visit in visits:
        tokens = [[visit.lease, n] + [0] * (length(visit.prompt_key) - 2) for n in range(2)]
        buffer.put([make_trajectory(visit.prompt_key, visit.lease, tokens=one) for one in tokens], 2 * visit.lease)
    return [visit.prompt_key for visit in visits]


def own_length(key: str) -> int:
    """Return the length of the responses to a prompt, which no other prompt has."""
    return 5 + 7 * int(key[1:]) % 11


def shuffle_of(buffer: ServiceHarness, epoch: int) -> list[str]:
    return [buffer.service.state.prompt_keys[prompt] for prompt in buffer.service.state.leases.shuffled(epoch)]


def test_of_the_prompts_of_a_batch_those_with_long_responses_are_leased_first(harness):
    buffer = harness(**LONGEST, fill=(10, 0))
    first = answer(buffer, buffer.lease(10).visits, own_length)
    assert first == shuffle_of(buffer, 0), "nothing is known yet"
    # The lease ends in a window: the next one goes on there.
    second = [key for want in (3, 5, 2) for key in answer(buffer, buffer.lease(want).visits, own_length)]
    shuffled = shuffle_of(buffer, 1)
    windows = [shuffled[start : start + WINDOW] for start in (0, 4, 8)]
    assert second == [key for window in windows for key in sorted(window, key=own_length, reverse=True)]


def test_a_prompt_without_responses_counts_as_average(harness, trajectory):
    buffer = harness(curriculum={"longest_first": True}, train={"prompts_per_step": 6}, fill=(6, 0))
    for n, length in enumerate((2, 30, 4, 20)):
        buffer.put([trajectory(f"p{n}", 0, tokens=[n] * length)], n)
    # What no policy of the run gave says nothing of its lengths, and an error without tokens neither.
    imported = trajectory("p4", 0, version=7, tokens=[1] * 90)
    buffer.ask(*put_message([imported]), sender="i.1", role="importer")
    buffer.put([trajectory("p5", 0, tokens=[], error="none", stop_reason="error")], 4)
    unknown = [key for key in shuffle_of(buffer, 0) if key in ("p4", "p5")]
    assert [visit.prompt_key for visit in buffer.lease(6).visits] == ["p1", "p3", *unknown, "p2", "p0"]


def test_only_the_newest_responses_say_how_long_the_next_will_be(harness, trajectory):
    buffer = harness(fill=(1, 0))
    buffer.announce(1, 1)
    rows = [trajectory("p0", 0, version=n // 8, tokens=[n] * (100 if n < 8 else n)) for n in range(16)]
    # The newest policy's arrive first.
    buffer.put(list(reversed(rows)), 0)
    (prompt,) = buffer.service.state.prompt_keys
    with buffer.service.transaction():
        assert buffer.store.trajectories.newest_lengths([prompt]) == {prompt: sum(range(8, 16)) / 8}


def test_searchers_share_the_long_prompts(harness):
    buffer = harness(curriculum={"longest_first": True}, train={"prompts_per_step": 12}, fill=(12, 0))
    answer(buffer, buffer.lease(12).visits, lambda key: 10 + int(key[1:]))
    senders = ("s.1", "a.1", "b.1")
    for sender in senders:
        buffer.ask(BEAT, sender=sender)
    visits = [buffer.lease(4, sender=sender).visits for sender in senders]
    leased = [[int(visit.prompt_key[1:]) for visit in own] for own in visits]
    assert leased == [[11, 8, 5, 2], [10, 7, 4, 1], [9, 6, 3, 0]]


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("visited", [10, 13, 19])
def test_a_restart_within_a_batch_leases_each_prompt_once(harness, tmp_path, visited, after):
    """With the setting, in the order of a run without a restart; one that takes it back goes on with the shuffle."""

    def keys(buffer: ServiceHarness, count: int) -> list[str]:
        return [key for _ in range(count) for key in answer(buffer, buffer.lease(1).visits, own_length)]

    whole = keys(harness(tmp_path / "whole.sqlite", **LONGEST, fill=(10, 0)), 30)
    before = harness(tmp_path / "parts.sqlite", **LONGEST, fill=(10, 0))
    found = keys(before, visited)
    before.store.close()
    settings = {**LONGEST, "curriculum": {"longest_first": after}}
    restarted = harness(tmp_path / "parts.sqlite", **settings)
    found += keys(restarted, 30 - visited)
    assert [sorted(found[start : start + 10]) for start in (0, 10, 20)] == [sorted(whole[:10])] * 3
    if after:
        assert found == whole
    else:
        rest = [key for key in shuffle_of(restarted, 1) if key not in found[10:visited]]
        assert found[max(visited, 10) : 20] == rest
        assert found[20:] == shuffle_of(restarted, 2)


def test_postponed_prompts_stay_at_the_end_however_long_their_responses():
    book = LeaseBook(0, [1, 2, 3, 4], 0, [], [], [Decision(2, "postponed", 0, 32)])
    book.longest_first(4, 4, 1, lambda prompts: {prompt: 10.0 * (prompt == 2) for prompt in prompts})
    assert book.order[-1] == 2
