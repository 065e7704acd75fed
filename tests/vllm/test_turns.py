"""The next turn of an episode: its prefix is in the cache, unless other weights have computed it."""

import pytest

from tba.searcher.engines.engine import SamplingSettings

pytest.importorskip("vllm", reason="vLLM is not installed")

SAMPLING = SamplingSettings(1.0, 1.0, 40, seed=3)


@pytest.fixture(scope="module")
def engine(lab, old):
    # Whole blocks are cached. They have 16 tokens on a GPU, and by default 128 on a CPU.
    return lab.engine(old, max_model_len=512, vllm={"block_size": 32})


def cached(engine):
    return int(engine.metrics["cached_tokens"])


@pytest.mark.parametrize("turns", [2, 4])
def test_the_next_turn_finds_its_prefix_in_the_cache(lab, engine, old, turns):
    lab.serve(engine, old)
    context, in_cache, prefixes = lab.tokens(turns, 250), 0, 0
    for turn in range(turns):
        before = cached(engine)
        generation = lab.generate(engine, context, SAMPLING)
        in_cache += (cached(engine) - before) if turn else 0
        sampled = generation.response_ids.tolist()
        lab.assert_sampled_by(old, context, generation)
        prefixes += len(context) + len(sampled) if turn < turns - 1 else 0
        context = [*context, *sampled, *lab.tokens(100 + turn, 5)]
    assert in_cache >= 0.9 * prefixes


def test_a_turn_after_a_swap_computes_its_prefix_again(lab, engine, old, new):
    lab.serve(engine, old)
    context = lab.tokens(9, 70)
    context += lab.generate(engine, context, SAMPLING).response_ids.tolist()
    version, before = lab.serve(engine, new), cached(engine)
    generation = lab.generate(engine, context, SAMPLING)
    assert cached(engine) == before
    assert generation.version_runs.tolist() == [[version, 40]]
    lab.assert_sampled_by(new, context, generation)
