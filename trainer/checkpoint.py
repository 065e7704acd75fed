"""Checkpoints: everything a trainer needs to go on as if it had never stopped.

    step_00000040/
        manifest.json          step, run, reference, sha256 of each file, and small things
        model.safetensors      float32 weights, each tied tensor once; with adapters only theirs
        reference.safetensors  the same of a reference that has moved; else it is the model that training started from
        optimizer.safetensors  AdamW's moments as `<parameter index>.<name>`, random states as `rng.<device>`, and the
                           weights of a learned log Z as `log_z.<name>`

A directory that has its name is complete; one that does not hash to its manifest was damaged later, and is set aside.
Files hold whole tensors, so another number of ranks can go on from them. Learning rate and beta are functions of the
step and need no state; the optimiser's settings are the configuration's, also after a resume.
"""

import errno
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tba.common.durable import publish_directory, sha256_of, temporary_directory, write_json
from tba.common.errors import CheckpointError, CheckpointMismatch
from tba.common.log import get_logger
from tba.trainer.model import weights_of
from tba.trainer.sharding import like, whole
from tba.trainer.step import Learner

log = get_logger(__name__)

FORMAT = 1
_MANIFEST = "manifest.json"
_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_REFERENCE = "reference.safetensors"
_LOG_Z = "log_z."


class _Damaged(CheckpointError):
    """A file of a checkpoint is missing or not what it was."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are what its manifest says."""

    path: Path
    step: int
    run: str
    reference: str  # `Reference.description`
    unreported: dict[str, Any] | None  # a ReportStep that the buffer had not acknowledged
    adapter: dict[str, Any] | None = None  # settings and base of the adapters, if it holds such


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints under a directory, oldest first, damaged ones included."""
    return sorted(path for path in directory.glob("step_????????") if path.is_dir())


def save(directory: Path, learner: Learner, *, run: str, keep: int, unreported: dict[str, Any] | None = None) -> Path:
    """`write` the checkpoint of a learner from its own tensors, in this thread."""
    manifest = manifest_of(learner, run=run, unreported=unreported)
    return write(directory, manifest, dict(tensors_of(learner)), keep=keep)


def manifest_of(learner: Learner, *, run: str, unreported: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint says of itself, without its files."""
    return {
        "format": FORMAT,
        "run": run,
        "step": learner.steps_done,
        "reference": learner.reference.description,
        "adapter": learner.adapter,
        "unreported": unreported,
    }


def tensors_of(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """Everything that changes, as (`<file>/<name>`, tensor), each put together from all ranks as it is asked for.

    No copies but of the random states: an update writes to the rest. Every rank has to go through all of it.
    """
    for name, tensor in _trained(learner).items():
        yield f"{_MODEL}/{name}", whole(tensor)
    for index, values in learner.optimizer.state_dict()["state"].items():
        for name, value in values.items():
            yield f"{_OPTIMIZER}/{index}.{name}", whole(value)
    for name, tensor in (_random_states(learner.policy.device) | _log_z_tensors(learner)).items():
        yield f"{_OPTIMIZER}/{name}", tensor
    for name, tensor in learner.reference.moved_weights(learner.steps_done).items():
        yield f"{_REFERENCE}/{name}", whole(tensor)


def _trained(learner: Learner) -> dict[str, Tensor]:
    """What of the model changes: all of it, or its adapters."""
    weights = weights_of(learner.policy)
    if learner.adapter is None:
        return weights
    return {name: tensor for name, tensor in weights.items() if ".lora_" in name}


def write(
    directory: Path, manifest: dict[str, Any], tensors: dict[str, Tensor], *, keep: int, min_free: int = 0
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`.

    Raises CheckpointError if the disk refuses, or has not so many bytes left; then nothing of it is there.
    """
    final = directory / f"step_{manifest['step']:08d}"
    temporary: Path | None = None
    try:
        temporary = temporary_directory(final)
        _check_space(directory, tensors, min_free)
        files = _write_tensors(temporary, tensors)
        write_json(temporary / _MANIFEST, manifest | {"files": files})
        publish_directory(temporary, final)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _check_space(directory: Path, tensors: dict[str, Tensor], min_free: int) -> None:
    """A disk that is full for a moment would refuse the lines of the steps that are made meanwhile."""
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(directory).free
    if min_free and free - needed < min_free:
        raise OSError(
            errno.ENOSPC,
            f"{free >> 20} MiB are free, and {needed >> 20} MiB of it must leave train.min_free_mib = {min_free >> 20}",
        )


def _write_tensors(directory: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write the files; their hashes by name."""
    files: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        file, _, name = key.partition("/")
        files.setdefault(file, {})[name] = tensor.cpu().contiguous()
    for file, content in files.items():
        save_file(content, directory / file)
    return {file: sha256_of(directory / file) for file in files}


def newest(directory: Path) -> Checkpoint | None:
    """The newest usable checkpoint, None if there are none at all.

    Damaged ones are renamed out of the way. Raises CheckpointError if all are damaged: starting again from
    nothing is for a person to decide.
    """
    found = list_checkpoints(directory)
    for path in reversed(found):
        try:
            return read(path)
        except _Damaged as error:
            log.warning("checkpoint skipped", path=path, reason=str(error))
            _set_aside(path)
    if found:
        raise CheckpointError(
            f"every checkpoint in {directory} ({len(found)}) is damaged and was set aside: "
            "run again without them to start from the first step"
        )
    return None


def restore(checkpoint: Checkpoint, learner: Learner) -> None:
    """Put a checkpoint into a new learner of the same model. Raises CheckpointMismatch."""
    if checkpoint.adapter != learner.adapter:
        raise CheckpointMismatch(
            f"{checkpoint.path} is of lora settings {checkpoint.adapter}, the configuration gives {learner.adapter}: "
            "lora and the files under model.path must stay what they were"
        )
    if checkpoint.reference != learner.reference.description:
        raise CheckpointMismatch(
            f"{checkpoint.path} was trained with the reference {checkpoint.reference}, the configuration says "
            f"{learner.reference.description}: [reference] must stay what it was"
        )
    expected = _trained(learner)
    with safe_open(checkpoint.path / _MODEL, framework="pt") as weights, torch.no_grad():
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        if shapes != {name: list(tensor.shape) for name, tensor in expected.items()}:
            raise CheckpointMismatch(f"{checkpoint.path} is of another model than model.path")
        for name, tensor in expected.items():
            tensor.copy_(like(tensor, weights.get_tensor(name)))
    if (moved := checkpoint.path / _REFERENCE).exists():
        learner.reference.restore(load_file(moved))
    tensors = load_file(checkpoint.path / _OPTIMIZER)
    _restore_log_z(checkpoint, tensors, learner)
    _restore_random_states(tensors, learner.policy.device)
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": _optimizer_state(tensors, learner.optimizer), "param_groups": groups})
    learner.steps_done = checkpoint.step


def read(path: Path) -> Checkpoint:
    """A checkpoint whose files have been checked. Raises CheckpointError."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']!r}, this release reads {FORMAT}")
        for name, digest in manifest["files"].items():
            if sha256_of(path / name) != digest:
                raise _Damaged(f"{name} does not hash to what the manifest says")
        return Checkpoint(
            path,
            manifest["step"],
            manifest["run"],
            manifest.get("reference", "frozen"),
            manifest["unreported"],
            manifest.get("adapter"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _optimizer_state(tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        if number.isdecimal():
            index = int(number)
            # The count of steps is a scalar of each process, also where the parameter is divided over ranks.
            mine = value if name == "step" else like(parameters[index], value)
            state.setdefault(index, {})[name] = mine
    return state


def _log_z_tensors(learner: Learner) -> dict[str, Tensor]:
    if learner.log_z is None:
        return {}
    return {f"{_LOG_Z}{name}": tensor for name, tensor in learner.log_z.state_dict().items()}


def _restore_log_z(checkpoint: Checkpoint, tensors: dict[str, Tensor], learner: Learner) -> None:
    found = {key.removeprefix(_LOG_Z): tensor for key, tensor in tensors.items() if key.startswith(_LOG_Z)}
    if bool(found) != (learner.log_z is not None):
        raise CheckpointMismatch(
            f"{checkpoint.path} {'has' if found else 'lacks'} a learned log Z: objective.name must stay what it was"
        )
    if learner.log_z is not None:
        learner.log_z.load_state_dict(found)


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(tensors: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
