"""Settings of vLLM: arguments that pass through, responses in flight, the KV cache, and the dtype of the logits."""

import dataclasses
import logging

import numpy as np
import pytest

from tba.common.config.search import _OWN, SearchSection, installed_arguments, own_argument
from tba.common.errors import ConfigError
from tba.common.system.process import KV_CACHE_NOTICE, NotifySocket
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.engines.vllm.start import _memory
from tba.tests.helpers.clock import ManualClock

pytest.importorskip("vllm", reason="vLLM is not installed")


def config_of(engine):
    return engine._llm.vllm_config


def test_engine_arguments_reach_vllm(lab, old):
    asked = {"max_num_batched_tokens": 512, "enable_prefix_caching": False, "hf_overrides": {"rope_theta": 5_000.0}}
    config = config_of(lab.engine(old, vllm=asked))
    assert config.scheduler_config.max_num_batched_tokens == 512
    assert not config.cache_config.enable_prefix_caching
    assert config.model_config.hf_config.rope_parameters["rope_theta"] or config.model_config.hf_config.rope_theta


def test_an_unknown_engine_argument_is_refused_with_a_similar_one(lab, old):
    with pytest.raises(ConfigError, match=r"no engine argument 'kv_cache_dtyp': did you mean kv_cache_dtype"):
        lab.engine(old, vllm={"kv_cache_dtyp": "fp8"})
    with pytest.raises(ConfigError, match="see the engine arguments in vLLM's documentation"):
        lab.engine(old, vllm={"xyzzy": 1})


def test_the_arguments_in_vllms_source_are_those_of_the_class_and_those_that_tba_keeps_for_itself_exist():
    from vllm import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert installed_arguments() == names
    known = set(names)
    assert _OWN.keys() <= known
    assert {name for name in known if name.startswith("data_parallel")} <= {
        name for name in known if own_argument(name)
    }


def test_auto_puts_as_many_responses_in_flight_as_the_kv_cache_holds(lab, old):
    engine = lab.engine(old, max_in_flight="auto", max_tokens=200, prompt_tokens=28, kv_cache_gib=0.01)
    tokens = int(engine.metrics["kv_cache_tokens"])
    # Keys and values of two layers, one head of 32 numbers, in float32.
    assert tokens == pytest.approx(0.01 * 2**30 / (2 * 2 * 32 * 4), rel=0.05)
    assert engine.max_in_flight == min(tokens // 128, 256)
    # As many as that, of half the budget each, fit at the same time.
    for seed in range(2 * engine.max_in_flight):
        lab.submit(engine, lab.tokens(seed, 28), SamplingSettings(1.0, 1.0, 100))
    # A step takes up to 4,096 tokens of prompts.
    for _ in range(3):
        engine.step()
    # vLLM keeps one block for itself.
    assert engine.max_in_flight - len(engine.scheduler._core.scheduler.running) in (0, 1)
    lab.finish(engine)
    assert engine.metrics["preemptions"] == 0


def test_an_engine_reports_the_size_of_its_kv_cache_with_which_another_start_has_the_same(lab, old, monkeypatch):
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    supervisor = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
    first = lab.engine(old, kv_cache_gib=0.01)
    (notice,) = supervisor.receive()
    supervisor.close()
    assert notice.startswith(KV_CACHE_NOTICE)
    size = notice.removeprefix(KV_CACHE_NOTICE)
    blocks = config_of(first).cache_config.num_gpu_blocks
    # Keys and values of two layers, one head of 32 numbers, in float32.
    assert float(size) * 2**30 == blocks * config_of(first).cache_config.block_size * 2 * 2 * 32 * 4
    again = config_of(lab.engine(old, kv_cache_gib=float(size)))
    assert again.cache_config.num_gpu_blocks == blocks
    # vLLM's defaults are those of offline use.
    offline = EngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]
    scheduler = again.scheduler_config
    assert scheduler.max_num_batched_tokens == min(offline, 256 * scheduler.max_num_seqs)


def test_a_fixed_kv_cache_is_passed_to_vllm_on_a_gpu_too(monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    fixed = SearchSection(kv_cache_gib=1.5, gpu_memory_utilization=0.3)
    assert _memory(fixed) == {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 3 << 29}
    assert _memory(SearchSection(gpu_memory_utilization=0.3)) == {"gpu_memory_utilization": 0.3}


def test_an_auto_limit_counts_no_more_than_the_context_and_at_least_one_response(lab, old, caplog):
    with caplog.at_level(logging.WARNING, logger="tba"):
        engine = lab.engine(old, max_in_flight="auto", max_tokens=1_000_000, kv_cache_gib=0.001)
    assert engine.max_in_flight == engine.metrics["kv_cache_tokens"] // 256
    (record,) = [record for record in caplog.records if "holds less than one visit" in record.message]
    assert record.fields["visit"] == 24


def test_with_a_full_kv_cache_the_canary_is_not_delayed_and_preemptions_are_logged_once_a_minute(lab, old, new, caplog):
    # 15 blocks of 128 tokens, for 20 requests that grow to two blocks each.
    engine = lab.engine(old, kv_cache_gib=0.001)
    scheduler, clock = engine.scheduler, ManualClock()
    scheduler._clock = clock
    for seed in range(20):
        lab.submit(engine, lab.tokens(seed, 100), SamplingSettings(1.0, 1.0, 150, seed=seed))
    with caplog.at_level(logging.WARNING, logger="tba"):
        for _ in range(40):
            engine.step()
        version = lab.serve(engine, new)
        assert engine.step() == [], "the canary waited until others had finished"
        generations = lab.finish(engine)
        assert {int(one.version_runs[-1, 0]) for one in generations.values()} == {version}
        count = engine.metrics["preemptions"]
        assert (len(generations), count > 2, caplog.records) == (20, True, [])
        for _ in range(3):
            clock.advance(61.0)
            scheduler.report(20)
    (record,) = caplog.records
    assert record.fields == {"preemptions": count, "in_flight": 20, "advice": "lower search.max_in_flight"}


def test_logits_in_float32_are_those_of_the_rounded_factors(lab, old):
    """In a bfloat16 model, log-probabilities of float32 logits are finer than bfloat16 can express."""
    import torch

    model = lab.as_bfloat16(old)
    ids = lab.tokens(1, 40)
    steps = {}
    for head_dtype in ("model", "float32"):
        engine = lab.engine(model, dtype="bfloat16", head_dtype=head_dtype, canary_tolerance=0.5)
        kept = engine._llm.model_config.head_dtype
        assert kept == (torch.float32 if head_dtype == "float32" else torch.bfloat16)
        steps[head_dtype] = engine.score([ids])[0]
        engine.close()
    assert 0 < np.abs(steps["float32"] - steps["model"]).max() < 0.5
