"""Tiny random models, their snapshots, and engines that serve them.

Everything is float32 on the CPU, so that an engine and transformers agree to about 1e-6. The tests of a module share
engines: a test that needs certain weights loads them (`lab.serve`), which is under test anyway. The first engine of a
process takes 4 to 5 s to start, each further one about 1 s.
"""

import copy
import functools
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tba.common.system.durable import temporary_directory
from tba.common.weights.snapshot import Canary, Manifest, Snapshot, describe_files, directory_name, seal
from tba.common.wire.messages import WeightsRef
from tba.searcher.engines.engine import Generation, GenerationRequest, SamplingSettings
from tba.searcher.engines.vllm.start import import_vllm
from tba.tests.helpers.engines import cpu_engine, end_tokens
from tba.tests.helpers.weights import verify

VOCABULARY = 256
# Of vLLM's CPU backend: packed weights, its kernels, adapters in float32.
cpu_backend = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM has this on a CPU alone")
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=20)


class Lab:
    """Creates models, engines and snapshots in one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._versions = itertools.count(1)
        self._requests = itertools.count(1)
        self._models = itertools.count(1)
        self._engines: list[Any] = []

    def model(self, seed: int, *, tied: bool = False, **changes: Any) -> Any:
        """Return a random Qwen2 without an EOS id, so that responses have the requested length."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            # Of dimension 32, the smallest that vLLM's CPU attention supports.
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        settings = shape | special | {"max_position_embeddings": 512, "initializer_range": 0.2} | changes
        return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=tied, **settings)).float().eval()

    def rounded(self, model: Any) -> Any:
        """Round a model's weights to bfloat16 values in float32. Rotary frequencies stay exact."""
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return model

    def as_bfloat16(self, model: Any) -> Any:
        """Return a copy with bfloat16 weights, for saving."""
        return copy.deepcopy(model).bfloat16()

    def step(self, model: Any, seed: int, *, changed: float, size: float = 2**-7) -> Any:
        """Return a copy in which a fraction of the elements is changed by about `size` of their value, as by a step."""
        stepped, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for parameter in stepped.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < changed
            parameter.data = torch.where(chosen, parameter * (1 + size) + 1e-6, parameter)
        return stepped

    def transformers_engine(self, model: Any, stopping: Any = None) -> Any:
        """Start a Transformers engine that serves a model as version 0."""
        directory = self.root / f"model{next(self._models)}"
        model.save_pretrained(directory)
        return cpu_engine(directory, max_in_flight=32, stopping=stopping or end_tokens(directory))

    def engine(
        self,
        model: Any,
        *,
        dtype: Any = "float32",
        head_dtype: Any = "model",
        tokenizer: Any = None,
        stopping: Any = None,
        canary_tolerance: float = 1e-3,
        lora_rank: int = 0,
        pack_weights: bool = False,
        prompt_tokens: int = 0,
        **search: Any,
    ) -> Any:
        """Start a vLLM engine that serves a model as version 0. `close` closes it.

        It computes with its parameters, as on a GPU, unless `pack_weights` is True. Skips the test where vLLM cannot
        start.
        """
        if " " in sys.prefix:
            pytest.skip("torch does not quote the path of this environment when it compiles for vLLM on a CPU")
        if torch.cuda.is_available():
            if pack_weights:
                pytest.skip("vLLM packs weights on a CPU alone")
            if search.get("tensor_parallel", 1) > torch.cuda.device_count():
                pytest.skip("each worker needs a GPU")
        from tba.common.config.run import ModelSection
        from tba.common.config.search import SearchSection
        from tba.searcher.engines.vllm.engine import VllmEngine

        directory = self.root / f"model{next(self._models)}"
        model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        _keep_imports_frozen()
        # An engine that is open must stay collectable.
        if all(engine._llm is None for engine in self._engines):
            _freeze()
        settings: dict[str, Any] = {
            "max_model_len": 256,
            "max_in_flight": 32,
            "kv_cache_gib": 0.1,
            "enforce_eager": True,
            # On a GPU several engines are open at a time.
            "gpu_memory_utilization": 0.05,
        }
        engine = VllmEngine(
            ModelSection(path=str(directory), dtype=dtype, head_dtype=head_dtype),
            SearchSection(**settings | search),
            seed=0,
            canary_tolerance=canary_tolerance,
            stopping=stopping or end_tokens(directory),
            lora_rank=lora_rank,
            pack_weights=pack_weights,
            prompt_tokens=prompt_tokens,
        )
        self._engines.append(engine)
        return engine

    def publish(
        self, model: Any, *, saved: Any = None, dtype: str = "float32", canary_error: float = 0.0
    ) -> WeightsRef:
        """Seal a snapshot under the next version, with the canary of `model` and the files of `saved` or `model`."""
        saved = saved or (self.as_bfloat16(model) if dtype == "bfloat16" else model)
        version = next(self._versions)
        final = self.root / directory_name(version)
        temporary = temporary_directory(final)
        saved.save_pretrained(temporary)
        sequences = [self.tokens(version, length) for length in (8, 40)]
        expected = [(self.logprobs(model, ids) + canary_error).tolist() for ids in sequences]
        canary = Canary(sequences, expected)
        manifest = Manifest("test", version, version, 0.0, describe_files(temporary), canary)
        digest = seal(temporary, final, manifest)
        return WeightsRef(version=version, step=version, path=str(final), manifest_sha256=digest)

    def snapshot(self, model: Any, **changes: Any) -> Snapshot:
        """Publish a snapshot and verify it."""
        return verify(self.publish(model, **changes))

    def serve(self, engine: Any, model: Any) -> int:
        """Hot-reload a model's weights into an engine. Returns their version."""
        snapshot = self.snapshot(model)
        engine.load_weights(snapshot)
        return snapshot.manifest.version

    def submit(self, engine: Any, prompt: Sequence[int], sampling: SamplingSettings = GREEDY) -> int:
        """Submit a prompt. Returns the request's id."""
        request = GenerationRequest(next(self._requests), np.asarray(prompt, np.int32), sampling)
        engine.submit(request)
        return request.id

    def finish(self, engine: Any) -> dict[int, Generation]:
        """Step an engine until nothing is in flight."""
        generations: dict[int, Generation] = {}
        while engine.in_flight:
            generations |= {generation.id: generation for generation in engine.step()}
        return generations

    def generate(self, engine: Any, prompt: Sequence[int], sampling: SamplingSettings = GREEDY) -> Generation:
        """Return the response to one prompt."""
        request = self.submit(engine, prompt, sampling)
        return self.finish(engine)[request]

    def tokens(self, seed: int, length: int) -> list[int]:
        """Return random token ids."""
        return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()

    def logits(self, model: Any, ids: Sequence[int], past: Any = None) -> np.ndarray:
        """Return transformers' logits [T, V]."""
        from tba.searcher.engines.kv_cache import cache_argument

        with torch.no_grad():
            return model(torch.tensor([list(ids)]), **{cache_argument(model): past}).logits[0].numpy()

    def logprobs(self, model: Any, ids: Sequence[int]) -> np.ndarray:
        """Return transformers' teacher-forced log-probabilities [T - 1], at temperature 1."""
        return self.chosen(self.log_softmax(self.logits(model, ids)[:-1]), ids[1:])

    def response_logprobs(self, model: Any, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
        """Return transformers' log-probabilities of a response's tokens, at temperature 1."""
        return self.logprobs(model, [*prompt, *response])[len(prompt) - 1 :]

    @staticmethod
    def log_softmax(logits: np.ndarray) -> np.ndarray:
        """Return log_softmax over the last axis, in float64."""
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @staticmethod
    def chosen(logprobs: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        """Select from each row the entry of its token."""
        return logprobs[np.arange(len(ids)), np.asarray(ids)]

    def assert_scores(self, engine: Any, model: Any, *, atol: float = 1e-4) -> None:
        """Check that the log-probabilities of an engine are those of transformers."""
        ids = self.tokens(3, 40)
        np.testing.assert_allclose(engine.score([ids])[0], self.logprobs(model, ids), atol=atol)

    def assert_serves(self, engine: Any, model: Any) -> None:
        """Check that log-probabilities and greedy tokens are those of transformers."""
        self.assert_scores(engine, model)
        prompt = self.tokens(2, 12)
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 12:]
        assert self.generate(engine, prompt).response_ids.tolist() == expected.tolist()

    def assert_sampled_by(
        self, model: Any, prompt: Sequence[int], generation: Generation, *, atol: float = 1e-4
    ) -> None:
        """Check that the recorded log-probabilities of a response are those of transformers."""
        expected = self.response_logprobs(model, prompt, generation.response_ids.tolist())
        np.testing.assert_allclose(generation.logprobs, expected, atol=atol)

    def close(self) -> None:
        """Close every engine."""
        for engine in self._engines:
            engine.close()


@functools.cache
def _keep_imports_frozen() -> None:
    """Import vLLM, and let none of its engines change what garbage collections leave out.

    vLLM collects garbage ten times in the life of an engine, and ends every freeze when one ends. It would search all
    that tests have imported, for 2 s per engine, which takes half a second without.
    """
    import_vllm()
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    collects_only: Any = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    for module in (core, gpu_worker, parallel_state):
        module.gc = collects_only
    core.freeze_gc_heap = gpu_worker.freeze_gc_heap = gc.collect


def _freeze() -> None:
    """Exclude what exists from garbage collections, except garbage, such as that of an engine that was closed."""
    gc.collect()
    gc.freeze()


def worker_of(engine: Any) -> Any:
    """Return the only worker of an engine, in this process."""
    return engine._llm.model_executor.driver_worker.worker


def addresses(engine: Any) -> dict[str, int]:
    """Return those of all parameters and buffers: what CUDA graphs depend on."""
    model = worker_of(engine).get_model()
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The module's directory, models and engines."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()
    # For the tests that follow, as `tba.tests.runner` did before the first.
    _freeze()


@pytest.fixture(scope="module")
def old(lab: Lab) -> Any:
    """The model whose weights an engine starts with."""
    return lab.model(seed=1)


@pytest.fixture(scope="module")
def new(lab: Lab) -> Any:
    """The same architecture with other weights."""
    return lab.model(seed=2)


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def engine(request: pytest.FixtureRequest, lab: Lab, old: Any) -> Any:
    """An engine of each kind that started with `old`; other tests of the module may have loaded `new` since."""
    return lab.engine(old) if request.param == "vllm" else lab.transformers_engine(old)
