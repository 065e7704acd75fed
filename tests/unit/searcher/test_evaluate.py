"""Evaluations: the choice of snapshots, the estimators, and `tba generate` up to the start of its engine."""

import importlib.util
import json
import shutil
import sys
from contextlib import closing, nullcontext
from itertools import combinations, count
from typing import Any, cast

import numpy as np
import pytest

from tba.cli.models import _check_measured, _with_installed_engine
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.errors import ConfigError, SnapshotCorrupt, SnapshotError, TbaError, UsageError
from tba.common.run_snapshots import check_export, find_source
from tba.common.weights.node_store import pin_path
from tba.common.weights.snapshot import MANIFEST, collect, directory_name, list_snapshots, read
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import WeightsRef
from tba.common.wire.trajectory import Trajectory
from tba.searcher.build import load
from tba.searcher.engines.engine import SamplingSettings
from tba.searcher.evaluation.evaluator import (
    Answering,
    Question,
    Subject,
    _prepared,
    evaluate_snapshots,
    for_storage,
    open_evaluator,
    read_subject,
)
from tba.searcher.evaluation.follower import Follower
from tba.searcher.evaluation.measure import (
    Measured,
    bootstrap,
    measure_divergence,
    measure_diversity,
    measure_greedy,
    measure_sampled,
    pass_at_k,
    wilson,
)
from tba.searcher.generate import Generator
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks.task import Prompt
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.engines import cpu_engine
from tba.tests.helpers.puts import make_trajectory
from tba.tests.helpers.weights import WEIGHTS, RandomWeights, flip_a_byte


def delete(path) -> None:
    """Delete a snapshot as the trainer does: the manifest first."""
    (path / MANIFEST).unlink()
    shutil.rmtree(path)


class Overtaken(SnapshotAssembler):
    """An assembler that loses `times` races with a trainer, which deletes the snapshot that is about to be read."""

    def __init__(self, trainer: RandomWeights, times: int) -> None:
        super().__init__(trainer.directory.parent / "node", "path", SystemClock())
        self._trainer, self._times = trainer, times

    def assemble(self, ref, **options):
        if self._times:
            self._times -= 1
            self._trainer.full()
            delete(list_snapshots(self._trainer.directory)[-2])
        return super().assemble(ref, **options)


@pytest.fixture
def trainer(tmp_path):
    trainer = RandomWeights(tmp_path / "snapshots")
    for _ in range(3):
        trainer.full()
    return trainer


@pytest.fixture
def evaluated(tmp_path):
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})

    def run(copies, named=None, paths=None) -> list[int]:
        return [found.manifest.version for found, _ in _prepared(config, copies, named, paths)]

    return run


@pytest.mark.parametrize("times", [0, 1, 3, 100])
def test_the_newest_snapshot_is_chosen_again_if_it_was_deleted_unless_each_is(trainer, evaluated, times):
    too_often = pytest.raises(SnapshotError, match=r"raise train\.keep_snapshots")
    with too_often if times == 100 else nullcontext():
        assert evaluated(Overtaken(trainer, times)) == [2 + times]


def test_deleted_snapshots_are_skipped_with_a_warning_but_a_named_one_and_a_damaged_one_are_errors(
    trainer, evaluated, caplog
):
    oldest, gone, newest = paths = list_snapshots(trainer.directory)
    delete(gone)
    with pytest.raises(SnapshotError, match="already deleted"):
        evaluated(Overtaken(trainer, 0), named=gone)
    assert evaluated(Overtaken(trainer, 0), named=oldest) == [0]
    flip_a_byte(newest / WEIGHTS)
    with pytest.raises(SnapshotCorrupt):
        evaluated(Overtaken(trainer, 0))
    flip_a_byte(newest / WEIGHTS)
    assert evaluated(Overtaken(trainer, 0), paths=paths) == [0, 2]
    assert "the trainer has deleted it" in caplog.text


def test_a_delta_is_deleted_before_its_base(trainer, monkeypatch):
    """Otherwise a delta would be listed that cannot be read."""
    trainer.delta()
    trainer.full()
    remove, seen = shutil.rmtree, []

    def watched(path) -> None:
        there = {found.name: read(found).manifest for found in list_snapshots(trainer.directory)}
        seen.append(path.name)
        assert {directory_name(manifest.base) for manifest in there.values() if manifest.base is not None} <= set(there)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", watched)
    collect(trainer.directory, keep_last=1, keep_every=0)
    assert seen == ["v00000003", "v00000002", "v00000001"]


def test_what_is_stored_of_responses_is_cut_to_their_ends_and_to_a_number_of_bytes():
    prompts = [Prompt(f"p{number}", "text", "42") for number in range(3000)]
    one = make_trajectory(text="é" * 9000 + "so it is 41\ud800", error="reward: no")
    stored = for_storage(["text"] * 3000, prompts, [one] * 3000)
    assert 8 << 19 < sum(len(row["response"].encode()) for row in stored) < 8 << 20
    assert (len(stored[0]["response"]), stored[0]["response"][-12:]) == (4000, "so it is 41?")
    assert (stored[0]["prompt"], stored[0]["answer"], stored[0]["error"]) == ("p0", "42", "reward: no")
    assert len(for_storage(["text"] * 7, prompts, [one] * 3000)) == 7


class Asked(Exception):
    """Raised in place of starting an engine."""


def test_the_engine_of_an_evaluation_learns_how_long_its_prompts_are(tmp_path, monkeypatch, example_model):
    """vLLM derives from it how many answers its KV cache holds."""

    def make_engine(*_: Any, **named: Any) -> None:
        raise Asked(named["prompt_tokens"])

    monkeypatch.setattr("tba.searcher.evaluation.evaluator.make_engine", make_engine)
    settings = {"run": {"dir": str(tmp_path)}, "model": {"path": str(example_model)}, "task": {"reward_workers": 0}}
    config = Config.model_validate(settings)
    with pytest.raises(Asked, match="^6$"), open_evaluator(config, read_subject(config), device="cpu", name="eval"):
        pass


def test_what_serves_stays_pinned_when_the_next_snapshot_is_refused(trainer, tmp_path, example_model):
    """The engine restores its weights from these files."""
    settings = {"run": {"dir": str(tmp_path)}, "model": {"path": str(example_model)}, "task": {"reward_workers": 0}}
    settings |= {"search": {"engine": "transformers"}}
    config = Config.model_validate(settings)
    served, refused = (not_none(pin_path(path)) for path in list_snapshots(trainer.directory)[:2])
    with open_evaluator(config, read_subject(config), device="cpu", name="eval") as (evaluator, _):
        evaluator.serving.callback(served.release)
        # Of another model than the engine's.
        with pytest.raises(SnapshotError):
            evaluator.evaluate(read(refused.path), refused)
        assert (served._descriptor is None, refused._descriptor is None) == (False, True)
    assert served._descriptor is None


def test_an_answer_that_cannot_be_generated_has_the_least_reward_and_an_evaluation_can_be_given_up(example_model):
    config = Config.model_validate({"model": {"path": str(example_model)}, "task": {"reward_workers": 0}})
    loaded, greedy = load(config), SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=8)
    vars(loaded.task)["least_reward"] = -1.0
    prompts = [*loaded.task.held_out()[:3], Prompt("long", ids=[6] * 999)]
    questions = [Question(prompt.key, greedy) for prompt in prompts]
    engine = cpu_engine(example_model, stopping=loaded.stopping)
    with closing(Rewards(loaded.task, config.task)) as rewards:
        answering = Answering(config, Subject(loaded, prompts, "", ""), engine, rewards, questions)
        *good, long = not_none(answering.answer())
        for row, prompt in zip(good, prompts, strict=False):
            assert (row.prompt_key, row.error) == (prompt.key, None)
            assert row.reward_parts["correct"] == (row.text == prompt.answer)
        assert (long.reward, long.reward_parts, str(long.error)[:13]) == (-1.0, {}, "not generated")
        assert answering.answer(lambda finished: finished < 2) is None


@pytest.mark.slow
def test_only_a_setting_that_changes_a_number_makes_another_evaluation(example_model):
    def settings(**section) -> str:
        return read_subject(Config.model_validate({"model": {"path": str(example_model)}, "eval": section})).settings

    assert settings(at_end=True) == settings()
    assert settings(samples=4, embedder="encoder") != settings(samples=4)


def test_an_evaluator_that_waits_for_a_trainer_on_another_machine_can_be_stopped(tmp_path, caplog):
    address = "tcp://127.0.0.1:1"
    fetching = Progress()
    assembler = SnapshotAssembler(tmp_path / "node", "auto", SystemClock(), fetching)
    with closing(BufferClient(address, role="evaluator", name="eval")) as client:
        follower = Follower(Config(), cast("Any", None), assembler, fetching, client, SystemClock())
        ref = WeightsRef(version=1, step=1, path="/none/v00000001", manifest_sha256="0" * 64, address=address)
        asked = count()
        follower._evaluate(ref, lambda: next(asked) >= 2)
        assert "snapshot not evaluated" not in caplog.text
        assert client.is_pending(follower._heartbeat_request)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_correct_one(samples):
    for correct in range(samples + 1):
        marks = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            chosen = [any(choice) for choice in combinations(marks, k)]
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)
    # Many samples are not rounded.
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.slow
def test_intervals_cover_the_true_mean_as_often_as_they_say():
    generator, ones = np.random.default_rng(0), np.ones(80)
    ends = [bootstrap(generator.binomial(1, 0.3, 80).astype(float), ones, seed=n) for n in range(100)]
    # An interval depends on its seed alone, and one of a ratio draws whole prompts.
    values = np.arange(80, dtype=np.float64)
    assert bootstrap(values, ones, seed=1) == bootstrap(values, ones, seed=1) != bootstrap(values, ones, seed=2)
    assert bootstrap(np.array([2.0, 8.0]), np.array([1.0, 4.0]), seed=1) == (2.0, 2.0)
    covered = sum(low <= 0.3 <= high for low, high in ends)
    # Binomial: 95 % of 100 with a standard deviation of 2.2; the percentile interval covers a little less.
    assert 87 <= covered <= 99


@pytest.mark.parametrize(("successes", "count"), [(20, 20), (0, 20), (7, 20), (1, 1), (888, 1000)])
def test_the_interval_of_a_share_has_the_ends_that_are_just_not_rejected(successes, count):
    # Wilson: the p for which (k/n - p)^2 = z^2 p (1 - p) / n.
    share, z = successes / count, 1.959964
    roots = np.roots([1 + z**2 / count, -2 * share - z**2 / count, share**2])
    assert wilson(successes, count) == pytest.approx(sorted(roots.real), abs=1e-6)
    measured = Measured(seed=0)
    measured.add("accuracy", [1.0] * successes + [0.0] * (count - successes))
    measured.add("turns", [1.0] * 3)
    assert measured.intervals == {"accuracy": wilson(successes, count), "turns": (1.0, 1.0)}


def test_the_name_of_a_metric_says_whether_it_is_a_share_and_not_its_values():
    measured, values = Measured(seed=0), [0.0] * 20
    shares = {"accuracy", "accuracy_of_a-b", "failed", "sampled_stopped_eos", "reward_part_correct", "pass_at_4"}
    others = {"reward", "reward_of_a", "reward_part_format", "kl", "embedding_distance", "distinct_1", "sampled_turns"}
    for name in shares | others:
        measured.add(name, values)
    # Wilson's upper end of 0 of n is z^2 / (n + z^2).
    upper = 1.959964**2 / (20 + 1.959964**2)
    assert measured.intervals == {**dict.fromkeys(shares, (0.0, pytest.approx(upper))), **dict.fromkeys(others, (0, 0))}
    assert {wilson(n, n)[1] for n in range(1, 2000)} == {1.0}
    assert {wilson(0, n)[0] for n in range(1, 2000)} == {0.0}
    measured.add("accuracy", [0.5, 1.0])
    assert measured.intervals["accuracy"] == (0.5, 1.0), "partial credit"


def answered(tokens, *, correct=0.0, logprob=0.0, **fields: Any) -> Trajectory:
    logprobs = np.full(len(tokens), logprob / len(tokens), np.float32)
    row = {"prompt_ids": np.zeros(1, np.int32), "logprobs": logprobs, "text": "t", "reward": correct}
    parts = {} if "error" in fields else {"correct": correct}
    return make_trajectory(tokens=tokens, **row | {"reward_parts": parts} | fields)


def test_the_metrics_of_sampled_answers_by_hand():
    groups = [[answered([1, 2], correct=1.0), answered([1, 2])], [answered([3, 4]), answered([5, 6])]]
    measured = Measured(seed=0)
    measure_sampled(measured, groups)
    found = measured.metrics
    assert found["pass_at_1"] == 0.25
    assert "pass_at_4" not in found
    assert (found["sampled_reward"], found["sampled_failed"]) == (0.25, 0.0)
    # One of two prompts has two equal answers, the other two without a common token.
    assert found["distinct_1"] == pytest.approx(0.75)
    assert found["distinct_2"] == pytest.approx(0.75)
    assert "distinct_4" not in found
    # One correct text of the first prompt, none of the second.
    assert found["distinct_correct"] == 0.5


def test_answers_of_a_task_that_says_nothing_of_correct_are_not_wrong():
    ungraded = [answered([1], text=text, reward=0.5, reward_parts={}) for text in ("a", "b")]
    groups = [[answered([1], correct=1.0)], ungraded[:1]]
    measured = Measured(seed=0)
    measure_diversity(measured, [ungraded], lambda texts: np.eye(len(texts)))
    assert "distinct_correct_by_embedding" not in measured.metrics
    measure_greedy(measured, [answer for group in groups for answer in group], ["a", "b"])
    measure_sampled(measured, groups, ["a", "b"])
    found = measured.metrics
    assert (found["accuracy"], found["pass_at_1"]) == (1.0, 1.0)
    assert (found["failed"], found["sampled_failed"]) == (0.0, 0.0)
    assert "accuracy_of_b" not in found


def test_the_divergence_is_a_mean_per_response_and_per_token_of_what_the_reference_could_score():
    groups = [[*[answered([1, 2], logprob=-1.0)] * 49, answered([1], logprob=-1.0)]]
    measured = Measured(seed=0)
    measure_divergence(measured, groups, [[-3.0] * 49 + [None]])
    assert measured.metrics["kl"] == 2.0
    assert measured.metrics["kl_per_token"] == 1.0
    assert measured.metrics["reference_perplexity"] == pytest.approx(np.exp(1.5))
    # Two tokens of the response and one of the prompt.
    assert measured.metrics["diluted_perplexity"] == pytest.approx(np.exp(1.0))


@pytest.mark.parametrize(("failures", "measured_there"), [(2, True), (3, False)])
def test_more_than_two_percent_of_answers_without_a_score_are_no_measurement(failures, measured_there):
    failed = answered([1], error="reward: ConnectError")
    answers = [*[answered([1], correct=1.0)] * (100 - failures), *[failed] * failures]
    references = [None if one is failed else -1.0 for one in answers]
    measured = Measured(seed=0)
    measure_greedy(measured, answers)
    measure_sampled(measured, [[one] for one in answers])
    measure_divergence(measured, [[one] for one in answers], [[one] for one in references])
    scored = {"accuracy", "reward", "reward_part_correct", "sampled_reward", "pass_at_1", "kl"}
    assert scored & measured.metrics.keys() == (scored if measured_there else set())
    assert measured.metrics["failed"] == failures / 100
    expected = f"{failures} of 100 responses could not be scored: reward: ConnectError; "
    assert measured.not_measured.startswith("" if measured_there else expected)
    assert bool(measured.not_measured) != measured_there


def test_a_task_of_a_mixture_that_cannot_be_scored_has_no_accuracy_and_the_others_have():
    answers = [*[answered([1], correct=1.0)] * 98, answered([1]), answered([1], error="reward of b: ConnectError")]
    measured = Measured(seed=0)
    measure_greedy(measured, answers, [*["a"] * 98, "c", "b"])
    found = measured.metrics
    assert (found["accuracy"], found["accuracy_of_a"], found["accuracy_of_c"]) == (0.98, 1.0, 0.0)
    assert not {"accuracy_of_b", "reward_of_b"} & measured.metrics.keys()
    assert measured.not_measured == "1 of 1 responses of b could not be scored: reward of b: ConnectError"


def test_near_duplicates_of_correct_answers_count_once(monkeypatch):
    degrees = {"a": 0, "b": 20, "c": 60, "wrong": 180, "one": 0}

    def embed(texts):
        radians = np.deg2rad([degrees[text] for text in texts])
        return np.stack([np.cos(radians), np.sin(radians)], axis=1)

    first = [answered([1], correct=1.0, text=text) for text in ("a", "b", "c", "c", " ")]
    groups = [
        [*first, answered([1], text="wrong")],
        [answered([1], text=text) for text in ("one", " ", " ", "", "", "")],
    ]
    counts = {}
    for least in (0.0, 0.1, 0.6):
        monkeypatch.setattr("tba.searcher.evaluation.measure.NEAR_DUPLICATE_DISTANCE", least)
        measured = Measured(seed=0)
        measure_diversity(measured, groups, embed)
        counts[least] = measured.metrics["distinct_correct_by_embedding"] * len(groups)
        # The mean over the pairs of the answers that are not empty; the other prompt has one.
        first_five = embed(["a", "b", "c", "c", "wrong"])
        distances = [1 - a @ b for a, b in combinations(first_five, 2)]
        assert measured.metrics["embedding_distance"] == pytest.approx(np.mean(distances))
    # 1 - cos 20 degrees is 0.06, 1 - cos 60 degrees is 0.5.
    assert counts == {0.0: 3, 0.1: 2, 0.6: 1}


@pytest.mark.parametrize(
    ("installed", "chosen", "engine"),
    [(True, (), "vllm"), (False, (), "transformers"), (False, ("search.engine=vllm",), "vllm")],
)
def test_transformers_generates_where_vllm_is_not_installed_and_was_not_asked_for(
    monkeypatch, capsys, installed, chosen, engine
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None if name == "vllm" else find(name))
    found = _with_installed_engine(resolve(None, environment={}, assignments=chosen).config, chosen=bool(chosen))
    assert found.search.engine == engine
    assert ("is not installed: generating with Transformers" in capsys.readouterr().err) == (engine == "transformers")


def test_what_cannot_be_a_model_is_named(tmp_path, example_model):
    config = resolve(None).config
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="nowhere does not exist: name a run directory"):
        find_source(config, tmp_path / "nowhere", None)
    with pytest.raises(UsageError, match="file is a file: name a run directory"):
        find_source(config, tmp_path / "file", None)
    assert find_source(config, example_model, None) == example_model
    with pytest.raises(UsageError, match="is a model directory already: copy it"):
        check_export(example_model, tmp_path / "out")
    with pytest.raises(UsageError, match="has no chat template: leave out --chat"):
        Generator(config, example_model, device="cpu", chat=True)


@pytest.mark.parametrize(
    ("command", "module", "sentence"),
    [
        (("generate", "--model", EXAMPLE_MODEL, "--cpu"), "searcher.generate", "the prompt on standard input is empty"),
        (("export-model", "nowhere", "out"), "trainer.export", "nowhere does not exist"),
        (("sft", EXAMPLE_MODEL / "config.json", "--out", "."), "trainer.sft", ". exists already: name another --out"),
        (("eval", "-c", "run.toml"), "searcher.build", "runs/later/snapshots has no snapshots: train first"),
        (("generate", "47+38=", "-c", "run.toml"), "searcher.build", "runs/later/snapshots has no snapshots"),
    ],
)
def test_wrong_arguments_are_refused_before_torch_is_loaded(tba_here, tmp_path, monkeypatch, command, module, sentence):
    # Of a node with GPUs, which need not be this one to say that there is no run.
    (tmp_path / "run.toml").write_text('run.dir = "runs/later"\nsearch.gpus = "0-6"\n')
    # An import of this module, which loads torch, would fail.
    monkeypatch.setitem(sys.modules, f"tba.{module}", None)
    done = tba_here(*command)
    assert (done.exit_code, sentence in done.message) == (2, True)


@pytest.mark.slow
def test_a_model_directory_is_evaluated_as_a_snapshot_would_be_and_is_no_version_of_the_run(tba_here, tmp_path):
    recipe = EXAMPLE_MODEL.parent / "demo.toml"
    sets = ("task.held_out_limit=12", "eval.samples=0", "task.reward_workers=0", f"model.path={EXAMPLE_MODEL}")
    options = [word for one in (*sets, f"run.dir={tmp_path / 'run'}") for word in ("--set", one)]
    (row,) = json.loads(tba_here("eval", "-c", recipe, *options, "--snapshot", EXAMPLE_MODEL, "--cpu", "--json").output)
    config = resolve(recipe, assignments=sets).config
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=config.search.max_tokens)
    with closing(Generator(config, EXAMPLE_MODEL, device="cpu", chat=False)) as generator:
        prompts = load(config).task.held_out()
        right = [generator.generate(prompt, greedy)[0].text.strip() == prompt.answer for prompt in prompts]
    assert (row["prompts"], row["accuracy"], row["run"]) == (12, sum(right) / 12, str(EXAMPLE_MODEL))
    assert not (tmp_path / "run" / "eval.jsonl").exists()


def test_a_model_directory_that_was_not_measured_is_named(example_model):
    rows = [{"version": 0, "not_measured": "judge down"}]
    with pytest.raises(
        TbaError, match=rf"^{example_model} not measured: .* `tba eval --snapshot {example_model}` repeats"
    ):
        _check_measured(rows, example_model)
    with pytest.raises(TbaError, match=r"^v0 not measured: .* `tba eval --all` repeats"):
        _check_measured(rows, None)


def test_the_divergence_of_a_model_directory_from_one_with_other_tokens_is_refused(tmp_path):
    other = shutil.copytree(EXAMPLE_MODEL, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    sections = {"model": {"path": str(EXAMPLE_MODEL)}, "eval": {"kl": True, "samples": 1}}
    found = evaluate_snapshots(
        Config.model_validate(sections), other, every=False, device="cpu", known={}, report=lambda *_: True
    )
    with pytest.raises(ConfigError, match=rf"eval\.kl of {other}: model\.path {EXAMPLE_MODEL} has another tokenizer"):
        next(iter(found))
