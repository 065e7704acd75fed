"""The choice of snapshots to evaluate while a trainer publishes and deletes snapshots."""

import shutil
from contextlib import closing
from itertools import count
from typing import Any, cast

import numpy as np
import pytest

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.rendering import PromptRenderer
from tba.common.weights.node_store import pin_path
from tba.common.weights.snapshot import MANIFEST, collect, directory_name, list_snapshots, read
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import WeightsRef
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.evaluation.answers import Answer, Question, for_storage
from tba.searcher.evaluation.evaluator import _prepared, open_evaluator, read_subject
from tba.searcher.evaluation.follower import Follower
from tba.searcher.tasks.task import Prompt
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.weights import WEIGHTS, RandomWeights, flip_a_byte


def delete(path) -> None:
    """Delete a snapshot as the trainer does: the manifest first."""
    (path / MANIFEST).unlink()
    shutil.rmtree(path)


class Overtaken(SnapshotAssembler):
    """An assembler that loses `times` races with a trainer, which deletes the snapshot that is about to be read."""

    def __init__(self, trainer: RandomWeights, times: int) -> None:
        super().__init__(trainer.directory.parent / "node", "path", SystemClock())
        self._trainer, self._times = trainer, times

    def assemble(self, ref, **options):
        if self._times:
            self._times -= 1
            self._trainer.full()
            delete(list_snapshots(self._trainer.directory)[-2])
        return super().assemble(ref, **options)


@pytest.fixture
def trainer(tmp_path):
    trainer = RandomWeights(tmp_path / "snapshots")
    for _ in range(3):
        trainer.full()
    return trainer


@pytest.fixture
def evaluated(tmp_path):
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})

    def run(copies, named=None, paths=None) -> list[int]:
        return [found.manifest.version for found, _ in _prepared(config, copies, named, paths)]

    return run


@pytest.mark.parametrize("times", [0, 1, 3])
def test_the_newest_snapshot_is_chosen_again_if_it_was_deleted(trainer, evaluated, times):
    assert evaluated(Overtaken(trainer, times)) == [2 + times]


def test_a_trainer_that_deletes_every_snapshot_too_soon_is_an_error(trainer, evaluated):
    with pytest.raises(SnapshotError, match=r"raise train\.keep_snapshots"):
        evaluated(Overtaken(trainer, 100))


def test_deleted_snapshots_are_skipped_with_a_warning(trainer, evaluated, caplog):
    paths = list_snapshots(trainer.directory)
    delete(paths[1])
    assert evaluated(Overtaken(trainer, 0), paths=paths) == [0, 2]
    assert "the trainer has deleted it" in caplog.text


def test_a_named_snapshot_that_was_deleted_and_a_damaged_one_are_errors(trainer, evaluated):
    oldest, gone, newest = list_snapshots(trainer.directory)
    delete(gone)
    with pytest.raises(SnapshotError, match="already deleted"):
        evaluated(Overtaken(trainer, 0), named=gone)
    assert evaluated(Overtaken(trainer, 0), named=oldest) == [0]
    flip_a_byte(newest / WEIGHTS)
    with pytest.raises(SnapshotCorrupt):
        evaluated(Overtaken(trainer, 0))


def test_a_delta_is_deleted_before_its_base(trainer, monkeypatch):
    """Otherwise a delta would be listed that cannot be read."""
    trainer.delta()
    trainer.full()
    remove, seen = shutil.rmtree, []

    def watched(path) -> None:
        there = {found.name: read(found).manifest for found in list_snapshots(trainer.directory)}
        seen.append(path.name)
        assert {directory_name(manifest.base) for manifest in there.values() if manifest.base is not None} <= set(there)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", watched)
    collect(trainer.directory, keep_last=1, keep_every=0)
    assert seen == ["v00000003", "v00000002", "v00000001"]


def test_what_is_stored_of_responses_is_cut_to_their_ends_and_to_a_number_of_bytes():
    prompts = [Prompt(f"p{number}", "text", "42") for number in range(3000)]
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=8)
    one = Answer(Question(0, np.zeros(1, np.int32), greedy), text="é" * 9000 + "so it is 41\ud800", error="reward: no")
    stored = for_storage(["text"] * 3000, prompts, [one] * 3000)
    assert 8 << 19 < sum(len(row["response"].encode()) for row in stored) < 8 << 20
    assert (len(stored[0]["response"]), stored[0]["response"][-12:]) == (4000, "so it is 41?")
    assert (stored[0]["prompt"], stored[0]["answer"], stored[0]["error"]) == ("p0", "42", "reward: no")
    assert len(for_storage(["text"] * 7, prompts, [one] * 3000)) == 7


class Asked(Exception):
    """Raised in place of starting an engine."""


def test_the_engine_of_an_evaluation_learns_how_long_its_prompts_are(tmp_path, monkeypatch, example_model):
    """vLLM derives from it how many answers its KV cache holds."""

    def make_engine(*_: Any, **named: Any) -> None:
        raise Asked(named["prompt_tokens"])

    monkeypatch.setattr("tba.searcher.evaluation.evaluator.make_engine", make_engine)
    settings = {"run": {"dir": str(tmp_path)}, "model": {"path": str(example_model)}, "task": {"reward_workers": 0}}
    config = Config.model_validate(settings)
    with pytest.raises(Asked, match="^6$"), open_evaluator(config, read_subject(config), device="cpu", name="eval"):
        pass


def test_what_serves_stays_pinned_when_the_next_snapshot_is_refused(trainer, tmp_path, example_model, monkeypatch):
    """The engine restores its weights from these files."""
    settings = {"run": {"dir": str(tmp_path)}, "model": {"path": str(example_model)}, "task": {"reward_workers": 0}}
    settings |= {"search": {"engine": "transformers"}}
    config = Config.model_validate(settings)
    served, refused = (not_none(pin_path(path)) for path in list_snapshots(trainer.directory)[:2])
    with open_evaluator(config, read_subject(config), device="cpu", name="eval") as (evaluator, _):
        evaluator.serving.callback(served.release)
        # Prompts are tokenized when the evaluator opens, not for each snapshot.
        monkeypatch.delattr(PromptRenderer, "ids")
        # Of another model than the engine's.
        with pytest.raises(SnapshotError):
            evaluator.evaluate(read(refused.path), refused)
        assert (served._descriptor is None, refused._descriptor is None) == (False, True)
    assert served._descriptor is None


@pytest.mark.slow
def test_only_a_setting_that_changes_a_number_makes_another_evaluation(example_model):
    def settings(**section) -> str:
        return read_subject(Config.model_validate({"model": {"path": str(example_model)}, "eval": section})).settings

    assert settings(at_end=True) == settings()
    assert settings(samples=4, embedder="encoder") != settings(samples=4)


def test_an_evaluator_that_waits_for_a_trainer_on_another_machine_can_be_stopped(tmp_path, caplog):
    address = "tcp://127.0.0.1:1"
    fetching = Progress()
    assembler = SnapshotAssembler(tmp_path / "node", "auto", SystemClock(), fetching)
    with closing(BufferClient(address, role="evaluator", name="eval")) as client:
        follower = Follower(Config(), cast("Any", None), assembler, fetching, client, SystemClock())
        ref = WeightsRef(version=1, step=1, path="/none/v00000001", manifest_sha256="0" * 64, address=address)
        asked = count()
        follower._evaluate(ref, lambda: next(asked) >= 2)
        assert "snapshot not evaluated" not in caplog.text
        assert client.is_pending(follower._heartbeat_request)
