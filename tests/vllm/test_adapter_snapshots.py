"""Adapters that a trainer publishes, loaded by an engine at work: its weights are the trainer's policy bit for bit."""

import hashlib

import pytest
import torch

from tba.common import adapter
from tba.common.clock import SystemClock
from tba.common.tensor_file import map_tensors
from tba.searcher.engine import SamplingSettings
from tba.searcher.host_copy import HostCopy
from tba.tests.unit.publish_lab import Press
from tba.tests.unit.tb_lab import random_batch

pytest.importorskip("vllm", reason="vLLM is not installed")

LORA = {"rank": 4, "publish": "adapter", "targets": ["q_proj", "down_proj"]}


@pytest.fixture
def base(lab):
    return lab.model(seed=1, tied=True)


@pytest.fixture
def press(base, tmp_path):
    base.save_pretrained(tmp_path / "model")
    train = {"learning_rate": 0.02, "warmup_steps": 0, "steps": 99}
    press = Press(tmp_path, files=tmp_path / "model", dtype="bfloat16", lora=LORA, **train)
    yield press
    press.close()


def hashes(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(one.view(torch.int16).numpy().tobytes()).hexdigest() for name, one in weights.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_ten_adapters_of_a_trainer_are_loaded_in_flight_bit_for_bit(lab, base, press, tmp_path, packed):
    engine = lab.engine(base, dtype="bfloat16", pack_weights=packed, canary_tolerance=0.5)
    publisher, copies = press.publisher(), HostCopy(tmp_path / "node", "path", SystemClock())
    request = lab.submit(engine, lab.tokens(1, 12), SamplingSettings(1.0, 1.0, 40))
    for step in range(11):
        if step:
            press.learner.step(random_batch(step))
        publisher.publish(step)
        assert publisher.flush(20)
        found, held = copies.prepare(press.announced_ref())
        engine.prepare(found)
        engine.step()
        assert engine.load_weights(found).way == ("exchange" if packed else "in place")
        (in_engine,), expected = engine.call("tba_hashes"), hashes(press.merged())
        assert in_engine == {name: expected[name] for name in in_engine}
        # Packed copies cannot be read back; the file that they were made of can.
        bits = {name: tensor.bits for name, tensor in map_tensors(found.weight_files[0]).items()}
        assert {name: hashlib.sha256(one.tobytes()).hexdigest() for name, one in bits.items()} == expected
        assert found.manifest.change == (adapter.FILE if step else None)
        held.release()
    generation = lab.finish(engine)[request]
    # Scoring a canary steps the engine as well: one or two tokens of each version.
    assert generation.version_runs[:, 0].tolist() == list(range(11))
    assert generation.version_runs[:, 1].sum() == 40
