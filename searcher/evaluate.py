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
from tba.common.rendering import PromptRenderer
from tba.common.system.durable import sha256_of
from tba.common.weights.model_files import model_directory
from tba.common.weights.node_store import PinnedSnapshot, weights_directory
from tba.common.weights.snapshot import MANIFEST, Snapshot, choose_snapshots, read
from tba.common.weights.tokenizer import load_tokenizer
from tba.common.wire.messages import WeightsRef
from tba.common.wire.trajectory import STOP_EOS
from tba.searcher.engines.engine import Engine, GenerationRequest, SamplingSettings
from tba.searcher.run import context_of, make_engine
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, failed, storable
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import CORRECT, Prompt, check_rendering, fingerprint
from tba.searcher.weights.assembly import SnapshotAssembler

log = get_logger(__name__)

# Attempts to read the newest snapshot of a run that publishes and deletes quickly.
_ATTEMPTS = 5
_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result for one snapshot of `run`; `accuracy` and `reward` are means over `prompts` held-out prompts.

    `prompt_set` is a hash of the prompts. `unfinished` is the share of answers that were cut off by their length,
    `failed` of those that could not be generated or scored; the latter count as wrong, with a reward of 0.
    """

    run: str
    version: int
    step: int
    accuracy: float
    reward: float
    prompts: int
    prompt_set: str
    unfinished: float
    failed: float


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to `prompts`, one each."""

    prompts: Sequence[Prompt]
    scored: list[Scored]
    unfinished: int

    def result(self, snapshot: Snapshot) -> Evaluation:
        """Return the means. Raises TaskError if no reward says what is correct."""
        rewards = [scored.reward for scored in self.scored if scored.error is None]
        correct = [reward.parts[CORRECT] for reward in rewards if CORRECT in reward.parts]
        if rewards and not correct:
            raise TaskError(f"the rewards of the task have no part {CORRECT!r}, which `tba eval` averages: add it")
        manifest, total = snapshot.manifest, len(self.prompts)
        return Evaluation(
            run=manifest.run,
            version=manifest.version,
            step=manifest.step,
            accuracy=sum(correct) / total,
            reward=sum(reward.total for reward in rewards) / total,
            prompts=total,
            prompt_set=fingerprint(self.prompts)[:16],
            unfinished=self.unfinished / total,
            failed=1 - len(correct) / total,
        )


def evaluate_snapshots(config: Config, named: Path | None, *, every: bool, device: str) -> Iterator[Evaluation]:
    """Evaluate the named snapshot, every snapshot that a run has kept, or its newest one, with a single engine.

    Each snapshot is verified first, and a delta is assembled to complete weights. The trainer may be running: snapshots
    that it deletes meanwhile are left out, and the newest one is chosen when the engine is ready. Raises UsageError if
    there is none, SnapshotError if one cannot be read, TaskError if the task has no held-out prompts.
    """
    # First, so that a mistake in the arguments is reported before the engine starts, which may take minutes.
    paths = choose_snapshots(config.snapshots, weights_directory(config), named, every=every)
    task = load_task(config.task)
    renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
    # A prompt that occurs twice counts once.
    prompts = list({prompt.key: prompt for prompt in task.held_out()}.values())
    if not prompts:
        raise TaskError(f"task {task.name} has no held-out prompts: set task.test")
    check_rendering(task, prompts, renderer, context_of(config))
    greedy = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=config.search.max_tokens)
    with contextlib.ExitStack() as ending:
        assembler = SnapshotAssembler(weights_directory(config), "path", SystemClock())
        ending.callback(assembler.remove_created)
        # Before the engine, as `WorkerPool` says.
        rewards = Rewards(task, config.task)
        ending.callback(rewards.close)
        # Entered before the engine, so released after it: the engine may read the files of the weights it serves.
        serving = ending.enter_context(contextlib.ExitStack())
        engine = make_engine(config, device=device, name="eval")
        ending.callback(engine.close)
        for snapshot, pinned in _prepared(config, assembler, named, paths if every else None):
            before = serving.pop_all()
            serving.callback(pinned.release)
            with before:
                engine.load_weights(snapshot)
                result = _answers(engine, rewards, renderer, prompts, greedy).result(snapshot)
            yield result


def _answers(
    engine: Engine, rewards: Rewards, renderer: PromptRenderer, prompts: Sequence[Prompt], settings: SamplingSettings
) -> Answers:
    """Answer every prompt, and score the answers in worker processes, as a searcher does."""
    scored: dict[int, Scored] = {}
    unfinished = 0
    for id_, prompt in enumerate(prompts):
        ids = np.asarray(renderer.ids(prompt), np.int32)
        try:
            engine.submit(GenerationRequest(id_, ids, settings))
        except EngineError as error:
            log.warning("prompt not evaluated", prompt=prompt.key, reason=str(error))
            scored[id_] = Scored(id_, None, *failed(str(error)))
    while engine.in_flight or rewards.waiting:
        for generation in engine.step() if engine.in_flight else ():
            finished = generation.stop_reason == STOP_EOS
            unfinished += not finished
            try:
                text = storable(renderer.tokenizer.decode(generation.response_ids.tolist(), skip_special_tokens=True))
            # The ids are of another vocabulary.
            except Exception as error:
                log.exception("answer not decoded", prompt=prompts[generation.id].key)
                reason = f"not decoded: {type(error).__name__}: {error}"
                scored[generation.id] = Scored(generation.id, None, *failed(reason))
                continue
            rewards.submit(generation.id, prompts[generation.id], text, finished)
        for one in rewards.wait(0.0 if engine.in_flight else _WAIT_SECONDS):
            scored[one.ticket] = one
            if one.error is not None:
                log.warning("answer not scored", prompt=prompts[one.ticket].key, reason=one.error)
    return Answers(prompts, [scored[id_] for id_ in range(len(prompts))], unfinished)


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
