"""Checks that what a configuration names exists and goes together. No directory stays that was not there."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba.common.config import Config, TaskSection
from tba.common.config.search import check_arguments, installed_arguments
from tba.common.data_files import is_data_file
from tba.common.errors import ConfigError
from tba.common.system.devices import CPU, Gpu, searcher_gpus, shared_gpus
from tba.common.weights.model_files import check_model, is_hub_name
from tba.common.wire.socket_files import is_local

# The last parts of keys whose texts may be paths, of tables whose texts may be, and of those that are in any case.
_MAY_BE_PATHS, _MAY_HOLD_PATHS = ("path", "name", "train", "test", "embedder", "policy"), ("options", "vllm")
_ARE_PATHS = ("spool_dir", "weights_dir", "keys")
# The largest share of a GPU that an engine may have if a trainer uses it too.
SHARED_UTILIZATION = 0.5


def check_paths(config: Config, *, here: bool = True) -> list[str]:
    """Check all paths, and return a sentence for each setting that cannot be checked here.

    The directories of the run are those of another node if it is not to run `here`.

    Raises ConfigError with key and path for the first one that does not exist or is not writable. The hub is not asked.
    """
    for key, path in model_paths(config).items():
        check_model(path, setting=key)
    check_data(config.task)
    if here:
        check_directories(config)
    if config.search.weights_from == "trainer" and not config.train.serve_snapshots:
        raise ConfigError(
            'search.weights_from = "trainer", and the trainer serves no snapshots: set train.serve_snapshots, such as '
            'to "tcp://*:5758", or search.weights_from = "auto"'
        )
    check_adapters(config)
    return check_gpus_apart(config) + _check_engine_arguments(config)


def model_paths(config: Config) -> dict[str, str]:
    """Return the settings that name models, with their values: directories, or names of the hub."""
    others = {
        "reward_model.path": config.reward_model.path,
        "reference.path": config.reference.path,
        "eval.embedder": config.eval.embedder,
    }
    return {"model.path": config.model.path} | {key: path for key, path in others.items() if path}


def asked_packages(config: Config) -> list[tuple[str, str, str]]:
    """Return (setting, module, extra) of each optional package that a setting of the trainer asks for."""
    asked = [("lora.rank", "peft", "lora")] if config.lora.rank else []
    return asked + [(f"metrics.{sink}", sink, sink) for sink in ("wandb", "trackio") if getattr(config.metrics, sink)]


def hub_models(config: Config) -> dict[str, str]:
    """Return those of `model_paths` that are on the hub and that a run uses. Raises ConfigError as `check_model`."""
    found = {key: path for key, path in model_paths(config).items() if not check_model(path, setting=key)}
    return {key: path for key, path in found.items() if key not in unused_models(config)}


def unused_models(config: Config) -> tuple[str, ...]:
    """Return the settings of models that only an evaluation by hand would use."""
    return () if config.eval.at_end or config.eval.gpu else ("eval.embedder",)


def asked_gpus(config: Config) -> dict[str, str]:
    """Return the settings of searchers and trainer that ask for GPUs, with their values."""
    keys = {"search.gpus": config.search.gpus, "train.gpu": config.train.gpu}
    return {key: wanted for key, wanted in keys.items() if wanted != CPU}


def check_gpus_apart(config: Config, present: Sequence[Gpu] = ()) -> list[str]:
    """Raise ConfigError if engines and trainer use the same GPU and an engine's share is more than a half of it.

    `present` are the GPUs of this machine, of which `all` leaves out the trainer's if there are others. If the buffer's
    address is on a network, the roles may be on different nodes: then this returns a sentence.
    """
    search, train = config.search, config.train
    if search.engine != "vllm" or search.gpu_memory_utilization <= SHARED_UTILIZATION:
        return []
    engines = {"search.gpus": searcher_gpus(search.gpus, train.gpu, present), "eval.gpu": config.eval.gpu or CPU}
    shared = {key: both for key, gpus in engines.items() if (both := shared_gpus(gpus, train.gpu, present))}
    if not shared:
        return []
    key, both = next(iter(shared.items()))
    named = search.gpus if key == "search.gpus" else config.eval.gpu
    sentence = f"{key} = {named} and train.gpu = {train.gpu} both name GPU {', '.join(both)}"
    if not present and not is_local(config.address):
        return [f"{sentence}: they must be on different nodes"]
    raise ConfigError(
        f"{sentence}: name different ones, or lower search.gpu_memory_utilization to {SHARED_UTILIZATION} or less"
    )


def _check_engine_arguments(config: Config) -> list[str]:
    """Raise ConfigError for an unknown name in `search.vllm`. Returns a sentence if vLLM is not installed here."""
    if not config.search.vllm or config.search.engine != "vllm":
        return []
    if known := installed_arguments():
        check_arguments(config.search.vllm, known)
        return []
    return [f"search.vllm sets {', '.join(config.search.vllm)}: not checked, vLLM is not installed here"]


def check_adapters(config: Config) -> None:
    """Raise ConfigError if vLLM would have to apply float32 adapters on a GPU, where its kernels take 16 bits alone."""
    by_vllm = config.search.engine == "vllm" and config.search.gpus != "cpu" and config.lora.publish == "adapter"
    if by_vllm and config.model.dtype == "float32":
        raise ConfigError(
            'lora.publish = "adapter" with model.dtype = "float32": on a GPU vLLM applies adapters in 16 bits alone. '
            'Set model.dtype = "bfloat16", or lora.publish = "merged"'
        )


def check_data(task: TaskSection) -> None:
    """Raise ConfigError for a file of prompts that does not exist. Other names are hub ids."""
    for source in task.sources:
        for key, path in (("task.train", source.train), ("task.test", source.test)):
            # Unlike Path.exists, this is False in a directory that this user may not enter.
            if source.reads_files and is_data_file(path) and not os.path.exists(path):
                raise ConfigError(f"{key} {path} does not exist")


def hub_data(task: TaskSection) -> list[str]:
    """Return the data sets of a task that are on the hub, and not files here."""
    named = [name for source in task.sources if source.reads_files for name in (source.train, source.test)]
    remote = [name for name in named if name and not is_data_file(name) and is_hub_name(name)]
    return list(dict.fromkeys(remote))


def absolute_paths(settings: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Return settings, by key or by section, with the paths that exist in a directory made absolute.

    A name of the hub, and a file that is gone, stay as they are. So does everything if the directory does not exist.
    """
    return {key: _absolute(value, key.rpartition(".")[2], directory) for key, value in settings.items()}


def _absolute(value: Any, key: str, directory: str) -> Any:
    if isinstance(value, Mapping):
        holds = key in _MAY_HOLD_PATHS
        return {name: _absolute(inner, key if holds else name, directory) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_absolute(inner, key, directory) for inner in value]
    if not (isinstance(value, str) and value and os.path.isdir(directory)):
        return value
    # A task of one's own is a file with the name of its class.
    file = value.partition(":")[0] if key == "name" else value
    may_be = key in (*_MAY_BE_PATHS, *_MAY_HOLD_PATHS) and (key != "name" or file.endswith(".py"))
    # A word of these may be the name of a folder by chance.
    may_be = may_be and (key not in _MAY_HOLD_PATHS or "/" in value or "." in value)
    is_path = key in _ARE_PATHS or (may_be and os.path.exists(os.path.join(directory, file)))
    return os.path.normpath(os.path.join(directory, value)) if is_path else value


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists and is visible to this user. Raises nothing."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if os.path.exists(one))


def check_directories(config: Config) -> None:
    """Raise ConfigError for a directory that is not writable or cannot be created."""
    directories = {
        "run.dir": config.run.dir,
        "buffer.database": config.database.parent,
        "search.spool_dir": config.spool,
        "search.weights_dir": config.search.weights_dir,
    }
    for key, directory in directories.items():
        if directory is None:
            continue
        existing = nearest_existing(directory)
        if not existing.is_dir():
            raise ConfigError(f"{key} {directory} cannot be created: {existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{key} {directory} is not writable: {existing} belongs to another user or is read-only")
        # Root may write everywhere, but not to /proc or a disk that refuses.
        try:
            tempfile.TemporaryDirectory(prefix=".tba-", dir=existing).cleanup()
        except OSError as error:
            raise ConfigError(f"{key} {directory} cannot be created: {existing}: {error.strerror}") from error
    if config.search.weights_dir is not None:
        own = config.search.weights_dir / config.run.name
        # As the searchers require (tba.common.weights.node_store).
        if os.path.exists(own) and not (own.is_dir() and own.stat().st_uid == os.getuid()):
            raise ConfigError(f"search.weights_dir: {own} is not a directory of this user: set another one")
