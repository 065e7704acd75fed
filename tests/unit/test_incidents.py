"""Faults of other systems, brought into this one: each is found, and someone is told (docs/incidents.md)."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tba.buffer.sampling.index import SamplingIndex
from tba.common.clock import SystemClock
from tba.common.config import ObjectiveSection
from tba.common.errors import CanaryMismatch
from tba.common.evaluations import why_not_measured
from tba.common.weights import delta
from tba.common.wire.messages import GetStatus
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks.task import Prompt
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.trainer import make_batch, make_learner, make_row
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights
from tba.trainer.metrics.health import Health
from tba.trainer.model.adapters import BASE, FACTORS, gathered
from tba.trainer.publishing import snapshot_writer

IDS = [1, 3, 4, 5, 2, 6]
ADAPTER = {"rank": 3, "publish": "adapter"}


class Node:
    """A trainer's snapshots on their way to an engine of transformers."""

    def __init__(self, lab: Any, folder: Any) -> None:

        self.lab, self.publisher = lab, lab.publisher()
        self.assembler = SnapshotAssembler(folder, "path", SystemClock())
        self.engine = cpu_engine(lab.files, max_in_flight=4)

    def load(self, step: int, change: Callable[[int], None]) -> None:
        if step:
            change(step)
        self.publisher.publish(step)
        assert self.publisher.flush(60)
        self.engine.load_weights(self.assembler.assemble(self.lab.announced_ref())[0])


@pytest.mark.slow
def test_an_engine_that_leaves_the_adapter_out_refuses_the_snapshot(publisher_harness, tmp_path, monkeypatch):
    """verl #7495: no engine ever had an adapter."""
    from tba.searcher.engines import transformers_engine

    lab = publisher_harness(lora=ADAPTER, steps=99)
    node = Node(lab, tmp_path / "node")
    node.load(0, lab.train_adapters)
    read = transformers_engine._read
    monkeypatch.setattr(transformers_engine, "_read", lambda found: read(replace(found, adapter=None)))
    with pytest.raises(CanaryMismatch, match="v1 does not match the trainer: its log-probabilities differ by"):
        node.load(1, lab.train_adapters)
    assert node.engine.weights_version == 0


@pytest.mark.slow
def test_a_trainer_that_publishes_what_it_began_with_is_told(publisher_harness, monkeypatch, caplog):
    """verl #7495: every synchronisation carried the frozen base. Its canary holds, so no engine refuses it."""
    lab = publisher_harness(lora=ADAPTER, steps=99)
    publisher = lab.publisher()
    frozen = {kind: [(name, tensor.clone()) for name, tensor in gathered(lab.model, kind)] for kind in (BASE, FACTORS)}
    monkeypatch.setattr(snapshot_writer, "gathered", lambda _, kind: iter(frozen[kind]))
    for step in range(1, 7):
        lab.train_adapters(step)
        publisher.publish(step)
        assert publisher.flush(60)
    assert caplog.text.count("snapshots do not change") == 1


@pytest.mark.slow
def test_weights_that_a_wrong_copy_made_nan_are_refused_and_the_old_ones_serve(
    publisher_harness, tmp_path, monkeypatch
):
    """slime #2209: the bytes had the right checksum, and the copy into the experts was wrong."""
    from tba.searcher.engines import transformers_engine

    lab = publisher_harness()
    node = Node(lab, tmp_path / "node")
    node.load(0, lab.change_a_few)
    before, copy = node.engine.score([IDS])[0], transformers_engine._copy

    def once_wrong(targets: dict[str, Any], values: dict[str, Any]) -> None:
        monkeypatch.setattr(transformers_engine, "_copy", copy)
        name = next(name for name in targets if "mlp" in name)
        copy(targets, {**values, name: values[name] * float("nan")})

    monkeypatch.setattr(transformers_engine, "_copy", once_wrong)
    with pytest.raises(CanaryMismatch, match="differ by nan"):
        node.load(1, lab.change_a_few)
    assert np.array_equal(node.engine.score([IDS])[0], before)


@pytest.fixture
def trainer(tmp_path):
    server = CountingServer("tcp://127.0.0.1:*", tmp_path / "snapshots")
    yield RandomWeights(tmp_path / "snapshots", address=server.address)
    server.close()


def the_apply_fails(monkeypatch, _):
    """slime #2104: a failure to apply a delta was swallowed."""
    monkeypatch.setattr(delta, "apply_delta", lambda *_: None)


def the_sender_is_ahead(_, trainer):
    """prime-rl #3386: the sender's baseline moved before the version that it belongs to was committed."""
    trainer._change(0.01)


@pytest.mark.parametrize("fault", [the_apply_fails, the_sender_is_ahead])
def test_a_delta_that_does_not_give_the_published_weights_is_replaced_by_all_of_them(
    trainer, tmp_path, monkeypatch, caplog, fault
):
    node = SnapshotAssembler(tmp_path / "node", "trainer", SystemClock())
    node.assemble(trainer.full())
    fault(monkeypatch, trainer)
    found, _ = node.assemble(trainer.delta())
    assert (found.path / WEIGHTS).read_bytes() == trainer.truth[1]
    assert "deltas not applied, fetching all weights" in caplog.text


def test_a_grader_in_a_thread_gives_errors_and_no_zeros(tmp_path, monkeypatch):
    """verl #5635: math-verify cannot set its alarm there, and all scores became 0."""
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    from tba.searcher.tasks.mathematics import MathTask

    (tmp_path / "rows.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}')
    task = MathTask(str(tmp_path / "rows.jsonl"))
    # The guard of the task is gone as well.
    monkeypatch.setattr(threading, "main_thread", threading.current_thread)
    with ThreadPoolExecutor(1) as pool:
        _, error = pool.submit(score, task, Prompt("p", "", "12"), r"\boxed{3 \cdot 4}", True).result()
    assert why_not_measured([error] * 300).startswith(
        "300 of 300 responses could not be scored: reward of math: ValueError: Math-Verify"
    )


def test_after_a_kill_no_prompt_is_skipped_and_no_response_is_lost(harness, trajectory, tmp_path):
    """OpenRLHF #1322, NeMo-RL #3820: the position in the prompts was ahead of what had been trained on."""
    killed = harness(tmp_path / "buffer.sqlite", fill=(6, 0))
    first, second, *_ = killed.lease(4, sender="a.1").visits
    killed.put([trajectory(one.prompt_key, one.lease) for one in (first, second)], 0, sender="a.1")
    killed.store.close()
    restarted = harness(tmp_path / "buffer.sqlite")
    restarted.clock.advance(3600)
    restarted.service.expire_leases()
    answered = {first.prompt_key, second.prompt_key}
    again = {one.prompt_key for one in restarted.lease(4, sender="b.1").visits}
    assert again == {f"p{n}" for n in range(6)} - answered
    batch = restarted.sample(0, prompts=1, samples=1).message
    assert len(batch.trajectory_ids) == 1


def test_a_buffer_that_offers_only_its_first_group_says_that_prompts_are_missing(harness, monkeypatch):
    """TRL #6804: only the first group of a batch reached the replay buffer."""
    extend = SamplingIndex.extend
    monkeypatch.setattr(SamplingIndex, "extend", lambda self, block: None if self.prompt_ids else extend(self, block))
    buffer = harness(fill=(4, 4))
    assert buffer.sample(0, prompts=4, samples=4) is None
    assert buffer.ask(GetStatus()).message.trainer_waits_for == "1 of 4 prompts have trajectories"


def test_an_engine_that_computes_another_model_is_named_after_the_first_step(caplog):
    """verl-omni #279, slime #830: log-probabilities of engine and trainer drifted apart without a word."""
    row = make_row(1, [1, 2], [3, 4], on_policy=True, sampling_logprobs=np.array([-9.0, -0.1], np.float32))
    learner = make_learner()
    health = Health(ObjectiveSection())
    health.update(0, learner.step(make_batch([row, row], [[0.0, 1.0]])).metrics, 1.0)
    for sentence in ("differ by 4 nats per token for the same weights", "differ by 7 nats at one token"):
        assert sentence in health.warning
        assert sentence in caplog.text
