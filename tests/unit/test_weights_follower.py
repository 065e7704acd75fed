"""Following the trainer with a real engine: swaps what is ready, and goes on with the old weights else."""

import json

import numpy as np
import pytest

from tba.common import adapter, delta
from tba.common.clock import ManualClock
from tba.common.config import Config
from tba.common.durable import sha256_of
from tba.common.snapshot import MANIFEST
from tba.searcher.engine_transformers import TransformersEngine
from tba.searcher.prefetch import Prefetcher
from tba.searcher.weights import WeightsFollower
from tba.tests.weights_lab import WEIGHTS, flip_a_byte

SEQUENCE = [1, 3, 4, 5, 2, 6]


class Watched(TransformersEngine):
    """The real engine, and the snapshots that it was given."""

    def load_weights(self, snapshot):
        self.given = [*getattr(self, "given", []), snapshot]
        return super().load_weights(snapshot)


class Follower:
    """A follower with a real engine and a clock that the test moves."""

    def __init__(self, lab, folder) -> None:
        self.engine = Watched(
            str(lab.files), dtype="bfloat16", device="cpu", max_in_flight=4, seed=0, canary_tolerance=0.5
        )
        self.clock = ManualClock()
        config = {"run": {"name": "r"}, "search": {"weights_dir": str(folder)}}
        self.prefetcher = Prefetcher(Config.model_validate(config), self.clock)
        self.weights = WeightsFollower(self.engine, self.clock, self.prefetcher)

    def settle(self, newest) -> bool:
        """Follow until what is wanted has been loaded or refused. True if it was loaded."""
        refusals = self.weights.refusals
        self.weights.follow(newest)
        while self.weights.current != newest and self.weights.refusals == refusals:
            self.prefetcher.wait(20)
            self.weights.follow(newest)
        return self.weights.current == newest

    def scores(self):
        return self.engine.score([SEQUENCE])[0]


@pytest.fixture
def lab(press):
    lab = press(dtype="bfloat16", full_snapshot_every=100)
    lab.publish = publish(lab)
    return lab


def publish(lab):
    publisher = lab.publisher()

    def one(step: int):
        lab.change_a_few(step)
        publisher.publish(step)
        assert publisher.flush(20)
        return lab.announced_ref()

    return one


@pytest.fixture
def follower(lab, tmp_path):
    follower = Follower(lab, tmp_path / "node")
    yield follower
    follower.weights.close()


def test_following_never_waits_for_a_preparation(lab, follower):
    newest = lab.publish(0)
    assert not follower.weights.follow(newest)  # only begun
    assert follower.weights.current is None
    assert follower.settle(newest)
    assert not follower.weights.follow(newest)


def test_the_delta_is_offered_only_where_the_engine_serves_its_base(lab, follower):
    refs = [lab.publish(step) for step in range(4)]
    for version in (0, 1, 3):
        assert follower.settle(refs[version])
    given = [snapshot.delta for snapshot in follower.engine.given]
    assert [path and path.name for path in given] == [None, delta.FILE, None]
    assert all(snapshot.weight_files[0].is_file() for snapshot in follower.engine.given[1:])


def test_adapters_say_what_changed_on_their_base_and_on_one_another(press, tmp_path):
    lab = press(dtype="bfloat16", lora={"rank": 2, "publish": "adapter"}, steps=99)
    publisher, follower, refs = lab.publisher(), Follower(lab, tmp_path / "node"), []
    for step in range(4):
        if step:
            lab.train_adapters(step)
        publisher.publish(step)
        assert publisher.flush(20)
        refs.append(lab.announced_ref())
    for ref in (refs[1], refs[2], refs[3], refs[0], refs[2]):  # it joins late, and once the base comes back
        assert follower.settle(ref)
    given = [snapshot.delta for snapshot in follower.engine.given]
    assert [path and path.name for path in given] == [None, adapter.FILE, adapter.FILE, None, adapter.FILE]
    follower.weights.close()


def test_damaged_weights_are_refused_with_the_reason_and_tried_again_later(lab, follower, tmp_path):
    assert follower.settle(lab.publish(0))
    before = follower.scores()
    newest = lab.publish(1)
    file = lab.config.snapshots / "v00000001" / delta.FILE
    flip_a_byte(file)
    assert not follower.settle(newest)
    assert "v00000001" in follower.weights.trouble
    assert np.array_equal(follower.scores(), before)
    flip_a_byte(file)
    assert not follower.weights.follow(newest)
    assert not follower.prefetcher.wait(0.3)  # too early: nothing is prepared
    follower.clock.advance(60)
    assert follower.settle(newest)
    assert follower.weights.trouble == ""
    assert not np.array_equal(follower.scores(), before)


def test_the_files_that_serve_are_kept_and_those_before_let_go(lab, follower):
    for step in range(6):
        assert follower.settle(lab.publish(step))
    directory = follower.weights._held.path.parent
    kept = sorted(path.name[:9] for path in directory.glob("v*"))
    assert kept == ["v00000004", "v00000005"]
    assert (follower.weights._held.path / WEIGHTS).is_file()


def test_what_became_ready_between_taking_and_wanting_is_not_prepared_again(lab, follower):
    newest = lab.publish(0)
    follower.weights.follow(newest)
    assert follower.prefetcher.wait(20)
    follower.prefetcher.want(newest, anew=False)
    assert follower.prefetcher._wanted is None
    assert follower.settle(newest)
    assert len(follower.engine.given) == 1


def test_an_error_does_not_take_the_place_of_a_snapshot_that_is_ready(lab, follower):
    first, second = lab.publish(0), lab.publish(1)
    follower.weights.follow(first)
    assert follower.prefetcher.wait(20)
    flip_a_byte(lab.config.snapshots / "v00000001" / delta.FILE)
    follower.prefetcher.want(second, anew=False)
    with follower.prefetcher._changed:
        assert follower.prefetcher._changed.wait_for(lambda: len(follower.prefetcher._results) == 2, 20)
    assert follower.weights.follow(second)
    assert follower.weights.current == first
    assert not follower.weights.follow(second)
    assert follower.weights.refusals == 1


def test_what_nobody_foresaw_is_reported_and_tried_again(lab, follower):
    newest = lab.publish(0)
    mute = newest.model_copy(update={"path": "/nowhere/v00000000", "address": "tcp://no such machine:9"})
    assert not follower.settle(mute)
    assert "ConfigError" in follower.weights.trouble
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
    lying = newest.model_copy(update={"manifest_sha256": sha256_of(manifest)})
    assert not follower.settle(lying)
    assert "v0: TypeError" in follower.weights.trouble


def test_what_is_ready_only_at_the_end_is_not_handed_to_the_engine(lab, follower):
    asked = []
    follower.prefetcher.make_ready = lambda snapshot, anew: asked.append(snapshot) or snapshot
    first, second = lab.publish(0), lab.publish(1)
    follower.weights.follow(first)
    assert follower.prefetcher.wait(20)
    follower.prefetcher.want(second, anew=False)
    follower.weights.close()
    assert not follower.prefetcher._thread.is_alive()
    assert len(asked) == 1


def test_closing_does_not_wait_for_a_trainer_that_is_away(lab, follower):
    away = lab.publish(0).model_copy(update={"path": "/nowhere/v00000000", "address": "tcp://127.0.0.1:9"})
    follower.weights.follow(away)
    follower.weights.close()
    assert not follower.prefetcher._thread.is_alive()
