"""Tiny random models, their snapshots, and engines that serve them.

Everything is float32 on the CPU, so that an engine and transformers agree to about 1e-6. Engines are shared
by the tests of a module: a test that needs certain weights loads them (`lab.serve`), which is what is under
test anyway. Starting the first engine of a process takes 4 to 5 s, each further one about 1 s.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.common.delta import FILE, build_delta
from tba.common.durable import temporary_directory
from tba.common.snapshot import Canary, FileEntry, Manifest, Snapshot, describe_files, directory_name, seal, verify
from tba.common.tensor_file import map_tensors, write_tensor_file
from tba.common.wire import WeightsRef
from tba.searcher.engine import Generation, GenerationRequest, SamplingSettings

VOCABULARY = 256
GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=20)


class Lab:
    """Makes models, engines and snapshots under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._versions = itertools.count(1)
        self._requests = itertools.count(1)
        self._models = itertools.count(1)
        self._engines: list[Any] = []

    def model(self, seed: int, *, tied: bool = False, **changes: Any) -> Any:
        """A random Qwen2. Without an EOS id, so that responses are as long as a test asks for."""
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # of 32: vLLM's CPU attention has no smaller ones
            "num_key_value_heads": 1,
        }
        special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        settings = shape | special | {"max_position_embeddings": 512, "initializer_range": 0.2} | changes
        return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=tied, **settings)).float().eval()

    def rounded(self, model: Any) -> Any:
        """Round a model's weights to bfloat16, and leave them float32; its rotary frequencies stay exact."""
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return model

    def as_bfloat16(self, model: Any) -> Any:
        """A copy with bfloat16 weights, to be saved."""
        return copy.deepcopy(model).bfloat16()

    def step(self, model: Any, seed: int, *, changed: float, size: float = 2**-7) -> Any:
        """A copy in which a share of all elements is moved by about `size` of itself, as an optimiser step does."""
        import torch

        stepped, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for parameter in stepped.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < changed
            parameter.data = torch.where(chosen, parameter * (1 + size) + 1e-6, parameter)
        return stepped

    def transformers_engine(self, model: Any) -> Any:
        """A Transformers engine that serves a model, as version 0."""
        from tba.searcher.engine_transformers import TransformersEngine

        directory = self.root / f"model{next(self._models)}"
        model.save_pretrained(directory)
        return TransformersEngine(
            str(directory), dtype="float32", device="cpu", max_in_flight=32, seed=0, canary_tolerance=1e-3
        )

    def engine(self, model: Any, **changes: Any) -> Any:
        """A vLLM engine that serves a model, as version 0. Closed with the lab."""
        from tba.searcher.engine_vllm import VllmEngine

        directory = self.root / f"model{next(self._models)}"
        model.save_pretrained(directory)
        settings = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_in_flight": 32,
            "seed": 0,
            "kv_cache_gib": 0.1,
            "gpu_memory_utilization": 0.5,
            "tensor_parallel": 1,
            "enforce_eager": True,
            "canary_tolerance": 1e-3,
        }
        engine = VllmEngine(str(directory), **(settings | changes))
        self._engines.append(engine)
        return engine

    def publish(self, model: Any, *, saved: Any = None, canary_error: float = 0.0) -> WeightsRef:
        """A sealed snapshot under the next version: canary of `model`, files of `saved` or `model`."""
        version = next(self._versions)
        final = self.root / directory_name(version)
        temporary = temporary_directory(final)
        (saved or model).save_pretrained(temporary)
        sequences = [self.tokens(version, length) for length in (8, 40)]
        expected = [(self.logprobs(model, ids) + canary_error).tolist() for ids in sequences]
        canary = Canary(sequences, expected)
        manifest = Manifest("test", version, version, 0.0, describe_files(temporary), canary)
        digest = seal(temporary, final, manifest)
        return WeightsRef(version=version, step=version, path=str(final), manifest_sha256=digest)

    def snapshot(self, model: Any, **changes: Any) -> Snapshot:
        """A published and verified snapshot."""
        return verify(self.publish(model, **changes))

    def delta(self, base: Snapshot, model: Any, **changes: Any) -> Snapshot:
        """A snapshot that also knows what changed since `base`."""
        snapshot = self.snapshot(model, **changes)
        before, after = (map_tensors(one.weight_files[0]) for one in (base, snapshot))
        tensors = build_delta(before, after, most_bytes=float("inf"))
        path = self.root / f"delta{snapshot.manifest.version}.safetensors"
        files = {FILE: FileEntry(*write_tensor_file(path, tensors))}
        complete = snapshot.manifest.files
        manifest = dataclasses.replace(snapshot.manifest, base=base.manifest.version, files=files, complete=complete)
        return dataclasses.replace(snapshot, manifest=manifest, delta=path)

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
        generations = {}
        while engine.in_flight:
            generations |= {generation.id: generation for generation in engine.step()}
        return generations

    def generate(self, engine: Any, prompt: Sequence[int], sampling: SamplingSettings = GREEDY) -> Generation:
        """The response to one prompt."""
        request = self.submit(engine, prompt, sampling)
        return self.finish(engine)[request]

    def tokens(self, seed: int, length: int) -> list[int]:
        """Random token ids."""
        return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()

    def logits(self, model: Any, ids: Sequence[int], past: Any = None) -> np.ndarray:
        """transformers' logits [T, V]."""
        import torch

        with torch.no_grad():
            return model(torch.tensor([list(ids)]), past_key_values=past).logits[0].numpy()

    def logprobs(self, model: Any, ids: Sequence[int]) -> np.ndarray:
        """transformers' teacher-forced log-probabilities [T - 1], at temperature 1."""
        return self.chosen(self.log_softmax(self.logits(model, ids)[:-1]), ids[1:])

    def response_logprobs(self, model: Any, prompt: Sequence[int], response: Sequence[int]) -> np.ndarray:
        """transformers' log-probabilities of a response's tokens, at temperature 1."""
        return self.logprobs(model, [*prompt, *response])[len(prompt) - 1 :]

    @staticmethod
    def log_softmax(logits: np.ndarray) -> np.ndarray:
        """Over the last axis, in float64."""
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    @staticmethod
    def chosen(logprobs: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        """The entry of each row that belongs to its token."""
        return logprobs[np.arange(len(ids)), np.asarray(ids)]

    def close(self) -> None:
        """Close every engine."""
        for engine in self._engines:
            engine.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The module's directory, models and engines."""
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


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
    """An engine of each kind that starts with `old`; other tests of the module may have loaded `new` since."""
    return lab.engine(old) if request.param == "vllm" else lab.transformers_engine(old)


@pytest.fixture(scope="module")
def vllm_engine(lab: Lab, old: Any) -> Any:
    """A vLLM engine, for what is vLLM's alone."""
    return lab.engine(old)
