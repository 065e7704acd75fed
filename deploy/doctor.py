"""`tba doctor`: checks of this machine for problems that would stop a run."""

import importlib.metadata
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from tba.common.config import Config, ScoringModelSection
from tba.common.config.paths import asked_gpus, asked_packages, check_data, hub_data, unused_models
from tba.common.errors import ConfigError, HttpUnavailable, HubUnavailable, MissingExtra, TbaError
from tba.common.run_status import ask_status, monitor
from tba.common.system.devices import CPU, Gpu, choose_gpus, list_gpus, need_gpus
from tba.common.terminal import need, need_engine
from tba.common.weights.model_files import check_hub, check_model, is_hub_name, model_here, weight_files
from tba.common.weights.tensor_file import read_layout
from tba.deploy.doctor_gpu import check_caches, check_compiler, check_cuda, check_topology
from tba.deploy.doctor_keys import check_keys, check_modes
from tba.deploy.doctor_storage import check_disk, check_other_nodes, check_weights_directory

Finding = dict[str, str]
FAIL = "fail"
# A `warn` of these checks is a failure where all roles start.
NEEDED_BY_A_RUN = ("engine", "model", "task", "reward model", "gold model")
_CONNECT_SECONDS = 2.0
# Checks that need not run on the node.
_ANYWHERE = ("model", "gpus", "disk", "trainer memory", "task", "reward model", "gold model")


class MemoryReport(Protocol):
    """What `tba.trainer.preflight` says of the trainer's memory."""

    @property
    def fits(self) -> bool:
        """Whether there is enough."""

    def sentence(self) -> str:
        """Return needs, what there is, and what would fit instead."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks that need the searcher's or the trainer's code, which this package does not import."""

    task: Callable[[Config], str]
    """Raises TbaError for a task that cannot be used."""
    scoring_model: Callable[[ScoringModelSection, str], str]
    """Returns a description of the model of a section, given its name. Raises TbaError if it cannot be used."""
    memory: Callable[[Config, Sequence[Gpu] | None], MemoryReport | str]
    """Estimates the trainer's memory, or returns why it cannot."""
    parameters: Callable[[Config], int | None]
    """Returns the number of parameters that the model's config.json tells, None if it cannot be read here."""


def examine(config: Config, roles: Checks, assumed: Sequence[Gpu] | None = None) -> list[Finding]:
    """Run all checks and return their findings; `result` is ok, warn, fail, or unchecked.

    `assumed` are the GPUs of a node that is not this one: then only what does not depend on this machine is checked.
    """
    here = assumed is None
    disk = partial(check_disk, count=roles.parameters, here=here)
    checks: list[tuple[str, Callable[[Config], tuple[str, str]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("engine", _engine),
        # First of those on the model: it asks the hub for the configuration that the others read.
        ("model", partial(_models, here)),
        ("gpus", partial(_gpus, assumed)),
        ("cuda", check_cuda),
        ("compiler", check_compiler),
        ("caches", check_caches),
        ("topology", check_topology),
        ("disk", disk),
        ("weights directory", check_weights_directory),
        ("trainer memory", partial(_memory, roles.memory, assumed)),
        ("buffer address", _address),
        ("other nodes", check_other_nodes),
        ("keys", check_keys),
        ("modes", check_modes),
        ("task", partial(_task, roles.task, here)),
        ("reward model", partial(_scoring_model, roles.scoring_model, "reward_model", here)),
        ("gold model", partial(_scoring_model, roles.scoring_model, "gold_model", here)),
    ]
    findings = []
    for name, check in checks:
        if not here and name not in _ANYWHERE:
            continue
        result, detail = check(config)
        findings.append({"check": name, "result": result, "detail": detail})
    return findings


def _python(_: Config) -> tuple[str, str]:
    return "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages(config: Config) -> tuple[str, str]:
    asked = asked_packages(config)
    names = ["torch", "transformers", "safetensors", "pyzmq", "msgpack", *(module for _, module, _ in asked)]
    found = {name: _version(name) for name in names}
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in found.items())
    if all(found.values()):
        return "ok", detail
    for setting, module, extra in asked:
        if not found[module]:
            return FAIL, f"{detail}: {setting} needs the extra {extra} (docs/install.md)"
    return "warn", f"{detail}: a trainer or searcher needs the extra train (docs/install.md), a buffer does not"


def _engine(config: Config) -> tuple[str, str]:
    engine = config.search.engine
    try:
        need_engine(engine, config.search.gpus)
    except MissingExtra as error:
        return "warn", f"search.engine = {engine}: {error}"
    # Torch quotes the directories of headers for the compiler, and not those of libraries (2.13).
    if engine == "vllm" and config.search.gpus == CPU and " " in sys.prefix:
        return "warn", (
            f"{sys.prefix} has a space, which torch does not quote when it compiles for vLLM on a CPU: make the "
            "virtual environment elsewhere"
        )
    versions = ((name, _version(name)) for name in (engine, f"{engine}-cpu"))
    return "ok", next((f"{name} {version}" for name, version in versions if version), engine)


def _gpus(assumed: Sequence[Gpu] | None, config: Config) -> tuple[str, str]:
    asked = asked_gpus(config)
    try:
        present = list_gpus() if assumed is None else assumed
        need_gpus(asked, present)
        for key, wanted in asked.items():
            choose_gpus(wanted, present, key)
    except TbaError as error:
        return FAIL, str(error)
    known = "present" if assumed is None else "assumed"
    return "ok", f"{len(present)} {known}; search.gpus = {config.search.gpus}, train.gpu = {config.train.gpu}"


def _memory(
    estimate: Callable[[Config, Sequence[Gpu] | None], MemoryReport | str],
    assumed: Sequence[Gpu] | None,
    config: Config,
) -> tuple[str, str]:
    try:
        report = estimate(config, assumed)
    except TbaError as error:
        return FAIL, str(error)
    if isinstance(report, str):
        return "unchecked", report
    if report.fits:
        return "ok", report.sentence()
    return (FAIL if config.train.check_memory else "warn"), report.sentence()


def _address(config: Config) -> tuple[str, str]:
    address = config.address
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname in (None, "*") or not (parts.netloc.rpartition(":")[2]).isdigit():
        return "ok", f"{address} (not probed)"
    try:
        socket.create_connection((str(parts.hostname), parts.port or 0), _CONNECT_SECONDS).close()
        client = monitor(config, "doctor")
    except ConnectionRefusedError:
        return "ok", f"{address}: nothing listens there"
    # ValueError: the port is out of range.
    except (OSError, ValueError, ConfigError) as error:
        return FAIL, f"{address}: {error}"
    with closing(client):
        status = ask_status(client, deadline_seconds=2.0)
    if status is None:
        return FAIL, (
            f"{address} is in use by a program that does not answer like a buffer: set buffer.address, or run this "
            "again if a buffer is starting there"
        )
    if status.run_name != config.run.name:
        return FAIL, f"{address} is in use by the buffer of run {status.run_name}: set buffer.address or run.name"
    return "ok", f"{address}: the buffer of run {status.run_name} answers"


def _models(here: bool, config: Config) -> tuple[str, str]:
    """Check model.path and eval.embedder. Returns the worse of the two results."""
    named = {"model.path": config.model.path}
    if config.eval.embedder and "eval.embedder" not in unused_models(config):
        named["eval.embedder"] = config.eval.embedder
    found = [_model(setting, path, here) for setting, path in named.items()]
    worst = min((result for result, _ in found), key=(FAIL, "warn", "unchecked", "ok").index)
    return worst, "; ".join(detail for _, detail in found)


def _model(setting: str, path: str, here: bool) -> tuple[str, str]:
    try:
        if not check_model(path, setting=setting):
            return "ok", check_hub(path, setting=setting)
        if (directory := model_here(path)) is not None:
            for file in weight_files(directory):
                read_layout(file)
        return "ok", path
    # Not every role needs it.
    except (HubUnavailable, MissingExtra) as error:
        return ("warn" if here else "unchecked"), f"{error}; a searcher or a trainer needs it"
    except TbaError as error:
        return FAIL, str(error)


def _scoring_model(
    check: Callable[[ScoringModelSection, str], str], name: str, here: bool, config: Config
) -> tuple[str, str]:
    section = config.reward_model if name == "reward_model" else config.gold_model.classifier
    if not section.configured:
        return "ok", "none is configured"
    setting = f"{name}.path"
    if not section.url and is_hub_name(section.path) and model_here(section.path) is None:
        unused = "unchecked", f"{section.path} is on the hub, and only `tba eval` uses it"
        return unused if setting in unused_models(config) else _model(setting, section.path, here)
    try:
        return "ok", check(section, name)
    except MissingExtra as error:
        return "unchecked", f"{section.source}: {error}"
    except HttpUnavailable as error:
        return "unchecked", f"{error}; start the server before the run"
    except TbaError as error:
        return FAIL, str(error)


def _task(check_task: Callable[[Config], str], here: bool, config: Config) -> tuple[str, str]:
    try:
        check_data(config.task)
        if remote := hub_data(config.task):
            if here:
                need("datasets", "hub")
            return "unchecked", f"{', '.join(remote)}: data of the hub, downloaded at the start"
        warning = check_task(config)
    except MissingExtra as error:
        return ("warn" if here else "unchecked"), f"task.name = {config.task.name}: {error}"
    except TbaError as error:
        return FAIL, str(error)
    if warning:
        return "warn", warning
    return "ok", ", ".join(one.train if one.reads_files else one.name for one in config.task.sources)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
