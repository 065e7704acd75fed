"""Adapters that a trainer publishes, loaded by a running engine through vLLM's own LoRA."""

import copy
from typing import Any

import numpy as np
import pytest

from tba.common.clock import SystemClock
from tba.common.errors import CanaryMismatch, SnapshotError
from tba.common.weights import adapter
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.publisher import PublisherHarness
from tba.tests.helpers.trainer import random_batch
from tba.tests.vllm.conftest import cpu_backend

pytest.importorskip("vllm", reason="vLLM is not installed")

LORA = {"rank": 4, "publish": "adapter", "targets": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(lab):
    return lab.model(seed=1, tied=True)


@pytest.fixture
def trainer(base, tmp_path):
    base.save_pretrained(tmp_path / "model")
    train: dict[str, Any] = {"learning_rate": 0.02, "warmup_steps": 0, "steps": 99, "keep_snapshot_every": 4}
    publisher_harness = PublisherHarness(tmp_path, files=tmp_path / "model", dtype="float32", lora=LORA, **train)
    yield publisher_harness
    publisher_harness.close()


class Node:
    """Publishes steps of a trainer, and assembles them."""

    def __init__(self, trainer, directory):
        self.trainer, self.publisher = trainer, trainer.publisher()
        self.assembler = SnapshotAssembler(directory, "path", SystemClock())

    def step(self, number):
        if number:
            self.trainer.learner.step(random_batch(number))
        self.publisher.publish(number)
        assert self.publisher.flush(60)
        return self.assembler.assemble(self.trainer.announced_ref())[0]


def policy(base, trainer):
    """The trainer's policy as a transformers model in float32."""
    model = copy.deepcopy(base)
    model.load_state_dict({name: tensor.float() for name, tensor in trainer.merged().items()}, strict=False)
    return model


@cpu_backend
@pytest.mark.parametrize("packed", [False, True])
def test_adapters_of_a_trainer_are_swapped_in_flight_and_a_wrong_one_is_refused(lab, base, trainer, tmp_path, packed):
    engine = lab.engine(base, pack_weights=packed, lora_rank=4)
    node, ids, full = Node(trainer, tmp_path / "node"), lab.tokens(2, 40), "reload" if packed else "in place"
    request = lab.submit(engine, lab.tokens(1, 12), SamplingSettings(1.0, 1.0, 40))
    # Of step 4 a full snapshot is kept, on which the adapters after it are based.
    expected = {0: full, 4: full, 5: full}
    for step in range(7):
        found = node.step(step)
        assert (found.adapter is None) is (step % 4 == 0)
        engine.prepare(found)
        engine.step()
        assert engine.load_weights(found).way == expected.get(step, "adapter")
        lab.assert_scores(engine, policy(base, trainer), atol=1e-3)
    generation = lab.finish(engine)[request]
    # Scoring a canary steps the engine as well: one or two tokens of each version.
    assert generation.version_runs[:, 0].tolist() == list(range(7))
    assert generation.version_runs[:, 1].sum() == 40
    before, request = engine.score([ids])[0], lab.submit(engine, lab.tokens(1, 12))
    wrong = node.step(7)
    good = adapter.load(wrong.adapter)
    adapter.save(wrong.adapter, adapter.Adapter(good.factors, 10 * good.scaling), rank=4, base=wrong.path)
    with pytest.raises(CanaryMismatch):
        engine.load_weights(wrong)
    np.testing.assert_allclose(engine.score([ids])[0], before, atol=1e-5)
    assert lab.finish(engine)[request].version_runs.tolist() == [[6, 20]]
    (wrong.adapter / adapter.FILE).write_bytes(b"")
    with pytest.raises(SnapshotError):
        engine.load_weights(wrong)
    assert engine.load_weights(node.step(9)).way == "adapter"
    engine.close()


def test_the_transformers_engine_merges_an_adapter_and_vllm_without_adapters_names_the_setting(
    lab, base, trainer, tmp_path
):
    engine, node = lab.transformers_engine(base), Node(trainer, tmp_path / "node")
    for step in range(3):
        engine.load_weights(found := node.step(step))
        lab.assert_scores(engine, policy(base, trainer))
    with pytest.raises(SnapshotError, match=r"started without adapters: set lora\.rank"):
        lab.engine(base).prepare(found)
