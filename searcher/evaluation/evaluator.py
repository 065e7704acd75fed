"""Evaluate snapshots with one engine: task, scorers, reference and sentence encoder are loaded once.

`tba eval` evaluates one snapshot, the newest, or all that a run has kept (`evaluate_snapshots`); `follower.py` those of
a run in progress.
"""

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import SnapshotError, TaskError
from tba.common.evaluations import Row
from tba.common.log import get_logger
from tba.common.run_snapshots import is_model_directory, pin_newest, weights_directory
from tba.common.system.durable import sha256_of
from tba.common.system.process import notify_systemd
from tba.common.system.watchdog import Watchdog
from tba.common.weights.model_files import model_directory
from tba.common.weights.node_store import PinnedSnapshot
from tba.common.weights.pretrained import check_same_tokens
from tba.common.weights.snapshot import MANIFEST, Canary, Manifest, Snapshot, choose_snapshots, read
from tba.common.wire.fields import NO_VISIT
from tba.common.wire.keys import node_pair
from tba.common.wire.messages import MAX_RESPONSES, MAX_STORED_TEXT, Visit, WeightsRef
from tba.common.wire.trajectory import Trajectory
from tba.searcher.build import LoadedTask, context_of, load, make_engine, make_rewards, mean_tokens, served
from tba.searcher.engines.engine import Engine, SamplingSettings
from tba.searcher.episodes import Episodes, Limits
from tba.searcher.evaluation import measure
from tba.searcher.pipeline import Exploration, GenerationStage, ScoringStage
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import storable
from tba.searcher.tasks import task as tasks
from tba.searcher.tasks.task import Prompt
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.searcher.weights.fetch import Progress

log = get_logger(__name__)

# Keys of [task] that change neither prompts nor scores, or are part of the prompts' own hash.
_NOT_SCORING = {"train", "test", "limit", "held_out_limit", "reward_workers", "reward_concurrency", "phases"}
_OF_CLASSIFIER, _OF_SERVER = {"path", "weight", "template"}, {"url", "api", "served_model"}
_NOT_MEASURED = {"at_end", "gpu", "stored_responses"}
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

    loaded: LoadedTask
    prompts: Sequence[Prompt]
    prompt_set: str
    settings: str

    def key(self, manifest: Manifest) -> tuple[Any, ...]:
        """Return what identifies the evaluation of a snapshot: `tba.common.evaluations.KEY`."""
        return manifest.run, manifest.version, self.prompt_set, self.settings


def read_subject(config: Config) -> Subject:
    """Load the held-out prompts. Raises TaskError without any."""
    task, renderer, _ = loaded = load(config)
    # A prompt that occurs twice counts once.
    prompts = list({prompt.key: prompt for prompt in task.held_out()}.values())
    if not prompts:
        raise TaskError(f"task {task.name} has no held-out prompts: set task.test")
    tasks.check_answers(task)
    tasks.check_rendering(task, prompts, renderer, context_of(config))
    scoring = _OF_CLASSIFIER | (_OF_SERVER if config.reward_model.url else set())
    plays = any(tasks.has_environment(task, prompt) for prompt in prompts)
    # What changes no number must not have a curve of evaluations repeated.
    settings = {
        "task": config.task.model_dump(mode="json", exclude=_NOT_SCORING),
        "reward_model": config.reward_model.model_dump(mode="json", include=scoring),
        "eval": config.eval.model_dump(mode="json", exclude=_NOT_MEASURED),
        "max_tokens": config.search.max_tokens,
        "stop": config.search.stop,
        **({"turns": config.search.max_turns, "turn_tokens": config.search.turn_tokens} if plays else {}),
        "seed": config.run.seed,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    prompt_set = tasks.fingerprint(prompts, renderer.settings(prompts))
    return Subject(loaded, prompts, prompt_set[:_HASH_DIGITS], digest[:_HASH_DIGITS])


_WAIT_SECONDS = 1.0
# Limit of the texts of an evaluation, which must fit the header of a message.
_STORED_BYTES = 8 << 20


class Question(NamedTuple):
    """A request for one answer to the prompt with this key."""

    key: str
    sampling: SamplingSettings


class Answering:
    """Asks the same questions of one snapshot after the other. Responses that are cut off are scored as they are."""

    def __init__(
        self, config: Config, subject: Subject, engine: Engine, rewards: Rewards, questions: Sequence[Question]
    ) -> None:
        task, renderer, stopping = subject.loaded
        self._task, self.engine, self.questions = task, engine, questions
        # The lease of a visit is the number of its question, from 1 on.
        self._visits = [Visit(lease=n, epoch=0, prompt_key=one.key) for n, one in enumerate(questions, 1)]
        self._generation = GenerationStage(
            engine, subject.loaded, subject.prompts, lambda visit, _: questions[visit.lease - 1].sampling, samples=1
        )
        limits, version = Limits.of(config), lambda: engine.weights_version
        episodes = Episodes(self._generation.ask, rewards, renderer, stopping, limits, version)
        self._scoring = ScoringStage(rewards, stopping, "score", episodes, gives_up=False)

    def answer(self, go_on: Callable[[int], bool] = lambda _: True) -> list[Trajectory] | None:
        """Return the answers in the order of the questions, as rows; those with an error have their least reward.

        `go_on` is called with the number of finished answers; returns None if it returned False.
        """
        waiting, rows = deque(self._visits), dict[int, Trajectory]()
        while len(rows) < len(self._visits):
            # One load in the engine and one behind it, as in a searcher.
            while waiting and self._has_room:
                for episode in self._generation.submit(waiting.popleft()):
                    self._scoring.play(*episode)
            for response in self._generation.done():
                self._scoring.submit(response)
            is_busy = self._generation.waiting or (waiting and self._has_room)
            for group in self._scoring.done(0.0 if is_busy else _WAIT_SECONDS):
                (row,) = group.done
                if row.error is not None:
                    # Where every reward is negative, 0 would be better than any answer.
                    row = replace(row, reward=tasks.least_reward(self._task, group.prompt), reward_parts={})
                rows[row.lease] = row
            if not go_on(len(rows)):
                return None
        return [rows[visit.lease] for visit in self._visits]

    @property
    def _has_room(self) -> bool:
        load = max(self.engine.in_flight, len(self._scoring.episodes))
        return load < 2 * self.engine.max_in_flight


def for_storage(texts: Sequence[str], prompts: Sequence[Prompt], answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Return the first responses as fields of `HeldOutResponse`: one per text of a prompt, as many as there is room."""
    found, size = [], 0
    for text, prompt, one in zip(texts[:MAX_RESPONSES], prompts, answers, strict=False):
        # What a response comes to is at its end.
        cut = [storable(part[-MAX_STORED_TEXT:]) for part in (text, prompt.answer, one.text or "")]
        size += sum(len(part.encode()) for part in cut)
        if size > _STORED_BYTES:
            break
        fields = dict(zip(("prompt_text", "answer", "response"), cut, strict=True))
        score = {"reward": one.reward, "reward_parts": one.reward_parts, "error": one.error}
        found.append({"prompt": prompt.key, **fields, **score})
    return found


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates snapshots, as `open_evaluator` says. `serving` releases the one that the engine serves."""

    config: Config
    subject: Subject
    answering: Answering
    references: LogprobsOf | None
    embed: measure.Embed | None
    serving: contextlib.ExitStack

    def evaluate(
        self, snapshot: Snapshot, pinned: PinnedSnapshot | None, report: Report = lambda *_: True
    ) -> Row | None:
        """Load a snapshot, which stays pinned until the next one is loaded, and return its evaluation.

        Without `pinned` it is what the engine has started with.
        Returns None if `report` returned False. Raises SnapshotError if the engine refuses the snapshot.
        """
        manifest, started = snapshot.manifest, time.monotonic()
        doing, total = f"v{manifest.version}", len(self.answering.questions)

        def step(finished: int) -> bool:
            watchdog.beat(warm=finished > 0)
            return report(doing, finished, total)

        # It ends the process if the engine hangs, as in a searcher.
        watchdog = Watchdog(limit_seconds=self.config.search.step_seconds, setting="search.step_seconds")
        watchdog.start()
        try:
            # The weights are read here, not in another thread as in a searcher, so a load has four times as long.
            watchdog.beat(warm=False)
            if pinned is not None:
                with contextlib.ExitStack() as refused:
                    refused.callback(pinned.release)
                    self.answering.engine.load_weights(snapshot)
                    refused.pop_all()
                # Until then the one before stays pinned: the engine reads it again after an error.
                self.serving.pop_all().close()
                self.serving.callback(pinned.release)
            answers = self.answering.answer(step)
        finally:
            watchdog.stop()
        measured = None if answers is None else self._measure(answers, lambda: report(doing, total, total))
        if answers is None or measured is None:
            return None
        prompts, renderer = self.subject.prompts, self.subject.loaded.renderer
        texts = [renderer.text(prompt) for prompt in prompts[: self.config.eval.stored_responses]]
        return {
            "run": manifest.run,
            "version": manifest.version,
            "step": manifest.step,
            "prompts": len(prompts),
            "prompt_set": self.subject.prompt_set,
            "settings": self.subject.settings,
            "evaluated_at": time.time(),
            "seconds": time.monotonic() - started,
            **measured.metrics,
            **({"not_measured": measured.not_measured} if measured.not_measured else {}),
            "intervals": {name: list(ends) for name, ends in measured.intervals.items()},
            "responses": for_storage(texts, prompts, answers),
        }

    def _measure(self, answers: Sequence[Trajectory], go_on: Callable[[], bool]) -> measure.Measured | None:
        prompts, samples = len(self.subject.prompts), self.config.eval.samples
        measured = measure.Measured(self.config.run.seed)
        names = [tasks.name_of(self.subject.loaded.task, prompt) for prompt in self.subject.prompts]
        labels = names if len(set(names)) > 1 else ()
        measure.measure_greedy(measured, answers[:prompts], labels)
        if not samples:
            return measured
        groups = [answers[start : start + samples] for start in range(prompts, len(answers), samples)]
        measure.measure_sampled(measured, groups, labels)
        if self.references is not None:
            found: list[float | None] = []
            for start in range(prompts, len(answers), _REFERENCE_ROWS):
                if not go_on():
                    return None
                found += self.references(answers[start : start + _REFERENCE_ROWS])
            references = [found[start : start + samples] for start in range(0, len(found), samples)]
            measure.measure_divergence(measured, groups, references)
        if self.embed is not None:
            measure.measure_diversity(measured, groups, self.embed, tasks=labels, go_on=go_on)
        return measured if go_on() else None


def questions(config: Config, subject: Subject) -> list[Question]:
    """Return the greedy question of every prompt, then `eval.samples` sampled ones of each."""
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=config.search.max_tokens)
    asked = [Question(prompt.key, greedy) for prompt in subject.prompts]
    sampled = {"temperature": config.eval.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    exploration = Exploration(config.search.model_copy(update=sampled), run_seed=config.run.seed, searcher="eval")
    for prompt in subject.prompts:
        visit = Visit(lease=NO_VISIT, epoch=_EPOCH, prompt_key=prompt.key)
        asked += [Question(prompt.key, exploration.settings(visit, n)) for n in range(config.eval.samples)]
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
    served: Config | None = None,
) -> Iterator[tuple[Evaluator, SnapshotAssembler]]:
    """Start everything that evaluations need, and the assembler of their snapshots. Frees it at the end of the block.

    `progress` is that of snapshots that are fetched. `served` names another model than `config` for the engine.
    Raises ConfigError for a model or task that cannot be loaded.
    """
    task, renderer, stopping = subject.loaded
    with contextlib.ExitStack() as ending:
        own = node_pair(config.security.keys)
        assembler = SnapshotAssembler(weights_directory(config), "auto", SystemClock(), progress or Progress(), own)
        ending.callback(assembler.remove_created)
        # Before the engine, as `WorkerPool` says.
        rewards = make_rewards(config, task, device, stop)
        ending.callback(rewards.close)
        # Entered before the engine, so released after it: the engine may read the files of the weights it serves.
        serving = ending.enter_context(contextlib.ExitStack())
        prompt_tokens = mean_tokens(subject.prompts, renderer)
        engine = make_engine(served or config, stopping, device=device, name=name, prompt_tokens=prompt_tokens)
        ending.callback(engine.close)
        references = embed = None
        if config.eval.kl and config.eval.samples:
            from tba.searcher.evaluation.models import ReferenceModel

            references = ReferenceModel(config.model.path, device=device, dtype=config.model.dtype).logprobs
        if config.eval.embedder and config.eval.samples:
            from tba.searcher.evaluation.models import SentenceEncoder

            embed = SentenceEncoder(config.eval.embedder, device=device).embed
        answering = Answering(config, subject, engine, rewards, questions(config, subject))
        yield Evaluator(config, subject, answering, references, embed, serving), assembler


def evaluate_snapshots(
    config: Config,
    named: Path | None,
    *,
    every: bool,
    device: str,
    known: Mapping[tuple[Any, ...], Row],
    report: Report,
) -> Iterator[tuple[Row, bool]]:
    """Evaluate the named snapshot or model directory, every snapshot that a run has kept, or its newest one.

    One engine evaluates all. Yields each evaluation, and whether it is new: those in `known` are not repeated, and come
    first. Each snapshot is verified, and a delta is assembled to complete weights. The trainer may be running: those
    that it deletes meanwhile are left out, and the newest one is chosen when the engine is ready. Raises UsageError if
    there is none, SnapshotError if one cannot be read, TaskError if the task has no held-out prompts, ConfigError for
    `eval.kl` of a model directory whose tokenizer is not that of `model.path`.
    """
    if named is not None and is_model_directory(named):
        if config.eval.kl and config.eval.samples:
            names = ("the model", f"eval.kl of {named}: model.path", "a model")
            check_same_tokens(named, model_directory(config.model.path), names=names)
        model = served(config, named)
        with open_evaluator(config, read_subject(model), device=device, name="eval", served=model) as (evaluator, _):
            own = Snapshot(named, Manifest(str(named), 0, 0, 0.0, {}, Canary([], [])), [])
            if (row := evaluator.evaluate(own, None, report)) is not None:
                yield row, True
        return
    # First, so that a mistake in the arguments is reported before the engine starts, which may take minutes.
    paths = choose_snapshots(config.snapshots, weights_directory(config), named, every=every)
    subject, count, new = read_subject(config), len(paths), []
    for path in paths:
        row = None
        # One that cannot be read is reported when it is evaluated.
        with contextlib.suppress(SnapshotError):
            row = known.get(subject.key(read(path).manifest))
        if row is None:
            new.append(path)
        else:
            yield row, False
    if not new:
        return
    with open_evaluator(config, subject, device=device, name="eval") as (evaluator, assembler):
        prepared = _prepared(config, assembler, named, new if every else None)
        for number, (snapshot, pinned) in enumerate(prepared, count - len(new) + 1):
            notify_systemd(f"STATUS=evaluates snapshot {number} of {count}")
            row = evaluator.evaluate(snapshot, pinned, report)
            if row is None:
                return
            yield row, True


def _prepared(
    config: Config, assembler: SnapshotAssembler, named: Path | None, paths: Sequence[Path] | None
) -> Iterator[tuple[Snapshot, PinnedSnapshot]]:
    """Yield the named snapshot; or those of `paths` that still exist; or the newest."""
    if named is not None:
        yield assembler.assemble(ref_of(named))
    elif paths is None:
        yield pin_newest(config, partial(unless_deleted, assembler))
    else:
        for path in paths:
            if prepared := unless_deleted(assembler, path):
                yield prepared
            else:
                log.warning("snapshot not evaluated: the trainer has deleted it", path=path)


def unless_deleted(assembler: SnapshotAssembler, path: Path) -> tuple[Snapshot, PinnedSnapshot] | None:
    """Assemble a snapshot. None if the trainer has deleted it, of which the manifest goes first."""
    try:
        return assembler.assemble(ref_of(path))
    except (SnapshotError, OSError):
        if (path / MANIFEST).is_file():
            raise
        return None


def ref_of(path: Path) -> WeightsRef:
    """Return the announcement of a snapshot on this machine."""
    manifest, digest = read(path).manifest, sha256_of(path / MANIFEST)
    return WeightsRef(version=manifest.version, step=manifest.step, path=str(path), manifest_sha256=digest)
