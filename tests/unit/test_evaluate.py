"""Which snapshots are evaluated while a trainer publishes and collects beside."""

import shutil

import pytest

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import SnapshotCorrupt, SnapshotError
from tba.common.snapshot import MANIFEST, collect, directory_name, list_snapshots, read
from tba.searcher.evaluate import _prepared
from tba.searcher.host_copy import HostCopy
from tba.tests.weights_lab import WEIGHTS, RandomWeights, flip_a_byte


def take_away(path) -> None:
    """As the trainer collects: the manifest first."""
    (path / MANIFEST).unlink()
    shutil.rmtree(path)


class Overtaken(HostCopy):
    """Copies beside which a trainer publishes and collects what is about to be read, some times."""

    def __init__(self, trainer: RandomWeights, times: int) -> None:
        super().__init__(trainer.directory.parent / "node", "path", SystemClock())
        self._trainer, self._times = trainer, times

    def prepare(self, ref, **options):
        if self._times:
            self._times -= 1
            self._trainer.full()
            take_away(list_snapshots(self._trainer.directory)[-2])
        return super().prepare(ref, **options)


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
def test_the_newest_is_chosen_again_when_it_was_collected(trainer, evaluated, times):
    assert evaluated(Overtaken(trainer, times)) == [2 + times]


def test_a_trainer_that_collects_all_too_soon_is_told_of(trainer, evaluated):
    with pytest.raises(SnapshotError, match=r"raise train\.keep_snapshots"):
        evaluated(Overtaken(trainer, 100))


def test_of_all_snapshots_those_that_were_collected_are_left_out_with_a_word(trainer, evaluated, caplog):
    paths = list_snapshots(trainer.directory)
    take_away(paths[1])
    assert evaluated(Overtaken(trainer, 0), paths=paths) == [0, 2]
    assert "the trainer has collected it" in caplog.text


def test_one_that_is_named_or_damaged_is_no_matter_of_chance(trainer, evaluated):
    oldest, gone, newest = list_snapshots(trainer.directory)
    take_away(gone)
    with pytest.raises(SnapshotError, match="already collected"):
        evaluated(Overtaken(trainer, 0), named=gone)
    assert evaluated(Overtaken(trainer, 0), named=oldest) == [0]
    flip_a_byte(newest / WEIGHTS)
    with pytest.raises(SnapshotCorrupt):
        evaluated(Overtaken(trainer, 0))


def test_a_snapshot_is_collected_before_what_it_is_based_on(trainer, monkeypatch):
    """Else a delta can be seen that cannot be read."""
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
