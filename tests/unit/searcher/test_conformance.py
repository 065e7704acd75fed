"""The suite for foreign engines finds each broken promise, and nothing on an engine of this package."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tba import conformance  # noqa: E402
from tba.common.errors import EngineError, SnapshotError  # noqa: E402
from tba.common.weights.snapshot import Snapshot  # noqa: E402
from tba.searcher.engines.engine import Generation, GenerationRequest, LoadReport, Mismatch  # noqa: E402
from tba.searcher.engines.transformers_engine import TransformersEngine  # noqa: E402
from tba.tests.helpers.engines import end_tokens  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return directory


class Right(TransformersEngine):
    """The engine of this package, as a foreign one would be made."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            str(directory), dtype="float32", device="cpu", max_in_flight=8, seed=0, canary_tolerance=1e-3,
            stopping=end_tokens(directory),
        )  # fmt: skip

    def changed(self, **changes: Any) -> list[Generation]:
        """Step, and change what the responses say."""
        return [dataclasses.replace(one, **{name: new(one) for name, new in changes.items()}) for one in super().step()]


class AnswersTwice(Right):
    def step(self) -> list[Generation]:
        return [each for one in super().step() for each in (one, one)]


class SaysNothing(Right):
    def step(self) -> list[Generation]:
        return super().step() and []


class CountsOneTokenTooMany(Right):
    def step(self) -> list[Generation]:
        return self.changed(version_runs=lambda one: one.version_runs + np.array([0, 1], np.int32))


class ForgetsTheTemperature(Right):
    def submit(self, request: GenerationRequest) -> None:
        super().submit(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.0)))


class ScoresOneTokenLate(Right):
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Any]:
        return [np.roll(scores, 1) for scores in super().score(sequences)]


class AnswersAnything(Right):
    def submit(self, request: GenerationRequest) -> None:
        try:
            super().submit(request)
        except EngineError:
            super().submit(dataclasses.replace(request, prompt_ids=np.array([1], np.int32)))


class LoadsNothing(Right):
    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        self._loaded = snapshot.manifest.version
        return LoadReport(Mismatch(0, 0, 0), "none", 0, 0, 0, 0)

    @property
    def weights_version(self) -> int:
        return getattr(self, "_loaded", 0)


class AcceptsEverything(Right):
    def load_weights(self, snapshot: Snapshot) -> LoadReport:
        try:
            return super().load_weights(snapshot)
        except SnapshotError:
            return LoadReport(Mismatch(0, 0, 0), "none", 0, 0, 0, 0)


def broken(engine: Right, model: Path) -> set[str]:
    return {finding.promise for finding in conformance.check_engine(engine, model) if finding.error}


def test_an_engine_of_this_package_keeps_every_promise(model: Path):
    findings = list(conformance.check_engine(Right(model), model))
    assert [str(finding) for finding in findings if finding.error] == []
    assert len(findings) == 8


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (AnswersTwice, "each request is answered once"),
        (SaysNothing, "each request is answered once"),
        (CountsOneTokenTooMany, "a response tells its length, its end and its versions"),
        (ForgetsTheTemperature, "temperature 0 takes the most probable token"),
        (ForgetsTheTemperature, "log-probabilities are those of the sampling distribution"),
        (ScoresOneTokenLate, "score is teacher-forced at temperature 1"),
        (AnswersAnything, "a prompt that cannot be answered is refused"),
        (LoadsNothing, "new weights serve, and requests in flight go on"),
        (AcceptsEverything, "a refused snapshot changes nothing"),
    ],
)
def test_a_broken_promise_is_found(model: Path, kind: type[Right], promise: str):
    assert promise in broken(kind(model), model)


def test_the_command_exits_with_1_for_an_engine_that_breaks_a_promise(model: Path, capsys: pytest.CaptureFixture[str]):
    assert conformance.main([f"{__name__}:Right", str(model)]) == 0
    assert conformance.main([f"{__name__}:ScoresOneTokenLate", str(model)]) == 1
    assert "broken: score is teacher-forced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "directory", "sentence"),
    [
        (f"{__name__}:Right", "nowhere", "MODEL"),
        ("no_such_module:make", ".", "no_such_module"),
        (f"{__name__}:Missing", ".", "Missing"),
    ],
)
def test_an_engine_or_a_model_that_cannot_be_found_is_a_wrong_use(model: Path, capsys, engine, directory, sentence):
    with pytest.raises(SystemExit) as ended:
        conformance.main([engine, str(model / directory)])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
