"""The curriculum: which prompts an epoch skips and postpones, and that a restart changes nothing about it."""

import pytest

from tba.buffer.service.curriculum import Curriculum
from tba.buffer.tools.check import check
from tba.buffer.tools.prune import prune_run, prune_tokens
from tba.common.config import Config, CurriculumSection
from tba.common.wire.fields import NO_POLICY
from tba.tests.helpers.buffer import ServiceHarness
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.puts import make_trajectory

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
            rows = [
                make_trajectory(
                    key, visit.lease, tokens=[self._sequence + n], reward=float(n < self.passes.get(key, 2))
                )
                for n in range(ANSWERS)
            ]
            self._buffer.put(rows, self._sequence)
            self._sequence += ANSWERS
            keys.append(key)
        return keys


def start(harness, path=None, prompts: int = 8, **curriculum: object) -> ServiceHarness:
    return harness(path, curriculum={**ON, **curriculum}, fill=(prompts, 0))


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
    rows = buffer.store.database.all(
        "SELECT epoch, prompt, decision, pass_rate, answers FROM curriculum ORDER BY prompt"
    )
    assert rows == [
        (1, "p1", "skipped", 1.0, 4),
        (1, "p2", "skipped", 0.75, 4),
        (1, "p5", "postponed", 0.0, 4),
        (1, "p6", "postponed", 0.0, 4),
    ]


def test_without_settings_every_epoch_has_every_prompt_and_no_decision_is_stored(harness):
    buffer = start(harness, solved="off", unsolved_last=False)
    searching = Searching(buffer, {"p1": 4, "p5": 0})
    epochs = [searching.visit(8) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(epochs[0])) == 8
    assert buffer.store.database.all("SELECT * FROM curriculum_rows") == []


@pytest.mark.parametrize("visited", [8, 9, 11, 14])
def test_a_restart_within_an_epoch_keeps_its_order_and_what_the_next_one_decides(harness, tmp_path, visited):
    passes = {"p1": 4, "p2": 3, "p5": 0, "p6": 0}
    whole = Searching(start(harness, tmp_path / "whole.sqlite"), passes).visit(30)
    before = start(harness, tmp_path / "parts.sqlite")
    keys = Searching(before, passes).visit(visited)
    before.store.close()
    after = harness(tmp_path / "parts.sqlite", curriculum=ON)
    keys += Searching(after, passes, sequence=visited * ANSWERS).visit(30 - visited)
    assert keys == whole


def test_other_settings_after_a_restart_change_the_next_epoch_and_not_the_current_one(harness, tmp_path):
    passes = {"p1": 4, "p2": 4}
    whole = Searching(start(harness, tmp_path / "whole.sqlite"), passes).visit(14)
    before = start(harness, tmp_path / "parts.sqlite")
    keys = Searching(before, passes).visit(10)
    before.store.close()
    after = harness(tmp_path / "parts.sqlite", curriculum={**ON, "solved": "off"})
    searching = Searching(after, passes, sequence=10 * ANSWERS)
    assert keys + searching.visit(4) == whole
    assert len(set(searching.visit(8))) == 8


def test_answers_that_were_compacted_still_count(harness, tmp_path):
    path = tmp_path / "compacted.sqlite"
    before = harness(path, curriculum=ON, buffer={"prompt_cap": 1}, fill=(8, 0))
    Searching(before, {"p1": 4}).visit(8)
    before.store.close()
    config = Config.model_validate(
        {"run": {"name": "test"}, "buffer": {"database": str(path), "prompt_cap": 1}, "curriculum": ON}
    )
    done = prune_tokens(config, ManualClock(), keep_steps=0, dry_run=False)
    assert done["trajectories_compacted"] == 8 * (ANSWERS - 1)
    after = harness(path, curriculum=ON, buffer={"prompt_cap": 1})
    assert "p1" not in Searching(after, {}, sequence=8 * ANSWERS).visit(7)


def test_a_prompt_with_exactly_the_pass_rate_is_solved():
    # In binary, 0.28 * 25 is a little more than 7.
    curriculum = Curriculum(CurriculumSection(solved=0.28, answers=25, revisit_every=1000))
    curriculum.note(7, [0] * 25, [1.0] * 7 + [0.0] * 18)
    assert [one.decision for one in curriculum.decide(1, [7], least=0)] == ["skipped"]


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
    buffer = harness(
        curriculum=ON, train={"prompts_per_step": 3, "publish_every": 1}, buffer={"max_staleness": max_staleness}
    )
    buffer.register(8)
    buffer.announce(0, 0)
    state = buffer.service.state
    for prompt, key in state.prompt_keys.items():
        state.curriculum.note(
            prompt, [0] * 4, [1.0] * (3 if key in ("p0", "p1") else 4) + [0.0] * (key in ("p0", "p1"))
        )
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


def test_check_counts_skipped_prompts_and_finds_a_missing_decision(harness):
    buffer = start(harness)
    Searching(buffer, {"p1": 4}).visit(20)
    results = {row["check"]: row["result"] for row in check(buffer.store.path)}
    assert set(results.values()) == {"ok"}
    with buffer.store.transaction():
        buffer.store.database.execute("DELETE FROM curriculum_rows WHERE epoch = 1", ())
    results = {row["check"]: row["result"] for row in check(buffer.store.path)}
    assert results["past epochs are complete"] == "fail"


def test_pruning_a_run_leaves_none_of_its_decisions(harness, tmp_path):
    buffer = start(harness, tmp_path / "two.sqlite")
    Searching(buffer, {"p1": 4}).visit(9)
    buffer.store.open_run("other", seed=0, config={}, software={})
    buffer.store.close()
    prune_run(tmp_path / "two.sqlite", "test", archive=None, dry_run=False)
    assert {row["result"] for row in check(tmp_path / "two.sqlite")} == {"ok"}
