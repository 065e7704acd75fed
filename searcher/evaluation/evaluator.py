"""Evaluate snapshots with one engine: task, scorers, reference and sentence encoder are loaded once."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import TaskError
from tba.common.evaluations import Row
from tba.common.log import get_logger
from tba.common.rendering import PromptRenderer
from tba.common.system.watchdog import Watchdog
from tba.common.weights.model_files import model_directory
from tba.common.weights.node_store import PinnedSnapshot, weights_directory
from tba.common.weights.snapshot import Manifest, Snapshot
from tba.common.weights.tokenizer import load_tokenizer
from tba.common.wire.fields import NO_VISIT
from tba.common.wire.keys import node_pair
from tba.common.wire.messages import Visit
from tba.common.wire.trajectory import STOP_EOS, Trajectory
from tba.searcher.build import context_of, make_engine, make_rewards, mean_tokens
from tba.searcher.engines.engine import Engine, SamplingSettings
from tba.searcher.engines.stopping import Stopping, read_stopping
from tba.searcher.evaluation import measure
from tba.searcher.evaluation.answers import Answer, Question, answer, for_storage
from tba.searcher.evaluation.win_rate import GoldModel, check_references
from tba.searcher.exploration import Exploration
from tba.searcher.scoring.model_scorer import ModelScorer
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import (
    Prompt,
    Task,
    check_answers,
    check_rendering,
    fingerprint,
    least_reward_for,
    name_of,
)
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.progress import Progress

log = get_logger(__name__)

# Of [task]: what changes neither prompts nor scores, or is part of the prompts' own hash.
_NOT_SCORING = {"train", "test", "limit", "held_out_limit", "reward_workers", "reward_concurrency"}
_OF_CLASSIFIER = {"path", "weight", "template"}
_NOT_MEASURED = {"at_end", "gpu"}
# Held-out prompts whose greedy response is stored with each evaluation.
_STORED_RESPONSES = 500
_REFERENCE_ROWS = 256
_HASH_DIGITS = 16
# The sampled answers of an evaluation have seeds of their own, as those of an epoch do.
_EPOCH = 0

# What is being done, how much of it is done, and how much there is. False ends the evaluation without a result.
Report = Callable[[str, int, int], bool]
LogprobsOf = Callable[[Sequence[Trajectory]], list[float | None]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: the held-out prompts, how they are rendered, what ends an answer, the hash of all settings."""

    task: Task
    renderer: PromptRenderer
    stopping: Stopping
    prompts: Sequence[Prompt]
    prompt_set: str
    settings: str

    def key(self, manifest: Manifest) -> tuple[Any, ...]:
        """Return what identifies the evaluation of a snapshot: `tba.common.evaluations.KEY`."""
        return manifest.run, manifest.version, self.prompt_set, self.settings


def read_subject(config: Config) -> Subject:
    """Load the held-out prompts. Raises TaskError if there are none."""
    task = load_task(config.task)
    renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
    # A prompt that occurs twice counts once.
    prompts = list({prompt.key: prompt for prompt in task.held_out()}.values())
    if not prompts:
        raise TaskError(f"task {task.name} has no held-out prompts: set task.test")
    check_answers(task)
    check_rendering(task, prompts, renderer, context_of(config))
    settings = {
        "task": config.task.model_dump(mode="json", exclude=_NOT_SCORING),
        **_scoring_models(config),
        "eval": config.eval.model_dump(mode="json", exclude=_NOT_MEASURED),
        "max_tokens": max_tokens(config),
        "stop": config.search.stop,
        "seed": config.run.seed,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    prompt_set = fingerprint(prompts, renderer.settings(prompts))
    stopping = read_stopping(config, renderer.tokenizer)
    return Subject(task, renderer, stopping, prompts, prompt_set[:_HASH_DIGITS], digest[:_HASH_DIGITS])


def _scoring_models(config: Config) -> dict[str, Any]:
    """Return the settings of the classifiers that change scores."""
    reward, gold = config.reward_model, config.gold_model.classifier
    served = {"url", "api", "served_model"}
    found = {"reward_model": reward.model_dump(mode="json", include=_OF_CLASSIFIER | (served if reward.url else set()))}
    if gold.configured:
        found["gold_model"] = gold.model_dump(mode="json", include=_OF_CLASSIFIER | served)
    return found


def max_tokens(config: Config) -> int:
    """Return the maximum length of an answer in tokens."""
    return config.search.max_tokens


class Evaluator:
    """Evaluates one snapshot after the other. `open_evaluator` makes it and frees what it holds."""

    def __init__(
        self,
        config: Config,
        subject: Subject,
        *,
        engine: Engine,
        rewards: Rewards,
        references: LogprobsOf | None,
        embed: measure.Embed | None,
        gold: GoldModel | None,
        serving: contextlib.ExitStack,
    ) -> None:
        self._config = config
        self.subject = subject
        self._engine = engine
        self._rewards = rewards
        self._references = references
        self._embed = embed
        self._gold = gold
        self._serving = serving
        self._questions = questions(config, subject)

    def evaluate(self, snapshot: Snapshot, pinned: PinnedSnapshot, report: Report = lambda *_: True) -> Row | None:
        """Load a snapshot, which stays pinned until the next one is loaded, and return its evaluation.

        Returns None if `report` returned False. Raises SnapshotError if the engine refuses the snapshot.
        """
        manifest, started = snapshot.manifest, time.monotonic()
        doing, total = f"v{manifest.version}", len(self._questions)

        def step(finished: int) -> bool:
            watchdog.beat(warm=finished > 0)
            return report(doing, finished, total)

        with self._watched() as watchdog:
            # The weights are read here, not in another thread as in a searcher, so a load has four times as long.
            watchdog.beat(warm=False)
            self._serve(snapshot, pinned)
            answers = answer(
                self._engine,
                self._rewards,
                self.subject.stopping.scored_text,
                self.subject.prompts,
                self._questions,
                step,
                partial(least_reward_for, self.subject.task),
            )
        measured = None if answers is None else self._measure(answers, lambda: report(doing, total, total))
        if answers is None or measured is None:
            return None
        most = min(len(self.subject.prompts), _STORED_RESPONSES)
        texts = [self.subject.renderer.text(prompt) for prompt in self.subject.prompts[:most]]
        row = self._row(manifest, measured, time.monotonic() - started)
        return row | {"responses": for_storage(texts, self.subject.prompts, answers)}

    def _serve(self, snapshot: Snapshot, pinned: PinnedSnapshot) -> None:
        """Load a snapshot. Until it serves, the one before stays pinned: the engine reads it again after an error."""
        try:
            self._engine.load_weights(snapshot)
        except BaseException:
            pinned.release()
            raise
        self._serving.pop_all().close()
        self._serving.callback(pinned.release)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Watchdog]:
        """End the process if the engine hangs, as a searcher does."""
        watchdog = Watchdog(limit_seconds=self._config.search.step_seconds, setting="search.step_seconds")
        watchdog.start()
        try:
            yield watchdog
        finally:
            watchdog.stop()

    def _measure(self, answers: Sequence[Answer], go_on: Callable[[], bool]) -> measure.Measured | None:
        prompts, samples = len(self.subject.prompts), self._config.eval.samples
        measured = measure.Measured(self._config.run.seed)
        names = [name_of(self.subject.task, prompt) for prompt in self.subject.prompts]
        tasks = names if len(set(names)) > 1 else ()
        measure.measure_greedy(measured, answers[:prompts], tasks)
        if self._gold is not None and not self._compare(measured, answers[:prompts], self._gold, go_on):
            return None
        if not samples:
            return measured
        groups = [answers[start : start + samples] for start in range(prompts, len(answers), samples)]
        measure.measure_sampled(measured, groups, tasks)
        if self._references is not None:
            found = self._reference_logprobs(answers[prompts:], go_on)
            if found is None:
                return None
            references = [found[start : start + samples] for start in range(0, len(found), samples)]
            measure.measure_divergence(measured, groups, references)
        if self._embed is not None:
            measure.measure_diversity(measured, groups, self._embed, tasks=tasks, go_on=go_on)
        return measured if go_on() else None

    def _compare(
        self, measured: measure.Measured, answers: Sequence[Answer], gold: GoldModel, go_on: Callable[[], bool]
    ) -> bool:
        """Add the win rate. Returns False if `go_on` did."""
        scores = gold.compare([one.text for one in answers], go_on)
        if scores is not None:
            measure.measure_win_rate(measured, answers, [prompt.answer for prompt in self.subject.prompts], *scores)
        return scores is not None

    def _reference_logprobs(self, answers: Sequence[Answer], go_on: Callable[[], bool]) -> list[float | None] | None:
        assert self._references is not None
        found: list[float | None] = []
        for start in range(0, len(answers), _REFERENCE_ROWS):
            if not go_on():
                return None
            found += self._references([_as_row(one) for one in answers[start : start + _REFERENCE_ROWS]])
        return found

    def _row(self, manifest: Manifest, measured: measure.Measured, seconds: float) -> Row:
        return {
            "run": manifest.run,
            "version": manifest.version,
            "step": manifest.step,
            "prompts": len(self.subject.prompts),
            "prompt_set": self.subject.prompt_set,
            "settings": self.subject.settings,
            "evaluated_at": time.time(),
            "seconds": seconds,
            **measured.metrics,
            **({"not_measured": measured.not_measured} if measured.not_measured else {}),
            "intervals": {name: list(ends) for name, ends in measured.intervals.items()},
        }


def questions(config: Config, subject: Subject) -> list[Question]:
    """Return the greedy question of every prompt, then `eval.samples` sampled ones of each."""
    prompts = subject.prompts
    ids = [np.asarray(subject.renderer.ids(prompt), np.int32) for prompt in prompts]
    length, section = max_tokens(config), config.eval
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=length)
    asked = [Question(number, ids[number], greedy) for number in range(len(prompts))]
    sampled = {"temperature": section.temperature, "top_p": 1.0, "max_tokens": length}
    exploration = Exploration(config.search.model_copy(update=sampled), run_seed=config.run.seed, searcher="eval")
    for number, prompt in enumerate(prompts):
        visit = Visit(lease=NO_VISIT, epoch=_EPOCH, prompt_key=prompt.key)
        asked += [Question(number, ids[number], exploration.settings(visit, n)) for n in range(section.samples)]
    return asked


@contextlib.contextmanager
def open_evaluator(
    config: Config,
    subject: Subject,
    *,
    device: str,
    name: str,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> Iterator[tuple[Evaluator, SnapshotAssembler]]:
    """Start everything that evaluations need, and the assembler of their snapshots. Frees it at the end of the block.

    `progress` is that of snapshots that are fetched.
    Raises ConfigError for a model or task that cannot be loaded.
    """
    with contextlib.ExitStack() as ending:
        own = node_pair(config.security)
        assembler = SnapshotAssembler(weights_directory(config), "auto", SystemClock(), progress, own)
        ending.callback(assembler.remove_created)
        # Before the engine, as `WorkerPool` says.
        rewards = make_rewards(config, subject.task, device, stop)
        ending.callback(rewards.close)
        gold = _load_gold(config, subject.prompts, device, stop)
        if gold is not None:
            ending.callback(gold.close)
        # Entered before the engine, so released after it: the engine may read the files of the weights it serves.
        serving = ending.enter_context(contextlib.ExitStack())
        prompt_tokens = mean_tokens(subject.prompts, subject.renderer)
        engine = make_engine(config, subject.stopping, device=device, name=name, prompt_tokens=prompt_tokens)
        ending.callback(engine.close)
        evaluator = Evaluator(
            config,
            subject,
            engine=engine,
            rewards=rewards,
            references=_load_reference(config, device),
            embed=_load_embedder(config, device),
            gold=gold,
            serving=serving,
        )
        yield evaluator, assembler


def _load_gold(config: Config, prompts: Sequence[Prompt], device: str, stop: Callable[[], bool]) -> GoldModel | None:
    if not config.gold_model.configured:
        return None
    check_references(prompts)
    return GoldModel(ModelScorer(config.gold_model.classifier, device, stop, section="gold_model"), prompts)


def _load_reference(config: Config, device: str) -> LogprobsOf | None:
    if not (config.eval.kl and config.eval.samples):
        return None
    from tba.searcher.scoring.reference_model import ReferenceModel

    return ReferenceModel(config.model.path, device=device, dtype=config.model.dtype).logprobs


def _load_embedder(config: Config, device: str) -> measure.Embed | None:
    if not (config.eval.embedder and config.eval.samples):
        return None
    from tba.searcher.evaluation.embedder import SentenceEncoder

    return SentenceEncoder(config.eval.embedder, device=device).embed


def _as_row(one: Answer) -> Trajectory:
    """Return an answer as what a reference model scores."""
    return Trajectory(
        prompt_key="",
        lease=NO_VISIT,
        prompt_ids=one.question.ids,
        response_ids=one.response_ids,
        logprobs=np.zeros(0, np.float32),
        version_runs=np.zeros((0, 2), np.int32),
        reward=0.0,
        reward_parts={},
        stop_reason=STOP_EOS,
        sampling={},
        created_at=0.0,
        generation_seconds=0.0,
    )
