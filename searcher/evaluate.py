"""Greedy accuracy on the held-out prompts, for one model or for the snapshots of a run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.durable import sha256_of
from tba.common.errors import EngineError, SnapshotError, TaskError
from tba.common.log import get_logger
from tba.common.snapshot import MANIFEST, Snapshot, choose_snapshots, read
from tba.common.trajectory import STOP_EOS
from tba.common.wire import WeightsRef
from tba.searcher.engine import Engine, Generation, GenerationRequest, SamplingSettings
from tba.searcher.groups import Tokenizer
from tba.searcher.host_copy import HostCopy
from tba.searcher.node_cache import Held
from tba.searcher.prefetch import weights_directory
from tba.searcher.run import load_tokenizer, make_engine
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import CORRECT, Prompt, Task

log = get_logger(__name__)

_ATTEMPTS = 5  # to read the newest snapshot of a run that publishes quickly


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result for one snapshot; `accuracy` and `reward` are means over `prompts` held-out prompts."""

    version: int
    step: int
    accuracy: float
    reward: float
    prompts: int


class Evaluator:
    """One engine that evaluates one snapshot after another. Raises TaskError without held-out prompts."""

    def __init__(self, engine: Engine, task: Task, tokenizer: Tokenizer, max_tokens: int) -> None:
        if not task.held_out():
            raise TaskError(f"task {task.name} has no held-out prompts: set task.test")
        self._engine = engine
        self._task = task
        self._tokenizer = tokenizer
        self._greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=max_tokens)

    def evaluate(self, snapshot: Snapshot) -> Evaluation:
        """Load a snapshot and answer every held-out prompt greedily."""
        self._engine.load_weights(snapshot)
        prompts = self._task.held_out()
        rewards = np.zeros((len(prompts), 2))
        for generation in self._generate(prompts):
            rewards[generation.id] = self._score(prompts[generation.id], generation)
        accuracy, reward = rewards.mean(axis=0)
        manifest = snapshot.manifest
        return Evaluation(manifest.version, manifest.step, float(accuracy), float(reward), len(prompts))

    def _generate(self, prompts: Sequence[Prompt]) -> Iterator[Generation]:
        for id_, prompt in enumerate(prompts):
            ids = np.asarray(self._tokenizer.encode(prompt.text), np.int32)
            try:
                self._engine.submit(GenerationRequest(id_, ids, self._greedy))
            except EngineError as error:  # it counts as answered wrongly
                log.warning("prompt not evaluated", prompt=prompt.key, reason=str(error))
        while self._engine.in_flight:
            yield from self._engine.step()

    def _score(self, prompt: Prompt, generation: Generation) -> tuple[float, float]:
        text = self._tokenizer.decode(generation.response_ids.tolist(), skip_special_tokens=True)
        reward = self._task.score(prompt, text, generation.stop_reason == STOP_EOS)
        return reward.parts[CORRECT], reward.total


def evaluate_snapshots(config: Config, named: Path | None, *, every: bool, device: str) -> Iterator[Evaluation]:
    """Evaluate the snapshot that is named, all that a run has kept, or its newest, with one engine.

    Each is verified first; of a delta the complete weights are made. A trainer may be at work beside: what it has
    collected since the start is left out, and the newest is that of the moment at which the engine is ready. Raises
    UsageError if there is none, SnapshotError if one cannot be read.
    """
    paths = choose_snapshots(config.snapshots, named, every=every)  # at once, so that a mistake costs no waiting
    task, tokenizer = load_task(config.task), load_tokenizer(config.model.path)
    with contextlib.ExitStack() as ending:
        copies = HostCopy(weights_directory(config), "path", SystemClock())
        ending.callback(copies.remove_made)
        # Before the engine in the stack, so after it at the end: it may read again what it serves.
        serving = ending.enter_context(contextlib.ExitStack())
        engine = make_engine(config, device=device, name="eval")
        ending.callback(engine.close)
        evaluator = Evaluator(engine, task, tokenizer, config.search.max_tokens)
        for snapshot, held in _prepared(config, copies, named, paths if every else None):
            before = serving.pop_all()
            serving.callback(held.release)
            with before:
                result = evaluator.evaluate(snapshot)
            yield result


def _prepared(
    config: Config, copies: HostCopy, named: Path | None, paths: Sequence[Path] | None
) -> Iterator[tuple[Snapshot, Held]]:
    """The snapshot that is named; or all of `paths` that are still there; or the newest."""
    if named is not None:
        yield copies.prepare(_ref(named))
    elif paths is None:
        yield _newest(config, copies)
    else:
        for path in paths:
            if prepared := _unless_collected(copies, path):
                yield prepared
            else:
                log.warning("snapshot not evaluated: the trainer has collected it", path=path)


def _newest(config: Config, copies: HostCopy) -> tuple[Snapshot, Held]:
    """The newest snapshot, chosen again if the trainer collects it before it is held here."""
    for _ in range(_ATTEMPTS):
        (path,) = choose_snapshots(config.snapshots, None, every=False)
        if prepared := _unless_collected(copies, path):
            return prepared
    raise SnapshotError(
        f"{config.snapshots}: each snapshot was collected before it could be read: raise train.keep_snapshots"
    )


def _unless_collected(copies: HostCopy, path: Path) -> tuple[Snapshot, Held] | None:
    try:
        return copies.prepare(_ref(path))
    except (SnapshotError, OSError):
        if (path / MANIFEST).is_file():
            raise
        return None


def _ref(path: Path) -> WeightsRef:
    manifest = read(path).manifest
    return WeightsRef(
        version=manifest.version, step=manifest.step, path=str(path), manifest_sha256=sha256_of(path / MANIFEST)
    )
