"""A follower with a real engine swaps prepared snapshots, and keeps the old weights when one is refused."""

import contextlib
import json
import re
import shutil
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tba.common.config import Config
from tba.common.errors import EngineError, EngineFaulty
from tba.common.system.durable import sha256_of
from tba.common.weights.snapshot import MANIFEST
from tba.searcher.engines.transformers_engine import TransformersEngine
from tba.searcher.weights.follower import WeightsFollower
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.weights import WEIGHTS, flip_a_byte

SEQUENCE = [1, 3, 4, 5, 2, 6]


class Watched(TransformersEngine):
    """The real engine; `given` are the snapshots that it was to load."""

    def load_weights(self, snapshot):
        self.given = [*getattr(self, "given", []), snapshot]
        return super().load_weights(snapshot)


class Follower:
    """A follower with a real engine and a clock that the test moves."""

    def __init__(self, lab, folder) -> None:
        self.engine = cpu_engine(lab.files, Watched, dtype="bfloat16", canary_tolerance=0.5)
        self.clock = ManualClock()
        config = {"run": {"name": "r"}, "search": {"weights_dir": str(folder)}}
        self.weights = WeightsFollower(Config.model_validate(config), self.engine, self.clock)

    def settle(self, newest) -> bool:
        """Update until the newest snapshot has been loaded or refused. True if it was loaded."""
        refused = self.weights._refused
        self.weights.update(newest)
        while self.weights.current != newest and self.weights._refused is refused:
            self.wait()
            self.weights.update(newest)
        return self.weights.current == newest

    def wait(self) -> None:
        """Wait until nothing is being prepared."""
        wait_until(lambda: self.weights._thread is None or not self.weights._thread.running)

    def scores(self):
        return self.engine.score([SEQUENCE])[0]


@pytest.fixture
def lab(publisher_harness):
    lab = publisher_harness(dtype="bfloat16")
    publisher = lab.publisher()

    def publish(step: int):
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(60)
        return lab.announced_ref()

    lab.publish = publish
    return lab


@pytest.fixture
def follower(lab, tmp_path):
    follower = Follower(lab, tmp_path / "node")
    yield follower
    follower.weights.close()


def test_damaged_weights_are_refused_with_the_reason_and_retried_later(lab, follower, tmp_path):
    assert follower.settle(lab.publish(0))
    before = follower.scores()
    newest = lab.publish(1)
    file = lab.config.snapshots / "v00000001" / WEIGHTS
    flip_a_byte(file)
    assert not follower.settle(newest)
    assert "v00000001" in follower.weights.reason
    assert follower.weights.refused_version == 1
    assert np.array_equal(follower.scores(), before)
    flip_a_byte(file)
    follower.weights.update(newest)
    # Too early for a retry: nothing is prepared.
    assert follower.weights._thread is None
    follower.clock.advance(60)
    assert follower.settle(newest)
    assert (follower.weights.reason, follower.weights.refused_version) == ("", None)
    assert not np.array_equal(follower.scores(), before)


@contextlib.contextmanager
def out_of_memory(monkeypatch, engine):
    """The canary finds no memory on the device."""

    def score(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "score", score)
        yield


def test_a_swap_that_runs_out_of_memory_is_refused_and_tried_again(lab, follower, monkeypatch):
    assert follower.settle(lab.publish(0))
    before, newest = follower.scores(), lab.publish(1)
    with out_of_memory(monkeypatch, follower.engine):
        for _ in range(7):
            assert not follower.settle(newest)
            follower.clock.advance(60)
    assert re.search(r"out of memory while v1 .* 2.00 GiB.\): end other", follower.weights.reason)
    assert np.array_equal(follower.scores(), before)
    assert follower.settle(newest)
    assert not np.array_equal(follower.scores(), before)


def test_a_swap_makes_no_second_copy_on_the_device_and_an_engine_that_cannot_restore_its_weights_is_faulty(
    lab, follower, monkeypatch
):
    assert follower.settle(lab.publish(0))
    cloned, newest = [], lab.publish(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", lambda tensor, *_, **__: cloned.append(tensor) or tensor)
        assert follower.settle(newest)
    assert not cloned
    newest = lab.publish(2)
    shutil.rmtree(follower.engine._served.path)
    with out_of_memory(monkeypatch, follower.engine), pytest.raises(EngineFaulty, match="v1 could not be restored: "):
        follower.settle(newest)


def remove_first(lab, count):
    """Publish snapshots 0 to `count`, and remove the files of all but the last."""
    refs = [lab.publish(step) for step in range(count + 1)]
    for ref in refs[:-1]:
        shutil.rmtree(lab.config.snapshots / f"v{ref.version:08d}", ignore_errors=True)
    return refs


def levels(caplog):
    return [one.levelname for one in caplog.records if one.message in ("weights missed", "weights refused")]


def test_snapshots_that_were_replaced_before_they_were_read_are_no_warning(lab, follower, caplog):
    *gone, newest = remove_first(lab, 4)
    caplog.set_level("INFO")
    for ref in gone[:2]:
        assert not follower.settle(ref)
    assert (levels(caplog), follower.weights.refusals, follower.weights.refused_version) == (["INFO"] * 2, 0, None)
    assert "No such file" not in str([vars(one) for one in caplog.records])
    # The third in a row is one: perhaps none can be read on this machine.
    assert not follower.settle(gone[2])
    assert (levels(caplog)[2:], follower.weights.refusals, follower.weights.refused_version) == (["WARNING"], 1, 2)
    assert "No such file" in follower.weights.reason
    assert follower.settle(newest)
    assert not follower.settle(gone[3])
    assert (levels(caplog)[3:], follower.weights.reason) == (["INFO"], "")
    # One that is still missing at the second attempt is one, too.
    follower.clock.advance(60)
    assert not follower.settle(gone[3])
    assert levels(caplog)[4:] == ["WARNING"]


@pytest.mark.slow
def test_the_files_that_serve_are_pinned_and_older_ones_are_released(lab, follower):
    for step in range(6):
        assert follower.settle(lab.publish(step))
    directory = follower.weights._served.pinned.path.parent
    kept = sorted(path.name[:9] for path in directory.glob("v*"))
    assert kept == ["v00000004", "v00000005"]
    assert (follower.weights._served.pinned.path / WEIGHTS).is_file()


def test_a_snapshot_that_is_ready_is_loaded_before_a_newer_one_is_prepared(lab, follower):
    first, second = lab.publish(0), lab.publish(1)
    follower.weights.update(first)
    follower.wait()
    flip_a_byte(lab.config.snapshots / "v00000001" / WEIGHTS)
    follower.weights.update(second)
    assert follower.weights.current == first
    assert not follower.settle(second)
    assert follower.weights.refusals == 1
    assert len(follower.engine.given) == 1


def test_an_unexpected_error_is_reported_and_retried(lab, follower):
    newest = lab.publish(0)
    mute = replace(newest, path="/nowhere/v00000000", address="tcp://no such machine:9")
    assert not follower.settle(mute)
    assert "cannot be dialled" in follower.weights.reason
    follower.clock.advance(60)
    assert not follower.settle(mute)
    assert follower.weights.refusals == 2
    assert follower.settle(newest)


def test_a_malformed_canary_is_refused(lab, follower):
    newest = lab.publish(0)
    manifest = lab.config.snapshots / "v00000000" / MANIFEST
    fields = json.loads(manifest.read_text())
    fields["canary"] = {"sequences": [5], "logprobs": [0.5]}
    manifest.write_text(json.dumps(fields))
    lying = replace(newest, manifest_sha256=sha256_of(manifest))
    assert not follower.settle(lying)
    assert "manifest.json is malformed" in follower.weights.reason


def with_wrong_canary(lab, ref):
    """The same snapshot, whose canary is another model's."""
    manifest = lab.config.snapshots / f"v{ref.version:08d}" / MANIFEST
    fields = json.loads(manifest.read_text())
    fields["canary"]["logprobs"] = [[one - 5.0 for one in logprobs] for logprobs in fields["canary"]["logprobs"]]
    manifest.write_text(json.dumps(fields))
    return replace(ref, manifest_sha256=sha256_of(manifest))


@pytest.mark.slow
def test_a_searcher_gives_up_when_its_engine_refuses_five_snapshots_in_a_row(lab, follower):
    # One that is accepted in between starts the count again.
    for step in range(8):
        ref = lab.publish(step)
        assert follower.settle(with_wrong_canary(lab, ref) if step % 4 else ref) == (step % 4 == 0)
    assert not follower.settle(with_wrong_canary(lab, lab.publish(8)))
    with pytest.raises(EngineError, match=r"refused 5 snapshots in a row, and serves v4; the last: v9 .* differ by 5"):
        follower.settle(with_wrong_canary(lab, lab.publish(9)))


@pytest.mark.slow
def test_the_tolerance_is_advised_only_where_it_helps(lab, follower):
    """Other tensors stay other tensors, whatever the canary's limits are."""
    assert follower.settle(lab.publish(0))
    del follower.engine._shapes["model.norm.weight"]
    for step in (1, 2, 3, 4):
        assert not follower.settle(lab.publish(step))
    with pytest.raises(
        EngineError, match=r"model.norm.weight.*\. Engine and trainer must load the same model directory"
    ):
        follower.settle(lab.publish(5))


def test_a_snapshot_assembled_during_close_is_not_passed_to_the_engine(lab, follower, monkeypatch):
    prepared: list[Any] = []
    assemble = follower.weights._assembler.assemble

    def slow(*given, **named):
        found = assemble(*given, **named)
        follower.weights._thread.stopping.wait(60)
        return found

    monkeypatch.setattr(follower.weights._assembler, "assemble", slow)
    monkeypatch.setattr(follower.engine, "prepare", prepared.append)
    follower.weights.update(lab.publish(0))
    follower.weights.close()
    assert not follower.weights._thread.running
    assert prepared == []


def test_closing_does_not_wait_for_a_trainer_that_is_away(lab, follower):
    away = msgspec.structs.replace(lab.publish(0), path="/nowhere/v00000000", address="tcp://127.0.0.1:9")
    follower.weights.update(away)
    follower.weights.close()
    assert not follower.weights._thread.running
