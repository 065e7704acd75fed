"""What an engine must know of a model's files before it touches its weights.

Everything is read from headers and JSON: no tensor is loaded here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, SnapshotError
from tba.common.snapshot import Canary

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

TensorShapes = dict[str, tuple[str, tuple[int, ...]]]  # name: (safetensors dtype, shape)


def tensor_shapes(files: Sequence[Path], *, tied: bool) -> TensorShapes:
    """Names, dtypes and shapes in safetensors files, from their headers. Raises SnapshotError.

    With tied embeddings a copy of the head may or may not have been saved: it is left out.
    """
    from safetensors import SafetensorError, safe_open

    shapes: TensorShapes = {}
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # a safe_open handle does not iterate
                    entry = file.get_slice(name)
                    shapes[name] = (entry.get_dtype(), tuple(entry.get_shape()))
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{path} is not readable safetensors: {error}") from error
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes


def shape_difference(expected: TensorShapes, found: TensorShapes) -> str | None:
    """The first difference in a few words, or None. Any float dtype will do for another: vLLM casts."""
    if missing := sorted(expected.keys() - found.keys()):
        return f"{len(missing)} tensors are missing, {missing[0]!r} for one"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"{len(unknown)} tensors are unknown, {unknown[0]!r} for one"
    for name, (dtype, shape) in expected.items():
        found_dtype, found_shape = found[name]
        if found_shape != shape:
            return f"{name!r} has shape {list(found_shape)}, not {list(shape)}"
        if found_dtype != dtype and not {dtype, found_dtype} <= _FLOAT_DTYPES:
            return f"{name!r} has dtype {found_dtype}, not {dtype}"
    return None


def canary_problem(canary: Canary, vocabulary: int, context: int) -> str | None:
    """Why an engine could not score this canary, in a few words, or None."""
    if len(canary.sequences) != len(canary.logprobs):
        return f"{len(canary.sequences)} sequences with {len(canary.logprobs)} lists of log-probabilities"
    for ids, logprobs in zip(canary.sequences, canary.logprobs, strict=True):
        if len(ids) != len(logprobs) + 1:
            return f"a sequence of {len(ids)} tokens has {len(logprobs)} log-probabilities"
        if len(ids) >= context:
            return f"a sequence of {len(ids)} tokens does not fit the engine's context of {context}"
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            return f"a token id is outside the vocabulary of {vocabulary}"
    return None


def eos_ids(directory: Path) -> list[int]:
    """The ids that end a response: the generation config's if there are any, else the model config's."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [int(value)]
    return []


def model_directory(model: str) -> Path:
    """A local directory as it is; anything else is taken for a name on the Hugging Face hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} is neither a directory nor on the Hugging Face hub: {error}") from error


def safetensors_in(directory: Path) -> list[Path]:
    """The model's weight files: those of the index, as some models carry a second copy in another layout."""
    index = read_json(directory / "model.safetensors.index.json").get("weight_map", {})
    files = [directory / name for name in sorted(set(index.values()))] or sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} has no safetensors files; other weight formats are not loaded")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content
