"""The files of a model, from a local directory or the Hugging Face hub: safetensors and JSON, never pickles."""

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tba.common.errors import ConfigError, HubUnavailable, Malformed, MissingExtra, first_line
from tba.common.system.durable import open_regular

_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_HUB_SECONDS = 10
# Unauthorized, forbidden, not found.
_REFUSALS = (401, 403, 404)
# A directory with a tokenizer has at least one of these.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
# What transformers reads without an index, and what makes it load a directory as an adapter.
_WEIGHTS, _ADAPTER = "model.safetensors", "adapter_config.json"
# What `weights_digest` reads of each file.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def model_directory(path: str, *, setting: str = "model.path") -> Path:
    """Return the local directory of a model, downloaded from the hub if needed.

    A revision whose weights are in the hub's cache is used as long as they are, and completed if it lacks other files:
    what is pushed to the hub during a run changes no weights. The hub is not asked if the cache lists all files. Raises
    ConfigError if there is no such model, HubUnavailable if it cannot be downloaded.
    """
    if local := local_model(path, setting=setting):
        return local
    cached = model_here(path)
    if cached is None:
        check_hub(path, setting=setting)

    asked = {"revision": cached.name if cached else None, "allow_patterns": _HUB_FILES}
    directory = Path(_from_hub(lambda hub: hub.snapshot_download(path, **asked), path, setting))
    _check_files(directory, path, setting)
    return directory


def local_model(path: str, *, setting: str = "model.path") -> Path | None:
    """The directory of a model on this machine, None for a model of the hub. Raises ConfigError if it is neither."""
    if not path:
        raise ConfigError(
            f"{setting} is not set: name a Hugging Face model directory or a hub id in ./tba.toml, or in the file that "
            "--config names"
        )
    # Unlike Path.expanduser, this leaves `~` to a user without a home directory.
    local = Path(os.path.expanduser(path))
    # False without permission, where `Path.is_dir` raises.
    if os.path.isdir(local):
        if not os.path.isfile(local / "config.json"):
            raise ConfigError(f"{setting} {path} has no config.json: it is not a Hugging Face model directory")
        _refuse_adapter(os.listdir(local), path, setting)
        return local
    if os.path.isfile(local):
        raise ConfigError(f"{setting} {path} is a file: name the directory of a model")
    if not is_hub_name(path):
        raise ConfigError(f"{setting} {path} does not exist")
    return None


def check_model(path: str, *, setting: str = "model.path") -> bool:
    """Whether a model is on this machine, not on the hub. Raises ConfigError for neither, or missing files."""
    directory = local_model(path, setting=setting)
    if directory is None:
        return False
    _check_files(directory, path, setting)
    return True


def _check_files(directory: Path, path: str, setting: str) -> None:
    need_tokenizer(os.listdir(directory), path, setting)
    try:
        missing = [file.name for file in weight_files(directory) if not file.is_file()]
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    if missing:
        raise ConfigError(f"{setting} {path} lacks {', '.join(missing)}, which its index names: copy the model again")


def _refuse_adapter(names: Sequence[str], path: str, setting: str) -> None:
    """Raise ConfigError for the files of an adapter: transformers would load its base instead, and freeze it."""
    if _ADAPTER in names:
        raise ConfigError(
            f"{setting} {path} has an {_ADAPTER}, which belongs to an adapter: merge it into its base model "
            f"(merge_and_unload of PEFT), or remove {_ADAPTER} if the directory has all weights of a model"
        )


def need_tokenizer(names: Sequence[str], path: str, setting: str) -> None:
    """Raise ConfigError if none of the files of a model is a tokenizer's."""
    if not any(fnmatch.filter(names, pattern) for pattern in _TOKENIZER_FILES):
        raise ConfigError(f"{setting} {path} has no tokenizer: no file is called {', '.join(_TOKENIZER_FILES)}")


def check_hub(path: str, *, setting: str = "model.path") -> str:
    """Return where a run takes a model of the hub from; download at most its config.json.

    Raises ConfigError if the hub does not give it or it cannot be used, HubUnavailable if there is no answer.
    """
    if model_here(path):
        return f"{path} is in the cache of the hub"
    # A download would try a hub that is not there for half a minute.
    info = _from_hub(lambda hub: hub.HfApi().model_info(path, timeout=_HUB_SECONDS), path, setting)
    names = [file.rfilename for file in info.siblings or [] if "/" not in file.rfilename]
    _refuse_adapter(names, path, setting)
    need_tokenizer(names, path, setting)
    if not fnmatch.filter(names, "*.safetensors"):
        raise ConfigError(f"{setting} {path} has no safetensors files on the hub; other weight formats are not loaded")
    _from_hub(lambda hub: hub.hf_hub_download(path, "config.json"), path, setting)
    return f"{path} is not a local directory: it will be downloaded from the hub"


def is_hub_name(path: str) -> bool:
    """Whether this can be a model of the hub: it is not a directory here and does not look like a path."""
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    return not (is_path or os.path.isdir(path))


def _from_hub(ask: Callable[[Any], Any], name: str, setting: str) -> Any:
    """Return what `ask` does with huggingface_hub. Raises as `check_hub`, and MissingExtra."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError
    except ModuleNotFoundError:
        raise MissingExtra("huggingface_hub", "train") from None
    refused = f"{setting} {name!r} is neither a directory nor a model the hub gives"
    try:
        return ask(huggingface_hub)
    except GatedRepoError as error:
        raise ConfigError(f"{refused}: accept its licence on the hub, then `hf auth login`") from error
    except HFValidationError as error:
        raise ConfigError(f"{refused}: {first_line(error)}") from error
    # Errors of the HTTP library pass through huggingface_hub, and which library it is depends on the release.
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSALS:
            raise ConfigError(f"{refused}: {first_line(error)}") from error
        cause = error.__cause__ or error
        raise HubUnavailable(
            f"{setting} {name!r} is not a local directory, and it cannot be downloaded from the hub "
            f"({type(cause).__name__}: {first_line(cause)})"
        ) from error


def model_here(path: str) -> Path | None:
    """The directory of a model on this machine, or a complete one in the cache of the hub; None if there is none."""

    def find() -> Path:
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(path, allow_patterns=_HUB_FILES, local_files_only=True))
        # The cache may have its config.json alone.
        _check_files(directory, path, "")
        return directory

    return _here(path, find)


def config_here(path: str) -> Path | None:
    """The directory of a model's config.json on this machine, also in the cache of the hub; None if there is none."""

    def find() -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, "config.json", local_files_only=True)).parent

    return _here(path, find)


def _here(path: str, find_in_cache: Callable[[], Path]) -> Path | None:
    try:
        return local_model(path) or find_in_cache()
    # The hub's own errors for what is not there are of these kinds.
    except (ConfigError, ModuleNotFoundError, OSError, ValueError):
        return None


def weight_files(directory: Path) -> list[Path]:
    """Return model.safetensors, or else the files of the index, as transformers. Raises ConfigError without files."""
    index = directory / f"{_WEIGHTS}.index.json"
    try:
        named = sorted({directory / name for name in read_json(index).get("weight_map", {}).values()})
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is malformed ({first_line(error)}): copy the model again") from error
    if named or (directory / _WEIGHTS).is_file():
        whole = (directory / _WEIGHTS).is_file() and directory / _WEIGHTS not in named
        return [directory / _WEIGHTS] if whole else named
    if others := sorted(path.name for path in directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory} has neither {_WEIGHTS} nor {index.name}, which transformers reads, but {others[0]}: copy the "
            "model again, or convert it to the format of transformers"
        )
    raise ConfigError(f"{directory} has no safetensors files; other weight formats are not loaded")


def weights_digest(directory: Path) -> str:
    """Return a hash of the sizes of a model's weight files and of samples of their content, in milliseconds.

    Another model, or the same one after training, has another hash; a change of a few rows may be missed. Raises
    ConfigError if there are no weights, or one of the files cannot be read.
    """
    digest = hashlib.sha256()
    for path in weight_files(directory):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with open_regular(path) as file:
                # Evenly spread: training may leave whole layers as they were.
                for n in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * n // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def share_weights(directory: Path) -> None:
    """Give new weights the permissions of their config.json: safetensors writes files for their owner only."""
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)


def eos_ids(directory: Path, tokenizer_eos: int | None = None) -> list[int]:
    """Return the token ids that end a response, each once: those of both configurations, and the tokenizer's own.

    All readers of a model stop at all of them, since tools that save a model often change one file and not the others
    (open-r1 #663). `tokenizer_eos` is that of the loaded tokenizer; without it, that which the tokenizer's files name.
    Raises ConfigError for a value that is no token id of the model, and for malformed files.
    """
    try:
        return _eos_ids(directory, tokenizer_eos)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory}: its configurations or tokenizer files are malformed ({first_line(error)}): copy them again"
        ) from error


def _eos_ids(directory: Path, tokenizer_eos: int | None) -> list[int]:
    vocabulary, found = vocabulary_size(directory), list[int]()
    for name in ("generation_config.json", "config.json"):
        fields = read_json(directory / name)
        # Also of a language model inside another.
        parts = [part for part in (fields, fields.get("text_config")) if isinstance(part, dict)]
        for part in parts:
            value = part.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(one) is int and one >= 0 and (vocabulary is None or one < vocabulary) for one in ids):
                below = f" below {vocabulary}" if vocabulary is not None else ""
                raise ConfigError(
                    f"{directory / name}: eos_token_id is {value!r}, and needs a token id{below} or a list of them"
                )
            found += ids
    own = _tokenizer_eos(directory) if tokenizer_eos is None else tokenizer_eos
    if own is not None and vocabulary is not None and own >= vocabulary:
        if not found:
            raise ConfigError(
                f"{directory}: the end token of the tokenizer has the id {own}, and the model has ids below "
                f"{vocabulary}: name one of these as eos_token, or in generation_config.json"
            )
        own = None
    return list(dict.fromkeys([*found, *([] if own is None else [own])]))


def _tokenizer_eos(directory: Path) -> int | None:
    """Return the id of the end token that the tokenizer's files name, None if they name none that is known."""
    files = ("tokenizer_config.json", "special_tokens_map.json")
    eos: Any = next(filter(None, (read_json(directory / name).get("eos_token") for name in files)), "")
    content: str = eos["content"] if isinstance(eos, dict) else eos
    added = added_tokens(directory)
    if not content or content in added:
        return added.get(content)
    # Ids by token, or pieces with their scores in the order of their ids.
    vocabulary = (read_json(directory / "tokenizer.json").get("model") or {}).get("vocab") or {}
    by_token = vocabulary if isinstance(vocabulary, dict) else {one[0]: id_ for id_, one in enumerate(vocabulary)}
    return by_token.get(content)


def added_tokens(directory: Path) -> dict[str, int]:
    """Return the ids of the tokens that were added to a tokenizer, such as special ones, by their text."""
    tokens = read_json(directory / "tokenizer.json").get("added_tokens") or []
    decoder = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    named = {token["content"]: int(token["id"]) for token in tokens}
    return named | {token["content"]: int(id_) for id_, token in decoder.items()}


def vocabulary_size(directory: Path) -> int | None:
    """The number of token ids of a model, None if its config does not say."""
    with contextlib.suppress(ValueError):
        config: Any = read_json(directory / "config.json")
        for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
            if isinstance(part, dict) and type(size := part.get("vocab_size")) is int:
                return size
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty if the file does not exist. Raises Malformed if it is none, OSError."""
    try:
        with open_regular(path) as file:
            content = json.load(file)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{path} is not JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise Malformed(f"{path} is not a JSON object")
    return content
