"""Swaps in place, as on a GPU, and by vLLM's reload: many in a row, while requests are in flight."""

import ctypes
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tba.common.errors import SnapshotError
from tba.common.weights.tensor_file import map_tensors
from tba.searcher.engines.engine import SamplingSettings
from tba.tests.runner import size

pytest.importorskip("vllm", reason="vLLM is not installed")

BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
SWAPS = size(60, 100)


@pytest.fixture(
    scope="module", params=[("float32", False), ("bfloat16", True)], ids=["float32-untied", "bfloat16-tied"]
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def dtype(kind):
    return kind[0]


@pytest.fixture(scope="module")
def old(lab, kind):
    return lab.rounded(lab.model(seed=1, tied=kind[1]))


@pytest.fixture(scope="module")
def engine(lab, old, dtype):
    engine = lab.engine(old, dtype=dtype, canary_tolerance=BOUNDS[dtype])
    yield engine
    engine.close()


def hashes(snapshot):
    """sha256 of each tensor of a snapshot's file."""
    return {
        name: hashlib.sha256(tensor.bits.tobytes()).hexdigest()
        for name, tensor in map_tensors(snapshot.weight_files[0]).items()
    }


def in_engine(engine):
    """sha256 of each tensor that the only worker of an engine holds."""

    def of_worker(worker):
        parameters = worker.tba_swap._parameters()
        held = {one.name: one.of_parameter(parameters[one.parameter]) for one in worker.tba_swap._slices}
        return {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data).hexdigest()
            for name, tensor in held.items()
        }

    (held,) = engine._llm.collective_rpc(of_worker)
    return held


def test_a_swap_in_place_reports_its_way_and_its_mismatch(lab, engine, old, dtype):
    report = engine.load_weights(lab.snapshot(old, dtype=dtype))
    assert report.way == "in place"
    assert report.mismatch.mean <= report.mismatch.maximum <= BOUNDS[dtype]
    assert 0 <= report.mismatch.kl < report.mismatch.maximum
    assert report.pause_seconds >= report.exchange_seconds + report.canary_seconds


def test_a_prepared_swap_changes_nothing_before_it_is_loaded_nor_when_it_is_overtaken(lab, engine, old, dtype):
    first = lab.snapshot(old, dtype=dtype)
    engine.load_weights(first)
    ids = lab.tokens(5, 40)
    before = engine.score([ids])[0]
    models = [lab.rounded(lab.model(seed=seed, tied=old.config.tie_word_embeddings)) for seed in (7, 8)]
    stale, wanted = (lab.snapshot(model, dtype=dtype) for model in models)
    engine.prepare(stale)
    assert engine.score([ids])[0].tolist() == before.tolist()
    assert engine.weights_version == first.manifest.version
    engine.load_weights(wanted)
    assert in_engine(engine) == hashes(wanted)


def memory_in_use():
    """Resident bytes of this process, after returning what only the allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_many_swaps_during_generation_lose_nothing_and_leak_no_memory(lab, engine, old, dtype):
    """Each is prepared in another thread while stepping continues; every token keeps the version that produced it."""
    # Saved in advance, so that only the engine's memory is measured.
    models = [lab.rounded(lab.model(seed=seed, tied=old.config.tie_word_embeddings)) for seed in (1, 2)]
    snapshots = [lab.snapshot(models[number % 2], dtype=dtype) for number in range(SWAPS)]
    sampling = SamplingSettings(1.0, 1.0, 30)
    submitted, finished, resident = set(), dict[int, Any](), []
    # One thread, as in a searcher: each has its own team of OpenMP threads.
    preparing_thread = ThreadPoolExecutor(1)
    for number, snapshot in enumerate(snapshots):
        submitted |= {lab.submit(engine, lab.tokens(number + k, 12), sampling) for k in range(2)}
        preparing = preparing_thread.submit(engine.prepare, snapshot)
        stepped = 0
        while (engine.in_flight and not preparing.done()) or stepped < 2:
            finished |= {generation.id: generation for generation in engine.step()}
            stepped += 1
        preparing.result()
        assert engine.load_weights(snapshot).mismatch.maximum <= BOUNDS[dtype]
        resident.append(memory_in_use())
    preparing_thread.shutdown()
    assert in_engine(engine) == hashes(snapshots[-1])
    finished |= lab.finish(engine)
    assert finished.keys() == submitted
    for generation in finished.values():
        assert generation.version_runs[:, 1].sum() == len(generation.response_ids) == 30
        versions = generation.version_runs[:, 0].tolist()
        assert versions == sorted(set(versions))
    # The ten largest jumps are first uses of a size, for which libraries cache code. A set of these weights is 0.3 to
    # 0.6 MB: one that leaks per swap makes (SWAPS - 21) x 0.3 MB, three times the limit.
    growth = np.sort(np.diff(resident[10:]))[:-10].sum()
    assert growth < (SWAPS - 21) * 0.1e6, f"{growth / 1e6:.1f} MB"


def test_with_packed_weights_vllm_reloads_and_a_tied_head_is_not_stale(lab):
    """The way of a CPU in production. A stale head would be off by about 2. In float32: test_tied.py."""
    old, new = (lab.rounded(lab.model(seed=seed, tied=True)) for seed in (1, 2))
    engine = lab.engine(old, dtype="bfloat16", canary_tolerance=0.5, pack_weights=True)
    request = lab.submit(engine, lab.tokens(1, 12))
    for model in (new, old, new):
        snapshot = lab.snapshot(model, dtype="bfloat16")
        engine.prepare(snapshot)
        assert engine.load_weights(snapshot).way == "reload"
        lab.assert_scores(engine, model, atol=0.5)
    with pytest.raises(SnapshotError):
        engine.load_weights(lab.snapshot(old, dtype="bfloat16", canary_error=2.0))
    lab.assert_scores(engine, new, atol=0.5)
    assert lab.finish(engine)[request].version_runs.tolist() == [[snapshot.manifest.version, 20]]
    engine.close()
