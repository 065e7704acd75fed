"""Checkpoints: the complete state of a trainer, so that a resumed run continues as if it had never stopped.

    step_00000040/
        manifest.json          step, run, reference, sha256 of each file, small values
        model.safetensors      float32 weights, each tied tensor once; only the adapters where there are some
        reference.safetensors  the same for a reference that has moved; absent while it is the initial model
        optimizer.safetensors  AdamW's moments as `<parameter index>.<name>`, random states as `rng.<device>`,
                           weights of a learned log Z as `log_z.<name>`

A directory with its final name is complete; one whose hashes differ from its manifest was damaged later and is moved
aside. Files hold full tensors, so any number of ranks can resume from them. Rank 0 writes and
reads them, a tensor at a time: the others need no access to its disk. Learning rate and beta are functions of the step
and need no state; the optimiser's settings come from the configuration, also after a resume.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import CheckpointError, CheckpointMismatch, UsageError, named
from tba.common.log import get_logger
from tba.common.system.background import Background
from tba.common.system.durable import new_directory, open_regular, require_space, sha256_of, write_json
from tba.trainer.distributed import ALONE, RESUME, SAVE, Ranks, full_tensor, local_part
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.model.host_buffers import HostBuffers, HostCopy
from tba.trainer.model.scorer import weights_of
from tba.trainer.step.host_optimizer import HostAdamW
from tba.trainer.step.learner import Learner

log = get_logger(__name__)

FORMAT = 2
_MANIFEST = "manifest.json"
MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_REFERENCE = "reference.safetensors"
_LOG_Z = "log_z."
# Heads of checkpoints that do not name theirs.
_HEADS_BEFORE = ("tb_learned_z", 'tb with log_z = "turn"')
# Returns a tensor of a file by its name, sharded as a second argument is.
ReadTensor = Callable[..., Tensor]


class _Damaged(CheckpointError):
    """A file of a checkpoint is missing or has changed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files match its manifest.

    `reference` is `Reference.description`, and `head` is `Objective.head`, None if the manifest does not say.
    `unreported` is a ReportStep that the buffer had not acknowledged. `adapter` are settings and base of the adapters,
    None for a full model, `tensors` type and shape of each tensor, by file and name.
    """

    path: Path
    step: int
    run: str
    reference: str
    unreported: dict[str, Any] | None
    adapter: dict[str, Any] | None
    tensors: dict[str, dict[str, tuple[str, list[int]]]]
    head: str | None


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints under a directory, oldest first, damaged ones included."""
    return sorted(path for path in directory.glob("step_????????") if path.is_dir())


def save(directory: Path, learner: Learner, *, run: str, keep: int, unreported: dict[str, Any] | None = None) -> Path:
    """`write` the checkpoint of a learner from its own tensors, in this thread."""
    return write(directory, manifest_of(learner, run=run, unreported=unreported), dict(tensors_of(learner)), keep=keep)


def manifest_of(learner: Learner, *, run: str, unreported: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build the manifest of a checkpoint, without the hashes of its files."""
    return {
        "format": FORMAT,
        "run": run,
        "step": learner.steps_done,
        "reference": learner.reference.description,
        "adapter": learner.adapter,
        "head": learner.head,
        "unreported": unreported,
    }


def tensors_of(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that changes as (`<file>/<name>`, tensor), each gathered from all ranks when it is requested.

    Only random states are copies; an update writes to the other tensors. Every rank must iterate over all of them.
    """
    masters = learner.masters()
    for name, tensor in _trained(learner.policy, learner.adapter).items():
        yield f"{MODEL}/{name}", full_tensor(masters.get(name, tensor), tensor)
    for index, values in learner.optimizer.state_dict()["state"].items():
        for name, value in values.items():
            # The step count is a scalar on every rank.
            like = None if name == "step" else learner.trained[index]
            yield f"{_OPTIMIZER}/{index}.{name}", full_tensor(value, like)
    yield f"{_OPTIMIZER}/rng.cpu", torch.get_rng_state()
    if learner.policy.device.type == "cuda":
        yield f"{_OPTIMIZER}/rng.cuda", torch.cuda.get_rng_state(learner.policy.device)
    if learner.log_z is not None:
        for name, tensor in learner.log_z.state_dict().items():
            yield f"{_OPTIMIZER}/{_LOG_Z}{name}", tensor
    for name, tensor in learner.reference.moved_weights(learner.steps_done).items():
        yield f"{_REFERENCE}/{name}", full_tensor(tensor)


def _trained(policy: PreTrainedModel, adapter: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights that are trained: all of them, or the adapters."""
    return {name: one for name, one in weights_of(policy).items() if adapter is None or ".lora_" in name}


def write(
    directory: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], *, keep: int, min_free: int = 0
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`.

    Raises CheckpointError if a write fails or less than `min_free` bytes would stay free; then no file is left.
    """
    final = directory / f"step_{manifest['step']:08d}"
    try:
        with new_directory(final) as temporary:
            # A full disk would refuse the metrics of the next steps.
            require_space(directory, sum(tensor.nbytes for tensor in tensors.values()), min_free)
            files: dict[str, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                file, _, name = key.partition("/")
                files.setdefault(file, {})[name] = tensor.cpu().contiguous()
            for file, content in files.items():
                save_file(content, temporary / file)
            hashes = {file: sha256_of(temporary / file) for file in files}
            write_json(temporary / _MANIFEST, manifest | {"files": hashes})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(directory: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint, None if there is no checkpoint.

    Damaged ones are renamed. Raises CheckpointError if all are damaged: a person must decide to start again from the
    first step.
    """
    found = list_checkpoints(directory)
    for path in reversed(found):
        try:
            return read(path)
        except _Damaged as error:
            log.warning("checkpoint skipped", path=path, reason=str(error))
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if found:
        raise CheckpointError(
            f"every checkpoint in {directory} ({len(found)}) is damaged and was set aside: "
            "run again without them to start from the first step"
        )
    return None


def find(directory: Path, *, resume: bool, otherwise: str) -> Checkpoint | None:
    """Return the newest checkpoint, None if there is none.

    Raises UsageError if there is one and `resume` is false; `otherwise` is what the user can do instead of resuming.
    """
    existing = list_checkpoints(directory)
    if existing and not resume:
        raise UsageError(f"{existing[-1]} is of an earlier start: pass --resume to continue from it, or {otherwise}")
    return newest(directory)


def share(found: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """Return the checkpoint that rank 0 has found, on every rank. Only rank 0 has its files."""
    if ranks.rank:
        _, index = ranks.receive()
        return Checkpoint(**msgpack.unpackb(index)) if index else None
    ranks.send(RESUME, msgpack.packb(asdict(found) | {"path": str(found.path)}) if found else b"")
    return found


def restore(checkpoint: Checkpoint, learner: Learner) -> None:
    """Load a checkpoint into a new learner of the same model. Every rank must call it. Raises CheckpointMismatch."""
    # Only rank 0 knows the base of the adapters. If it raises, the others lose it.
    if learner.ranks.rank == 0 and checkpoint.adapter != learner.adapter:
        raise CheckpointMismatch(
            f"{checkpoint.path} is of lora settings {checkpoint.adapter}, the configuration gives {learner.adapter}: "
            "lora and the files under model.path must stay what they were"
        )
    if checkpoint.reference != learner.reference.description:
        raise CheckpointMismatch(
            f"{checkpoint.path} was trained with the reference {checkpoint.reference}, the configuration says "
            f"{learner.reference.description}: [reference] and the files under reference.path must stay what they were"
        )
    load_weights(checkpoint, learner.policy, learner.masters(), learner.ranks)
    if _REFERENCE in checkpoint.tensors:
        with _reader(checkpoint, _REFERENCE, learner.ranks) as read_tensor:
            learner.reference.restore(read_tensor)
    with _reader(checkpoint, _OPTIMIZER, learner.ranks) as read_tensor:
        _restore_log_z(checkpoint, read_tensor, learner)
        torch.set_rng_state(read_tensor("rng.cpu"))
        if learner.policy.device.type == "cuda" and "rng.cuda" in checkpoint.tensors[_OPTIMIZER]:
            torch.cuda.set_rng_state(read_tensor("rng.cuda"), learner.policy.device)
        learner.resume(checkpoint.step, _optimizer_state(checkpoint, read_tensor, learner))


@torch.no_grad()
def load_weights(
    checkpoint: Checkpoint, policy: PreTrainedModel, masters: Mapping[str, Tensor], ranks: Ranks = ALONE
) -> None:
    """Load the weights of a checkpoint into a policy, or into its float32 `masters`. Raises CheckpointMismatch."""
    expected = _trained(policy, checkpoint.adapter)
    shapes = {name: shape for name, (_, shape) in checkpoint.tensors[MODEL].items()}
    if shapes != {name: list(tensor.shape) for name, tensor in expected.items()}:
        raise CheckpointMismatch(f"{checkpoint.path} is of another model than model.path: set it to that of the run")
    with _reader(checkpoint, MODEL, ranks) as read_tensor:
        for name, tensor in expected.items():
            value = read_tensor(name, tensor)
            if name in masters:
                masters[name].copy_(local_part(value))
            else:
                tensor.copy_(value)


@contextlib.contextmanager
def _reader(checkpoint: Checkpoint, file: str, ranks: Ranks) -> Iterator[ReadTensor]:
    """Read tensors of a file on rank 0, which sends them. All ranks must ask for the same ones in the same order."""
    with contextlib.nullcontext() if ranks.rank else safe_open(checkpoint.path / file, framework="pt") as opened:

        def read_tensor(name: str, like: Tensor | None = None) -> Tensor:
            dtype, shape = checkpoint.tensors[file][name]
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            return ranks.from_rank_0(opened.get_tensor(name) if opened else empty, like)

        yield read_tensor


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its files. Raises CheckpointError."""
    try:
        with open_regular(path / _MANIFEST) as file:
            manifest = json.load(file)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']!r}, this release reads {FORMAT}")
        for name, digest in manifest["files"].items():
            if sha256_of(path / name) != digest:
                raise _Damaged(f"{name} does not hash to what the manifest says")
        tensors = {file: _index(path / file) for file in {MODEL, _OPTIMIZER, *manifest["files"]}}
        own = {name: manifest[name] for name in ("step", "run", "reference", "unreported", "adapter")}
        return Checkpoint(path, **own, tensors=tensors, head=manifest.get("head"))
    # Those of a manifest of another form, also of one that nests without end.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise _Damaged(named(error)) from error


def _index(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Return type and shape of the tensors of a file by name. Their values are mapped, and not read."""
    with safe_open(file, framework="pt") as tensors:
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in found.items()}


def _optimizer_state(checkpoint: Checkpoint, read_tensor: ReadTensor, learner: Learner) -> dict[int, dict[str, Tensor]]:
    on_host = isinstance(learner.optimizer, HostAdamW)
    state: dict[int, dict[str, Tensor]] = {}
    for key in checkpoint.tensors[_OPTIMIZER]:
        number, _, name = key.partition(".")
        if number.isdecimal():
            index = int(number)
            # The step count is a scalar on every rank, even where the parameter is sharded.
            mine = read_tensor(key, None if name == "step" else learner.trained[index])
            state.setdefault(index, {})[name] = local_part(mine) if on_host else mine
    return state


def _restore_log_z(checkpoint: Checkpoint, read_tensor: ReadTensor, learner: Learner) -> None:
    found = [name.removeprefix(_LOG_Z) for name in checkpoint.tensors[_OPTIMIZER] if name.startswith(_LOG_Z)]
    if bool(found) != (learner.log_z is not None):
        raise CheckpointMismatch(
            f"{checkpoint.path} {'has' if found else 'lacks'} a learned log Z: objective.name must stay what it was"
        )
    if learner.log_z is not None:
        heads = _HEADS_BEFORE if checkpoint.head is None else (checkpoint.head,)
        if learner.head not in heads:
            raise CheckpointMismatch(
                f"{checkpoint.path} has a head of {' or '.join(heads)}, the configuration one of {learner.head}: "
                "objective.name must stay what it was"
            )
        learner.log_z.load_state_dict({name: read_tensor(_LOG_Z + name) for name in found})


@dataclass(eq=False)
class CheckpointWriter:
    """Saves one learner in another thread, from copies on the host.

        training thread     begin ──► copy to the host ──► the next step
        checkpoint thread              metrics to disk ──► write ──► fsync ──► rename ──► delete old ones

    At most one is in progress. One that comes due meanwhile is skipped: waiting would slow training down to the pace of
    the disk, and the next one saves more steps. The last one waits for the one in progress, and must succeed.
    `saved_step` is the step of the newest checkpoint on disk.
    """

    config: Config
    copies: HostBuffers
    metrics: MetricsLog
    ranks: Ranks = ALONE
    saved_step: int | None = None
    _thread: Background | None = None

    def __post_init__(self) -> None:
        # Leftovers of a trainer that was killed.
        for unfinished in self.config.checkpoints.glob(".step_????????.tmp"):
            shutil.rmtree(unfinished)

    def begin(self, learner: Learner) -> None:
        """Save the current learner, every step of which was reported, unless a checkpoint is still being written.

        A disk that refuses the write is a warning, since older checkpoints exist. Raises any other failure of the
        previous write.
        """
        if self._thread is not None and self._thread.running:
            log.warning("checkpoint skipped", step=learner.steps_done, reason="the one before is still being written")
            return
        # A disk that refused the previous checkpoint, which is in the log, may accept this one.
        with contextlib.suppress(CheckpointError):
            self.wait()
        self._start(learner, None)

    def save(self, learner: Learner, unreported: dict[str, Any] | None = None) -> None:
        """Write the current learner to disk and wait for it. Raises CheckpointError if the disk refuses."""
        # A failure of the one in progress is in the log; this one is tried all the same.
        self.close()
        self._thread = None
        if self.saved_step != learner.steps_done:
            self._start(learner, unreported)
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint in progress. Raises its failure, once."""
        self.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.check()

    def close(self) -> None:
        """Wait for the checkpoint in progress; a failure is only in the log."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, learner: Learner, unreported: dict[str, Any] | None) -> None:
        manifest = manifest_of(learner, run=self.config.run.name, unreported=unreported)
        self.ranks.send(SAVE)
        copied = self.copies.copy(tensors_of(learner))
        self._thread = Background("checkpoint", partial(self._write, manifest, copied))
        self._thread.start()

    def _write(self, manifest: dict[str, Any], copied: HostCopy) -> None:
        try:
            self.metrics.sync()
            directory, floor = self.config.checkpoints, self.config.train.min_free_mib << 20
            path = write(directory, manifest, copied.wait(), keep=run_files.KEEP_CHECKPOINTS, min_free=floor)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint not written", step=manifest["step"], reason=str(error))
            raise CheckpointError(str(error)) from error
        else:
            self.saved_step = manifest["step"]
            log.info("checkpoint saved", path=path)
        finally:
            self.copies.release(copied)
