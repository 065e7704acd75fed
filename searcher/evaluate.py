"""Evaluation: greedy accuracy on the held-out prompts, for one model or for the snapshots of a run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import EngineError, SnapshotError, TaskError
from tba.common.log import get_logger
from tba.common.system.durable import sha256_of
from tba.common.weights.model_files import model_directory
from tba.common.weights.node_store import PinnedSnapshot, weights_directory
from tba.common.weights.snapshot import MANIFEST, Snapshot, choose_snapshots, read
from tba.common.weights.tokenizer import encode_prompt, load_tokenizer
from tba.common.wire.messages import WeightsRef
from tba.common.wire.trajectory import STOP_EOS
from tba.searcher.engines.engine import Engine, GenerationRequest, SamplingSettings
from tba.searcher.pipeline import Tokenizer
from tba.searcher.run import make_engine
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import CORRECT, Task
from tba.searcher.weights.assembly import SnapshotAssembler

log = get_logger(__name__)

# Attempts to read the newest snapshot of a run that publishes and deletes quickly.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result for one snapshot; `accuracy` and `reward` are means over `prompts` held-out prompts."""

    version: int
    step: int
    accuracy: float
    reward: float
    prompts: int


def evaluate_snapshots(config: Config, named: Path | None, *, every: bool, device: str) -> Iterator[Evaluation]:
    """Evaluate the named snapshot, every snapshot that a run has kept, or its newest one, with a single engine.

    Each snapshot is verified first, and a delta is assembled to complete weights. The trainer may be running: snapshots
    that it deletes meanwhile are left out, and the newest one is chosen when the engine is ready. Raises UsageError if
    there is none, SnapshotError if one cannot be read, TaskError if the task has no held-out prompts.
    """
    # First, so that a mistake in the arguments is reported before the engine starts, which may take minutes.
    paths = choose_snapshots(config.snapshots, weights_directory(config), named, every=every)
    task, tokenizer = load_task(config.task), load_tokenizer(model_directory(config.model.path))
    if not task.held_out():
        raise TaskError(f"task {task.name} has no held-out prompts: set task.test")
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=config.search.max_tokens)
    with contextlib.ExitStack() as ending:
        assembler = SnapshotAssembler(weights_directory(config), "path", SystemClock())
        ending.callback(assembler.remove_created)
        # Entered before the engine, so released after it: the engine may read the files of the weights it serves.
        serving = ending.enter_context(contextlib.ExitStack())
        engine = make_engine(config, device=device, name="eval")
        ending.callback(engine.close)
        for snapshot, pinned in _prepared(config, assembler, named, paths if every else None):
            before = serving.pop_all()
            serving.callback(pinned.release)
            with before:
                result = _evaluate(engine, task, tokenizer, snapshot, greedy)
            yield result


def _evaluate(
    engine: Engine, task: Task, tokenizer: Tokenizer, snapshot: Snapshot, settings: SamplingSettings
) -> Evaluation:
    """Load a snapshot and answer every held-out prompt."""
    engine.load_weights(snapshot)
    prompts = task.held_out()
    for id_, prompt in enumerate(prompts):
        ids = np.asarray(encode_prompt(tokenizer, prompt.text), np.int32)
        try:
            engine.submit(GenerationRequest(id_, ids, settings))
        # It counts as a wrong answer.
        except EngineError as error:
            log.warning("prompt not evaluated", prompt=prompt.key, reason=str(error))
    rewards = np.zeros((len(prompts), 2))
    while engine.in_flight:
        for generation in engine.step():
            text = tokenizer.decode(generation.response_ids.tolist(), skip_special_tokens=True)
            reward = task.score(prompts[generation.id], text, generation.stop_reason == STOP_EOS)
            rewards[generation.id] = reward.parts[CORRECT], reward.total
    accuracy, mean_reward = rewards.mean(axis=0)
    manifest = snapshot.manifest
    return Evaluation(manifest.version, manifest.step, float(accuracy), float(mean_reward), len(prompts))


def _prepared(
    config: Config, assembler: SnapshotAssembler, named: Path | None, paths: Sequence[Path] | None
) -> Iterator[tuple[Snapshot, PinnedSnapshot]]:
    """Yield the named snapshot; or those of `paths` that still exist; or the newest."""
    if named is not None:
        yield assembler.assemble(_ref(named))
    elif paths is None:
        # The newest. It is chosen again if the trainer deletes it before it is pinned here.
        for _ in range(_ATTEMPTS):
            (path,) = choose_snapshots(config.snapshots, weights_directory(config), None, every=False)
            if prepared := _unless_collected(assembler, path):
                yield prepared
                return
        raise SnapshotError(
            f"{config.snapshots}: each snapshot was collected before it could be read: raise train.keep_snapshots"
        )
    else:
        for path in paths:
            if prepared := _unless_collected(assembler, path):
                yield prepared
            else:
                log.warning("snapshot not evaluated: the trainer has collected it", path=path)


def _unless_collected(assembler: SnapshotAssembler, path: Path) -> tuple[Snapshot, PinnedSnapshot] | None:
    """Assemble a snapshot. None if the trainer has deleted it, of which the manifest goes first."""
    try:
        return assembler.assemble(_ref(path))
    except (SnapshotError, OSError):
        if (path / MANIFEST).is_file():
            raise
        return None


def _ref(path: Path) -> WeightsRef:
    manifest = read(path).manifest
    return WeightsRef(
        version=manifest.version, step=manifest.step, path=str(path), manifest_sha256=sha256_of(path / MANIFEST)
    )
