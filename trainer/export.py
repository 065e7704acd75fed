"""`tba export-model`: a snapshot or a checkpoint of a run as a Hugging Face model directory.

full snapshot      its files, verified
adapter snapshot   its base with the adapters merged, W + alpha / rank x B A
checkpoint         its float32 weights, adapters merged, rounded to model.dtype
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tba.common.config import Config, LoraSection
from tba.common.errors import CheckpointMismatch, SnapshotError
from tba.common.run_snapshots import check_export
from tba.common.system.durable import copy_file, json_text, new_directory
from tba.common.weights import adapter
from tba.common.weights.model_files import added_tokens, local_model, model_directory, read_json, share_weights
from tba.common.weights.pretrained import end_tokens
from tba.common.weights.snapshot import MANIFEST, Snapshot, check_file, directory_name, read
from tba.trainer import checkpoint
from tba.trainer.model.adapters import MERGED, add_adapters, base_digest, gathered
from tba.trainer.model.scorer import load_model, structure_of
from tba.trainer.publishing.snapshot_writer import as_saved, write_model


@contextlib.contextmanager
def complete_directory(source: Path, config: Config) -> Iterator[Path]:
    """Give a directory that transformers and vLLM load: the source itself, or an export that the block keeps."""
    if _is_complete(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="tba-model-") as directory:
        _write(source, Path(directory), config)
        yield Path(directory)


def export_model(source: Path, out: Path, config: Config) -> None:
    """Write a snapshot or checkpoint as a model directory, which appears under its name when it is complete.

    Raises UsageError as `check_export`; SnapshotError or CheckpointError if the source is damaged or `out` cannot be
    written.
    """
    check_export(source, out)
    try:
        with new_directory(out) as temporary:
            _write(source, temporary, config)
            _name_end_tokens(temporary, config)
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{out} cannot be written: {error}") from error


def _name_end_tokens(directory: Path, config: Config) -> None:
    """Name in generation_config.json all tokens that ended the responses of the run: others stop at these alone."""
    ends, strings = end_tokens(directory, config.search.stop)
    # Also of strings that are a token of their own.
    ends += [id_ for text, id_ in added_tokens(directory).items() if text in strings]
    path = directory / "generation_config.json"
    if ends:
        path.write_bytes(json_text(read_json(path) | {"eos_token_id": ends[0] if len(ends) == 1 else ends}).encode())


def _is_complete(source: Path) -> bool:
    """Whether a directory has the config and all weights of a model."""
    if not (source / MANIFEST).is_file():
        return local_model(str(source)) is not None
    return not _is_checkpoint(source) and read(source).manifest.base is None


def _is_checkpoint(source: Path) -> bool:
    return "unreported" in read_json(source / MANIFEST)


def _write(source: Path, target: Path, config: Config) -> None:
    """Fill an empty directory with the model of a snapshot or checkpoint."""
    if _is_checkpoint(source):
        _write_checkpoint(checkpoint.read(source), target, config)
        return
    snapshot = read(source)
    if snapshot.manifest.base is None:
        _copy_verified(snapshot, target)
    else:
        base = read(source.with_name(directory_name(snapshot.manifest.base)))
        _copy_verified(base, target)
        _merge(source, target)


def _copy_verified(snapshot: Snapshot, target: Path) -> None:
    """Copy the files of a full snapshot. Not as links: a change to the copy would damage the snapshot."""
    for name, entry in snapshot.manifest.files.items():
        check_file(snapshot.path / name, entry)
        copy_file(snapshot.path / name, target / name)


def _merge(source: Path, target: Path) -> None:
    """Add the adapters of a snapshot to the weights in `target`, in float32, rounded once to their dtype."""
    factors = adapter.load(source)
    missing = set(factors.factors)
    for path in sorted(target.glob("*.safetensors")):
        tensors = load_file(path)
        for name in missing & tensors.keys():
            merged = tensors[name].float() + torch.from_numpy(factors.change(name))
            tensors[name] = merged.to(tensors[name].dtype)
        missing -= tensors.keys()
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    if missing:
        raise SnapshotError(f"{source} adapts {min(missing)}, which its base does not have")
    share_weights(target)


def _write_checkpoint(found: checkpoint.Checkpoint, target: Path, config: Config) -> None:
    files = model_directory(config.model.path)
    policy = load_model(files, torch.device("cpu"))
    unwrapped = structure_of(policy)
    if found.adapter is not None:
        settings = {name: value for name, value in found.adapter.items() if name != "base"}
        if base_digest(files) != found.adapter["base"]:
            raise CheckpointMismatch(f"{found.path} adapts another model than model.path {config.model.path}")
        add_adapters(policy, LoraSection.model_validate(settings))
    checkpoint.load_weights(found, policy, {})
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    weights = {name: tensor.to(dtype) for name, tensor in gathered(policy, MERGED)}
    write_model(target, as_saved(unwrapped, weights), files, unwrapped, dtype)
