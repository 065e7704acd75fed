"""The tokens that top-p, top-k and min-p kept, as vLLM returns them. Only its sampler needs a GPU.

`tests/data/vllm_kept_tokens.json` was recorded on an H200 with vLLM 0.32.0 in float32, of the model `recorded_model`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.common.config.run import ModelSection
from tba.common.config.search import SearchSection
from tba.common.errors import ConfigError, EngineError
from tba.searcher.engines.engine import GenerationRequest, SamplingSettings
from tba.searcher.engines.stopping import Stopping
from tba.tests.vllm.conftest import cpu_backend

pytest.importorskip("vllm", reason="vLLM is not installed")

VOCABULARY = 40
# What the sampler's kernel writes for each of three steps: room for four ids, the whole set as bits, and its size.
SAMPLED = [7, 0, 39]
KEPT = [[2, 7, 8], [0], [1, 3, 5, 9, 38, 39]]
SETTINGS = SamplingSettings(0.8, 0.9, 8, top_k=6)
RECORDED = json.loads((Path(__file__).parents[1] / "data/vllm_kept_tokens.json").read_text())


def masks(kept: Sequence[int]) -> Any:
    """Return the mask of one step as the worker passes it on."""
    import torch
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    bits = np.zeros(VOCABULARY, np.uint8)
    bits[kept] = 1
    packed = torch.from_numpy(np.packbits(bits, bitorder="little"))[None]
    ids = torch.tensor([[*kept, 0, 0, 0, 0][:4]], dtype=torch.int32)
    return SamplingMaskTensors(ids, packed, torch.tensor([len(kept)], dtype=torch.int32), VOCABULARY).tolists()


def completion(kept: Sequence[Sequence[int]] = KEPT) -> Any:
    """Return the output of a request after three steps."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=6, max_tokens=8, logprobs=0, flat_logprobs=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    processor = OutputProcessor(None, log_stats=False)
    request = EngineCoreRequest("3", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="3")
    processor.add_request(request, None)
    for step, (token, mask) in enumerate(zip(SAMPLED, kept, strict=True)):
        last = FinishReason.LENGTH if step == 2 else None
        logprobs = LogprobsLists(np.array([[token]]), np.array([[-0.5]], np.float32), np.array([1]))
        own = masks(mask).slice_request(0, 1)
        one = EngineCoreOutput("3", [token], logprobs, finish_reason=last, new_sampling_mask=own)
        outputs = processor.process_outputs([one], weight_version="4").request_outputs
    return outputs[0].outputs[0]


def test_the_masks_of_vllm_become_the_kept_tokens_of_the_response():
    from tba.searcher.engines.vllm.running import _generation, _InFlight

    asked = _InFlight(GenerationRequest(3, np.array([1, 2], np.int32), SETTINGS), None, 0.0)
    found = _generation(asked, completion())
    assert found.response_ids.tolist() == SAMPLED
    assert found.kept.tolist() == [3, 9, 0, 0, 2, 4, 6, 10, 39, 0]
    assert found.version_runs.tolist() == [[4, 3]]
    whole = replace(asked, request=replace(asked.request, sampling=SamplingSettings(0.8, 1.0, 8)))
    assert len(_generation(whole, completion()).kept) == 0
    with pytest.raises(EngineError, match="one without its token"):
        _generation(asked, completion([[2, 8], *KEPT[1:]]))


@cpu_backend
def test_a_vllm_that_does_not_return_them_is_refused_before_it_starts():
    from tba.searcher.engines.vllm.start import start_vllm

    search = SearchSection(top_p=0.9, top_k=100)
    options: dict[str, Any] = {"seed": 0, "lora_rank": 0, "pack_weights": False, "reads_text": False}
    with pytest.raises(ConfigError, match=r"only its GPU model runner does.*engine = \"transformers\""):
        start_vllm(ModelSection(), search, max_num_seqs=1, **options)


def test_requests_have_what_vllm_needs_to_return_masks():
    """vLLM refuses a temperature of 0 and requests without a limit of tokens then; the canary has both."""
    from tba.searcher.engines.vllm.running import RunningVllm, _params

    no_tokenizer: Any = None
    engine = object.__new__(RunningVllm)
    engine._kept, engine._stopping = True, Stopping(no_tokenizer, (), frozenset({2}))
    greedy = engine._params(SamplingSettings(0.0, 0.9, 8))
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (1.0, 1, 1.0)
    assert (engine._params(SETTINGS).top_k, engine._params(SETTINGS).top_p) == (6, 0.9)
    canary = _params(**engine._greedy(), max_tokens=1, prompt_logprobs=0, detokenize=False)
    assert (canary.temperature, canary.top_k) == (1.0, 1)


def recorded_model(lab: Any) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return lab.rounded(lab.model(seed=1, hidden_size=256, initializer_range=0.08, **heads))


def recorded_completion(row: dict[str, Any]) -> Any:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, SamplingMask, WeightVersionSpan

    positions, ids = range(len(row["token_ids"])), row["token_ids"]
    logprobs = FlatLogprobs([*positions], [n + 1 for n in positions], ids, row["logprobs"])
    versions = [WeightVersionSpan("0", 0, len(ids))]
    return CompletionOutput(
        0, "", ids, None, logprobs, finish_reason="length", sampling_mask=SamplingMask(row["sampling_mask"]),
        weight_versions=versions,
    )  # fmt: skip


def left_over(logits_V: np.ndarray, row: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """Return the tokens that top-k, then top-p and min-p leave, and log-probabilities [V] over them, in float64."""
    scaled = logits_V.astype(np.float64) / row["temperature"]
    likely = scaled >= np.sort(scaled)[-row["top_k"]]
    weights = np.where(likely, np.exp(scaled - scaled.max()), 0.0)
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    likely[order] &= before < row["top_p"] * weights.sum()
    likely &= weights >= row["min_p"]
    return np.flatnonzero(likely).tolist(), np.log(np.where(likely, weights, np.nan) / weights[likely].sum())


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"p{row['top_p']}-k{row['top_k']}-m{row['min_p']}")
def test_what_vllm_kept_on_a_gpu_is_what_the_settings_leave(lab, row):
    from tba.searcher.engines.vllm.running import _generation, _InFlight

    sampling = SamplingSettings(row["temperature"], row["top_p"], 12, top_k=row["top_k"], min_p=row["min_p"])
    asked = _InFlight(GenerationRequest(3, np.array(row["prompt"], np.int32), sampling), None, 0.0)
    found, ids = _generation(asked, recorded_completion(row)), row["token_ids"]
    logits_TV = lab.logits(recorded_model(lab), [*row["prompt"], *ids])[len(row["prompt"]) - 1 : -1]
    expected = [left_over(logits_V, row) for logits_V in logits_TV]
    kept = list[int]()
    for (left, _), token in zip(expected, ids, strict=True):
        # The sampled token is known already.
        kept += [one + 1 for one in left if one != token] + [0]
    assert found.kept.tolist() == kept
    chosen = [logprobs_V[token] for (_, logprobs_V), token in zip(expected, ids, strict=True)]
    np.testing.assert_allclose(found.logprobs, chosen, atol=1e-4)
