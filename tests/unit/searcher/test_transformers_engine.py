"""The Transformers engine against the model alone, and the suite for foreign engines, which finds broken promises."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tba import conformance  # noqa: E402
from tba.common.errors import ConfigError, EngineError, SnapshotError  # noqa: E402
from tba.common.weights.snapshot import Snapshot  # noqa: E402
from tba.searcher.engines.engine import Generation, GenerationRequest, LoadReport, Mismatch, SamplingSettings  # noqa: E402  # noqa: E402
from tba.searcher.engines.kv_cache import cache_argument  # noqa: E402
from tba.searcher.engines.transformers_engine import TransformersEngine, sample  # noqa: E402
from tba.tests.helpers.engines import cpu_engine, end_tokens, logprobs_of  # noqa: E402
from tba.tests.runner import slow  # noqa: E402

VOCABULARY = 150
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save_model(kind: str, folder: Path, **settings: Any) -> Any:
    """Save and return a random model of a model type of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | settings))).float().eval()
    model.save_pretrained(folder)
    return model


def engine_of(folder: Path, max_in_flight: int) -> TransformersEngine:
    engine: TransformersEngine = cpu_engine(folder, max_in_flight=max_in_flight)
    return engine


def requests(count: int, **settings: Any) -> list[GenerationRequest]:
    """Prompts of 1 to 60 tokens and responses of 1 to 80: rows join and leave in most steps."""
    random = np.random.default_rng(1)
    sampling = {"temperature": 1.0, "top_p": 1.0} | settings
    return [
        GenerationRequest(
            number,
            random.integers(0, VOCABULARY, random.integers(1, 61)).astype(np.int32),
            SamplingSettings(max_tokens=int(random.integers(1, 81)), seed=number, **sampling),
        )
        for number in range(count)
    ]


def answer(engine: TransformersEngine, requests: list[GenerationRequest]) -> dict[int, Generation]:
    for request in requests:
        engine.submit(request)
    found: dict[int, Any] = {}
    while engine.in_flight:
        found |= {generation.id: generation for generation in engine.step()}
    return found


def assert_alone(model: Any, asked: list[GenerationRequest], found: dict[int, Generation]) -> None:
    """Each response has the log-probabilities of the model alone: without a cache, padding or other rows."""
    assert found.keys() == {request.id for request in asked}
    for request in asked:
        one = found[request.id]
        assert len(one.response_ids) == request.sampling.max_tokens
        expected = logprobs_of(model, request.prompt_ids, one.response_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=2e-4)


def test_a_forward_with_the_new_name_of_the_cache_gets_it_by_that_name(tmp_path, monkeypatch):
    """transformers 5.24 renames past_key_values to cache, warns of the old name, and removes it in 5.40."""
    model = save_model("llama", tmp_path)
    old, forward = cache_argument(model), type(model).forward

    def renamed(self, input_ids, cache=None, **others):
        assert "past_key_values" not in others
        return forward(self, input_ids, **{old: cache}, **others)

    monkeypatch.setattr(type(model), "forward", renamed)
    assert_alone(model, requests(1), answer(engine_of(tmp_path, 1), requests(1)))


@pytest.mark.parametrize("max_in_flight", [5, *slow(16)])
def test_a_row_of_the_continuous_batch_gets_the_log_probabilities_of_the_model_alone(max_in_flight, tmp_path):
    """Of other architectures: test_architectures.py."""
    model = save_model("llama", tmp_path)
    assert_alone(model, requests(30), answer(engine_of(tmp_path, max_in_flight), requests(30)))


def test_the_samples_of_a_prompt_share_a_row_of_the_pass_over_the_prompts(tmp_path):
    model = save_model("llama", tmp_path)
    prompts = [request.prompt_ids for request in requests(3)]
    asked = [
        GenerationRequest(number, prompts[number % 3].copy(), SamplingSettings(1.0, 1.0, max_tokens=2 + number % 2))
        for number in range(12)
    ]
    engine, rows = engine_of(tmp_path, 12), []
    engine._model.register_forward_pre_hook(lambda *call: rows.append(len(call[2]["input_ids"])), with_kwargs=True)
    found = answer(engine, asked)
    assert rows == [3, 12, 6]
    assert_alone(model, asked, found)


@pytest.mark.slow
def test_a_response_depends_on_its_seed_and_not_on_the_other_rows(tmp_path):
    save_model("llama", tmp_path)
    asked = requests(10, top_p=0.9)
    runs = [answer(engine_of(tmp_path, rows), asked) for rows in (1, 3, 10)]
    responses = [{number: one.response_ids.tolist() for number, one in run.items()} for run in runs]
    assert responses[0] == responses[1] == responses[2]


def test_a_free_row_is_filled_while_the_other_rows_continue(tmp_path):
    """With batches in waves, a short request would wait for the others of its wave."""
    save_model("llama", tmp_path)
    engine = engine_of(tmp_path, 8)
    long, short = requests(2, temperature=0.0)
    for number in range(8):
        settings = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=60 if number else 2)
        engine.submit(GenerationRequest(number, long.prompt_ids, settings))
    engine.submit(GenerationRequest(8, short.prompt_ids, SamplingSettings(1.0, 1.0, 3)))
    order = [generation.id for _ in range(8) for generation in engine.step()]
    assert order == [0, 8]


def test_a_model_with_state_that_is_not_attention_is_refused(tmp_path):
    settings = {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8}
    save_model("lfm2", tmp_path, **settings)
    with pytest.raises(ConfigError, match="layers of type 'conv'"):
        engine_of(tmp_path, 4)


DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "is_decoder": True}
MORE_DECODERS = ("mbart", "pegasus", "marian", "blenderbot", "plbart")
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("bart", DECODER, "differ by "),
        ("blenderbot-small", DECODER, "differ by "),
        ("openai-gpt", GPT, "IndexError: "),
        *(pytest.param(kind, DECODER, "differ by ", marks=pytest.mark.slow) for kind in MORE_DECODERS),
        pytest.param("doge", {}, "RuntimeError: ", marks=pytest.mark.slow),
        pytest.param("rwkv", {}, "IndexError: ", marks=pytest.mark.slow),
        pytest.param("cpmant", {}, "RuntimeError: ", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_a_padded_batch_with_a_cache_computes_wrong_is_refused(kind, settings, words, dtype, tmp_path):
    name = type(save_model(kind, tmp_path, **settings)).__name__
    with pytest.raises(ConfigError, match=rf'{name}: (its log-probabilities )?{words}.*: use .*engine = "vllm"'):
        cpu_engine(tmp_path, dtype=dtype, canary_tolerance=0.5)


@pytest.mark.parametrize(("kind", "rows"), [("bart", 4), ("roberta", 4), ("roberta", 1)])
def test_one_row_at_a_time_is_advised_only_where_it_helps(kind, rows, tmp_path):
    """RoBERTa's first position is not 0."""
    model = save_model(kind, tmp_path, **(DECODER if kind == "bart" else {"is_decoder": True, "pad_token_id": 1}))
    advice = "cannot batch .*: use search.max_in_flight = 1 or " if kind == "bart" else "cannot generate with .*: use "
    with pytest.raises(ConfigError, match=f'{advice}search.engine = "vllm"'):
        engine_of(tmp_path, rows)
    if kind == "bart":
        # Nothing is padded then.
        assert_alone(model, requests(3), answer(engine_of(tmp_path, 1), requests(3)))


def test_the_steps_of_a_mixture_of_experts_have_no_limit(tmp_path):
    """A batch may route tokens to other experts. This model would be refused if its configuration named no experts."""
    save_model("bart", tmp_path, **DECODER, num_experts=2)
    assert engine_of(tmp_path, 4).max_in_flight == 4


def test_weights_that_are_not_finite_are_refused_as_such(tmp_path):
    model = save_model("llama", tmp_path)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="of LlamaForCausalLM are not finite: check its weights$"):
        engine_of(tmp_path, 4)


def by_float64(logits: Any, temperature: float, top_p: float, uniform: float) -> int:
    """The token by the definition of the inverse CDF, over the nucleus."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    weights /= weights.sum()
    order = np.argsort(-weights)
    outside = np.cumsum(weights[order]) - weights[order] >= top_p
    outside[0] = False
    weights[order[outside]] = 0
    cdf = np.cumsum(weights)
    return int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))


@pytest.mark.parametrize("vocabulary", [3, 64, *slow(1000)])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 1e-50])
def test_tokens_are_the_inverse_cdf_at_evenly_spaced_numbers(vocabulary, top_p):
    logits = np.random.default_rng(0).normal(0, 3, vocabulary).astype(np.float32)
    uniform = (np.arange(4000) + 0.5) / 4000
    settings = [SamplingSettings(0.8, top_p, 1)] * len(uniform)
    drawn = sample(torch.tensor(logits).repeat(len(uniform), 1), settings, torch.tensor(uniform))
    expected = [by_float64(logits, 0.8, top_p, number) for number in uniform]
    # Rounding may move a boundary past one number, but not past many.
    assert np.mean(drawn.tokens_B.numpy() == expected) > 0.999


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, None),
        ({"temperature": 0.0, "top_k": 2}, None),
        ({"top_k": 2}, [1, 3]),
        ({"min_p": 0.28}, [1, 2, 3]),
        ({"min_p": 0.28, "temperature": 0.5}, [1, 3]),
        # Of the three that min-p left, the first two have more than 0.85 together.
        ({"min_p": 0.28, "top_p": 0.85}, [1, 3]),
        ({"top_k": 1, "min_p": 0.1, "top_p": 0.5}, [3]),
    ],
)
def test_the_tokens_that_are_left_to_sample_from(settings, left):
    logits = torch.tensor([[0.02, 0.3, 0.12, 0.4, 0.06, 0.1]]).log()
    drawn = sample(
        logits,
        [SamplingSettings(**{"temperature": 1.0, "top_p": 1.0, "max_tokens": 1} | settings)],
        torch.tensor([0.99]),
    )
    assert {row: ids.tolist() for row, ids in drawn.kept.items()} == ({0: left} if left else {})
    if left and settings.get("temperature", 1.0) == 1.0:
        chances = logits[0].exp()[left]
        assert drawn.logprobs_B.exp().tolist() == pytest.approx(
            [float(chances[left.index(drawn.tokens_B[0])] / chances.sum())]
        )


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_never_draw_a_token_of_probability_zero(uniform):
    logits = torch.full((2, 130), float("-inf"))
    logits[:, 70] = 1.0
    logits[1, 100] = -3.0
    drawn = sample(logits, [SamplingSettings(1.0, 1.0, 1)] * 2, torch.full((2,), uniform, dtype=torch.float64))
    assert drawn.tokens_B.tolist() == ([70, 70] if uniform == 0 else [70, 100])
    assert drawn.logprobs_B[0] == 0


def test_seeds_of_any_size_give_different_random_numbers(tmp_path):
    save_model("llama", tmp_path)
    engine = engine_of(tmp_path, 2)
    asked = [
        GenerationRequest(number, np.asarray([1, 2], np.int32), SamplingSettings(1.0, 1.0, 40, seed=seed))
        for number, seed in enumerate([0, 1, 2**63 - 1])
    ]
    found = answer(engine, asked)
    assert len({tuple(one.response_ids.tolist()) for one in found.values()}) == 3


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
        self.weights_version = snapshot.manifest.version
        return LoadReport(Mismatch(0, 0, 0), "none", 0, 0, 0, 0)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
