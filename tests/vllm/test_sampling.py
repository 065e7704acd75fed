"""The recorded log-probabilities are those of the sampling distribution, and responses end where they should."""

import collections
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tba.common.errors import EngineError
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.tests.runner import size
from tba.tests.vllm.conftest import GREEDY

pytest.importorskip("vllm", reason="vLLM is not installed")


def sampling_logprobs(logits, temperature, top_p):
    """Log of the distribution that temperature and nucleus sampling draw from, in float64."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    order = np.argsort(-probabilities, axis=-1)
    ranked = np.take_along_axis(probabilities, order, -1)
    # A token is kept if the tokens before it do not reach top_p.
    kept = np.cumsum(ranked, -1) - ranked < top_p
    mask = np.zeros_like(kept)
    np.put_along_axis(mask, order, kept, -1)
    probabilities = np.where(mask, probabilities, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(probabilities / probabilities.sum(-1, keepdims=True))


def test_each_request_of_a_mixed_batch_has_the_logprobs_of_its_own_settings(lab, engine, old):
    prompt = lab.tokens(2, 12)
    settings = [(0.0, 1.0), (0.0, 0.3), (1.0, 0.5), (0.5, 1.0), (2.0, 0.9)]
    requests = [lab.submit(engine, prompt, SamplingSettings(t, p, 20, seed=1)) for t, p in settings]
    generations = lab.finish(engine)
    for request, (temperature, top_p) in zip(requests, settings, strict=True):
        response = generations[request].response_ids.tolist()
        logits = lab.logits(old, [*prompt, *response])[len(prompt) - 1 : -1]
        # Greedy: recorded at temperature 1, over the whole vocabulary.
        shape = (temperature, top_p) if temperature else (1.0, 1.0)
        expected = lab.chosen(sampling_logprobs(logits, *shape), response)
        np.testing.assert_allclose(generations[request].logprobs, expected, atol=1e-4)


def test_scoring_is_at_temperature_one_alongside_requests_at_other_temperatures(lab, engine, old):
    for seed in range(4):
        lab.submit(engine, lab.tokens(seed, 12), SamplingSettings(0.3, 0.5, 20, seed=seed))
    engine.step()
    sequences = [lab.tokens(5, 30), lab.tokens(6, 2), [7], []]
    scores = engine.score(sequences)
    assert [len(score) for score in scores] == [29, 1, 0, 0]
    for score, ids in zip(scores[:2], sequences[:2], strict=True):
        np.testing.assert_allclose(score, lab.logprobs(old, ids), atol=1e-4)
    assert len(lab.finish(engine)) == 4


def test_tokens_are_drawn_as_often_as_their_recorded_probabilities(lab, engine, old):
    prompt, draws = lab.tokens(3, 12), size(800, 2000)
    for seed in range(draws):
        lab.submit(engine, prompt, SamplingSettings(1.3, 0.6, 1, seed=seed if seed % 2 else None))
    drawn = collections.Counter(int(g.response_ids[0]) for g in lab.finish(engine).values())
    expected = draws * np.exp(sampling_logprobs(lab.logits(old, prompt)[-1], 1.3, 0.6))
    counts = np.array([drawn[token] for token in range(len(expected))])
    assert counts[expected == 0].sum() == 0
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()


def test_the_same_seed_gives_the_same_response(lab, engine):
    settings = SamplingSettings(1.0, 1.0, 20, seed=11)
    first, second = (lab.generate(engine, lab.tokens(4, 12), settings) for _ in range(2))
    assert first.response_ids.tolist() == second.response_ids.tolist()


def test_a_response_ends_with_the_first_of_several_end_tokens_also_at_the_last_position(lab, engine, old):
    no_tokenizer: Any = None
    ending, prompt = list(range(100, 130)), lab.tokens(6, 12)
    settings = SamplingSettings(1.5, 1.0, 100, stopping=Stopping(no_tokenizer, (), ending))
    for seed in range(20):
        lab.submit(engine, prompt, replace(settings, seed=seed))
    generations = lab.finish(engine).values()
    stopped = [g for g in generations if g.stop_reason == "eos"]
    assert len(stopped) > 10
    assert all(g.response_ids[-1] in ending for g in stopped)
    assert not any(np.isin(g.response_ids[:-1], ending).any() for g in generations)
    first = Stopping(no_tokenizer, (), [int(lab.logits(old, prompt)[-1].argmax())])
    assert lab.generate(engine, prompt, SamplingSettings(0.0, 1.0, 1, stopping=first)).stop_reason == "eos"


def two_letters_per_token() -> Any:
    """Return a tokenizer whose token 0 is "aa", 1 is "ab", and 255 is "pp"."""
    letters = "abcdefghijklmnop"
    words = {first + second: n for n, (first, second) in enumerate(itertools.product(letters, letters))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="aa"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_response_ends_with_the_token_that_completes_a_stop_string_of_its_request(lab, old):
    """As a request to the endpoint may have them, for which vLLM reads the text of responses."""
    tokenizer, prompt = two_letters_per_token(), lab.tokens(9, 12)
    ours = lab.transformers_engine(old)
    whole = lab.generate(ours, prompt).response_ids.tolist()
    text = tokenizer.decode(whole)
    # The second half of token 5, and the first one of token 6.
    stopping = Stopping(tokenizer, ("zz", text[11:13]), [])
    tokens = (text.find(text[11:13]) + 3) // 2
    for engine in (ours, lab.engine(old, tokenizer=tokenizer, serve="8400")):
        stopped = lab.submit(engine, prompt, replace(GREEDY, stopping=stopping))
        other = lab.submit(engine, prompt)
        found = lab.finish(engine)
        assert found[other].response_ids.tolist() == whole
        assert (found[stopped].response_ids.tolist(), found[stopped].stop_reason) == (whole[:tokens], "eos")
        assert found[stopped].version_runs.tolist() == [[0, tokens]]
        assert len(found[stopped].logprobs) == tokens


def test_a_response_ends_with_the_context_and_a_prompt_must_leave_room_for_a_token(lab, engine):
    context = 256 if hasattr(engine, "scheduler") else 512
    for room, budget in ((56, 56), (56, 5_000), (1, 57)):
        generation = lab.generate(engine, lab.tokens(8, context - room), SamplingSettings(1.0, 1.0, budget))
        assert (len(generation.response_ids), generation.stop_reason) == (room, "length")
    with pytest.raises(EngineError, match=f"maximum context length of {context} tokens: raise"):
        lab.submit(engine, lab.tokens(8, context), SamplingSettings(1.0, 1.0, 57))
    assert engine.in_flight == 0


def test_invalid_settings_are_refused_and_nothing_is_queued(lab, engine):
    with pytest.raises(EngineError, match="top_p"):
        lab.submit(engine, [1, 2, 3], SamplingSettings(1.0, 1.5, 20))
    with pytest.raises(EngineError, match="is empty, or has token ids outside 0 to 255"):
        lab.submit(engine, [256])
    assert engine.in_flight == 0
