"""Swaps of weights in a vLLM engine with CUDA graphs."""

import time

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm]'")

from tba.searcher.engines.engine import SamplingSettings
from tba.tests.vllm.conftest import Lab, addresses

# Heads of dimension 64, which every attention kernel supports.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# The larger the weights of a random model, the more bfloat16 changes its log-probabilities.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05, **HEADS}
# 1.36 B parameters, the layers of Qwen2.5 1.5B.
LARGE = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 32_000, "initializer_range": 0.02,
}  # fmt: skip
# In bfloat16 rounding alone causes up to about 0.15.
TOLERANCE = 0.5


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_thirty_swaps_in_place_under_cuda_graphs(lab, tied, record_property):
    model = lab.rounded(lab.model(seed=1, tied=tied, **SHAPE))
    engine = lab.engine(
        model, dtype="bfloat16", canary_tolerance=TOLERANCE, enforce_eager=False, gpu_memory_utilization=0.3
    )
    mode = str(engine._llm.vllm_config.compilation_config.cudagraph_mode)
    assert "NONE" not in mode
    before, pauses = addresses(engine), []
    for number in range(30):
        # A request in flight keeps its tokens; its later tokens are of the new weights.
        request = lab.submit(
            engine, lab.tokens(number, 12), SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=32)
        )
        for _ in range(3):
            engine.step()
        model = lab.rounded(lab.step(model, number, changed=0.3))
        snapshot = lab.snapshot(model, saved=lab.as_bfloat16(model))
        engine.prepare(snapshot)
        report = engine.load_weights(snapshot)
        assert report.way == "in place"
        assert addresses(engine) == before
        assert len(lab.finish(engine)[request].response_ids) == 32
        pauses.append(report.pause_seconds)
    lab.assert_scores(engine, model, atol=TOLERANCE)
    # Other weights altogether: graphs that read the old ones would answer as before.
    other = lab.rounded(lab.model(seed=9, tied=tied, **SHAPE))
    engine.load_weights(lab.snapshot(other, saved=lab.as_bfloat16(other)))
    prompt = lab.tokens(2, 12)
    lab.assert_sampled_by(other, prompt, lab.generate(engine, prompt), atol=TOLERANCE)
    engine.close()
    record_property("cudagraph_mode", mode)
    record_property("pause_ms_median", 1e3 * float(np.median(pauses)))
    record_property("pause_ms_max", 1e3 * max(pauses))


@pytest.mark.timeout(1200)
def test_the_pause_of_a_swap_is_shorter_than_vllms_own_reload(lab, record_property):
    model = lab.rounded(lab.model(seed=1, **LARGE))
    # vLLM's way first: it copies files that the operating system has in memory, as ours.
    snapshots = [lab.snapshot(one, saved=lab.as_bfloat16(one)) for one in (lab.step(model, 1, changed=0.01), model)]
    settings = {"enforce_eager": False, "gpu_memory_utilization": 0.5, "kv_cache_gib": "auto", "max_in_flight": 64}
    engine = lab.engine(model, dtype="bfloat16", canary_tolerance=TOLERANCE, **settings)
    reloads, reports = [], []
    for snapshot in snapshots * 2:
        started = time.perf_counter()
        engine.call("tba_reload", [*map(str, snapshot.weight_files)], 1)
        reloads.append(time.perf_counter() - started)
    for snapshot in snapshots * 3:
        requests = [lab.submit(engine, lab.tokens(n, 64), SamplingSettings(1.0, 1.0, 32)) for n in range(64)]
        engine.prepare(snapshot)
        for _ in range(5):
            engine.step()
        reports.append(engine.load_weights(snapshot))
        assert lab.finish(engine).keys() == set(requests)
    engine.close()
    assert {report.way for report in reports} == {"in place"}
    # The first of each finds, compiles or registers what the others use again.
    figures = {name: [getattr(one, f"{name}_seconds") for one in reports[1:]] for name in ("pause", "exchange", "read")}
    for name, seconds in (figures | {"vllm_reload": reloads[1:]}).items():
        record_property(f"{name}_ms_median", 1e3 * float(np.median(seconds)))
    assert np.median(figures["pause"]) < np.median(reloads[1:])
