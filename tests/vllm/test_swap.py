"""Swaps in place, by exchange of packed copies, and from deltas: many in a row, while requests are in flight."""

import ctypes
import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import numpy as np
import psutil
import pytest
import torch

from tba.common.errors import SnapshotError
from tba.common.tensor_file import map_tensors
from tba.searcher.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")

WAYS = {True: "exchange", False: "in place"}
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


# Each value of each setting twice, and not all eight combinations, each of which is an engine.
@pytest.fixture(
    scope="module",
    params=[("float32", True, True), ("bfloat16", True, False), ("float32", False, False), ("bfloat16", False, True)],
    ids=["float32-packed-tied", "bfloat16-packed-untied", "float32-unpacked-untied", "bfloat16-unpacked-tied"],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def dtype(kind):
    return kind[0]


@pytest.fixture(scope="module")
def packed(kind):
    return kind[1]


@pytest.fixture(scope="module")
def tied(kind):
    return kind[2]


@pytest.fixture(scope="module")
def old(lab, tied):
    return lab.rounded(lab.model(seed=1, tied=tied))


@pytest.fixture(scope="module")
def engine(lab, old, dtype, packed):
    engine = lab.engine(old, dtype=dtype, pack_weights=packed, canary_tolerance=BOUNDS[dtype])
    yield engine
    engine.close()


def saved(lab, model, dtype):
    """What the trainer writes of a model whose weights fit bfloat16."""
    return lab.as_bfloat16(model) if dtype == "bfloat16" else model


def hashes(snapshot):
    """sha256 of each tensor of a snapshot's file."""
    return {
        name: hashlib.sha256(tensor.bits.tobytes()).hexdigest()
        for name, tensor in map_tensors(snapshot.weight_files[0]).items()
    }


def test_each_kind_of_engine_swaps_in_its_way(lab, engine, old, dtype, packed):
    report = engine.load_weights(lab.snapshot(old, saved=saved(lab, old, dtype)))
    assert report.way == WAYS[packed]
    assert report.mismatch_mean <= report.mismatch_max <= BOUNDS[dtype]
    assert 0 <= report.mismatch_kl < report.mismatch_max
    assert report.pause_seconds >= report.exchange_seconds + report.canary_seconds


def test_fifty_deltas_leave_the_trainers_weights_bit_for_bit(lab, engine, old, dtype, packed):
    model, generator = old, np.random.default_rng(0)
    last = lab.snapshot(model, saved=saved(lab, model, dtype))
    engine.load_weights(last)
    for number in range(50):
        model = lab.rounded(lab.step(model, number, changed=float(generator.choice([0.001, 0.01, 0.3]))))
        last = lab.delta(last, model, saved=saved(lab, model, dtype))
        report = engine.load_weights(last)
        assert report.way == WAYS[packed]
        assert report.mismatch_max <= BOUNDS[dtype]
    (held,) = engine.call("tba_hashes")
    expected = hashes(last)
    assert held == {name: expected[name] for name in held}
    # Packed copies cannot be read back: what is left are the embedding, norms and biases.
    assert packed or held == expected


def test_a_delta_on_other_weights_than_those_that_serve_loads_the_complete_files(lab, engine, old, dtype, packed):
    base = lab.snapshot(old, saved=saved(lab, old, dtype))
    near = lab.rounded(lab.step(old, 1, changed=0.01))
    delta = lab.delta(base, near, saved=saved(lab, near, dtype))
    far = lab.rounded(lab.model(seed=9, tied=old.config.tie_word_embeddings))
    engine.load_weights(lab.snapshot(far, saved=saved(lab, far, dtype)))
    engine.load_weights(delta)
    (held,) = engine.call("tba_hashes")
    assert held.items() <= hashes(delta).items()


def test_a_torn_delta_leads_to_a_full_load(lab, engine, old, dtype):
    base = lab.snapshot(old, saved=saved(lab, old, dtype))
    engine.load_weights(base)
    model = lab.rounded(lab.step(old, 2, changed=0.05))
    delta = lab.delta(base, model, saved=saved(lab, model, dtype))
    delta.delta.write_bytes(delta.delta.read_bytes()[:-100])
    report = engine.load_weights(delta)
    assert report.way == "reload"
    assert report.mismatch_max <= BOUNDS[dtype]
    (held,) = engine.call("tba_hashes")
    assert held.items() <= hashes(delta).items()


def test_a_delta_that_makes_other_weights_than_its_snapshot_is_found(lab, engine, old, dtype):
    base = lab.snapshot(old, saved=saved(lab, old, dtype))
    engine.load_weights(base)
    one, other = (lab.rounded(lab.step(old, seed, changed=0.05)) for seed in (3, 4))
    honest, wrong = (lab.delta(base, model, saved=saved(lab, model, dtype)) for model in (one, other))
    honest.delta.write_bytes(wrong.delta.read_bytes())
    engine.load_weights(honest)
    (held,) = engine.call("tba_hashes")
    assert held.items() <= hashes(honest).items()


def test_a_prepared_swap_changes_nothing_before_it_is_loaded(lab, engine, old, dtype):
    first = lab.snapshot(old, saved=saved(lab, old, dtype))
    engine.load_weights(first)
    ids = lab.tokens(5, 40)
    before = engine.score([ids])[0]
    model = lab.rounded(lab.model(seed=6, tied=old.config.tie_word_embeddings))
    snapshot = lab.snapshot(model, saved=saved(lab, model, dtype))
    engine.prepare(snapshot)
    assert engine.score([ids])[0].tolist() == before.tolist()
    assert engine.weights_version == first.manifest.version
    engine.load_weights(snapshot)
    np.testing.assert_allclose(engine.score([ids])[0], lab.logprobs(model, ids), atol=BOUNDS[dtype])


def test_packed_copies_are_made_beside_the_steps_and_multiply_in_their_thread_alone(
    lab, engine, old, dtype, packed, monkeypatch
):
    swap = engine._llm.model_executor.driver_worker.worker.tba_swap
    pack, packing, multiplying = swap._pack, set(), set()

    def watched(module, weight):
        packing.add(get_ident())
        multiply = pack(module, weight)

        def counted(*arguments):
            multiplying.add(get_ident())
            return multiply(*arguments)

        return counted

    monkeypatch.setattr(swap, "_pack", watched)
    snapshot = lab.snapshot(old, saved=saved(lab, old, dtype))
    lab.submit(engine, lab.tokens(1, 12), SamplingSettings(1.0, 1.0, 200))
    with ThreadPoolExecutor(1) as beside:
        preparing = beside.submit(engine.prepare, snapshot)
        while engine.in_flight and not preparing.done():
            engine.step()
        preparing.result()
    assert bool(packing) == packed
    assert get_ident() not in packing
    assert not multiplying
    assert engine.load_weights(snapshot).way == WAYS[packed]
    assert multiplying == ({get_ident()} if packed else set())
    lab.finish(engine)


def test_what_is_prepared_and_then_overtaken_is_not_used(lab, engine, old, dtype):
    models = [lab.rounded(lab.model(seed=seed, tied=old.config.tie_word_embeddings)) for seed in (7, 8)]
    stale, wanted = (lab.snapshot(model, saved=saved(lab, model, dtype)) for model in models)
    engine.prepare(stale)
    engine.load_weights(wanted)
    (held,) = engine.call("tba_hashes")
    assert held.items() <= hashes(wanted).items()


def memory_in_use():
    """Resident bytes of this process without what the allocator only keeps: each thread's arena keeps its own."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_a_hundred_swaps_during_generation_lose_nothing_and_hold_no_memory(lab, engine, old, dtype):
    """Prepared in the prefetching thread while stepping goes on; every token keeps the version that produced it."""
    # Files of their own, saved before, so that only the engine's memory is measured.
    models = [lab.rounded(lab.model(seed=seed, tied=old.config.tie_word_embeddings)) for seed in (1, 2)]
    snapshots = [lab.snapshot(models[number % 2], saved=saved(lab, models[number % 2], dtype)) for number in range(100)]
    sampling = SamplingSettings(1.0, 1.0, 30)
    submitted, finished, expected, resident = set(), {}, {}, []
    prefetching = ThreadPoolExecutor(1)  # one thread, as in a searcher: each has a team of OpenMP threads of its own
    for number, snapshot in enumerate(snapshots):
        submitted |= {lab.submit(engine, lab.tokens(number + k, 12), sampling) for k in range(2)}
        preparing = prefetching.submit(engine.prepare, snapshot)
        stepped = 0
        while (engine.in_flight and not preparing.done()) or stepped < 2:  # idle, it would only keep the interpreter
            finished |= {generation.id: generation for generation in engine.step()}
            stepped += 1
        preparing.result()
        report = engine.load_weights(snapshot)
        assert report.mismatch_max <= BOUNDS[dtype]
        expected[snapshot.manifest.version] = models[number % 2]
        resident.append(memory_in_use())
    prefetching.shutdown()
    finished |= lab.finish(engine)
    assert finished.keys() == submitted
    for generation in finished.values():
        assert generation.version_runs[:, 1].sum() == len(generation.response_ids) == 30
        versions = generation.version_runs[:, 0].tolist()
        assert versions == sorted(set(versions))
    # oneDNN keeps up to 7 MB for each number of tokens in a step that it has not seen before: the ten largest jumps.
    # A set of these weights is 0.3 to 0.6 MB: one that is lost per swap makes 80 x 0.3 MB.
    growth = np.sort(np.diff(resident[10:]))[:-10].sum()
    assert growth < 8e6, f"{growth / 1e6:.1f} MB"


def test_each_swap_of_an_engine_that_keeps_its_cache_reuses_prefixes_and_says_so(lab):
    old, new = lab.model(seed=1), lab.model(seed=2)
    engine = lab.engine(old, keep_prefix_cache=True)
    prompt = lab.tokens(1, 200)  # longer than a block of 128
    lab.generate(engine, prompt)
    lab.serve(engine, new)
    generation = lab.generate(engine, prompt)
    pure = lab.response_logprobs(new, prompt, generation.response_ids)
    assert np.abs(generation.logprobs - pure).max() > 0.1, "no prefix was reused"
    with pytest.raises(SnapshotError):  # keys and values of refused weights are never reused
        engine.load_weights(lab.snapshot(old, canary_error=0.1))
    again = lab.generate(engine, prompt)
    np.testing.assert_allclose(again.logprobs, lab.response_logprobs(new, prompt, again.response_ids), atol=1e-4)
    engine.close()


def test_scattering_into_a_shard_is_the_same_as_copying_it():
    """Places of a fused, column-cut parameter, as tensor parallelism makes them."""
    from tba.searcher.weight_places import Place
    from tba.searcher.weight_swap import scattered

    source, parameter = torch.randn(6, 8), torch.zeros(10, 4)
    place = Place("w", "p", (6, 8), (2, 4), (4, 4), 4 * 3, (4, 1))
    positions = np.sort(np.random.default_rng(0).permutation(48)[:20])
    index, values = scattered(place, positions, source.view(-1)[positions].numpy().view(np.uint32), torch.float32)
    parameter.view(-1)[index] = values
    mask = torch.zeros(48, dtype=torch.bool)
    mask[positions] = True
    expected = torch.where(mask.view(6, 8), source, 0)[2:6, 4:8]
    assert torch.equal(parameter[3:7], expected)
    assert not parameter[:3].any()
    assert not parameter[7:].any()
