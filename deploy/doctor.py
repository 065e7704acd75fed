"""`tba doctor`: checks of this machine for problems that would stop a run."""

import importlib.metadata
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

from tba.common.config import Config, ScoringModelSection
from tba.common.config.paths import asked_gpus, check_data
from tba.common.errors import ConfigError, HttpUnavailable, MissingExtra, TbaError
from tba.common.system.devices import Gpu, choose_gpus, list_gpus, need_gpus
from tba.common.terminal import need_engine
from tba.common.weights.model_files import check_model, is_hub_name
from tba.common.wire.probe import ask_status, monitor
from tba.deploy.doctor_gpu import check_caches, check_compiler, check_cuda, check_topology
from tba.deploy.doctor_keys import check_keys, check_modes
from tba.deploy.doctor_storage import check_disk, check_other_nodes, check_weights_directory, unchecked_data

Finding = dict[str, str]
FAIL = "fail"
ENGINE = "engine"
_CONNECT_SECONDS = 2.0
# Checks that need not run on the node.
_ANYWHERE = ("gpus", "disk", "trainer memory", "model", "task", "reward model", "gold model")


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

    task: Callable[[Config], None]
    """Raises TbaError for a task that cannot be used."""
    reward_model: Callable[[ScoringModelSection], str]
    """Returns a description of the reward model. Raises TbaError if it cannot be used."""
    memory: Callable[[Config, Sequence[Gpu] | None], MemoryReport | str]
    """Estimates the trainer's memory, or returns why it cannot."""
    parameters: Callable[[Config], int | None]
    """Returns the number of parameters that the model's config.json tells, None if it cannot be read here."""


def examine(config: Config, roles: Checks, assumed: Sequence[Gpu] | None = None) -> list[Finding]:
    """Run all checks and return their findings; `result` is ok, warn, fail, or unchecked.

    `assumed` are the GPUs of a node that is not this one: then only what does not depend on this machine is checked.
    """
    disk = partial(check_disk, count=roles.parameters, here=assumed is None)
    checks: list[tuple[str, Callable[[Config], tuple[str, str]]]] = [
        ("python", _python),
        ("packages", _packages),
        (ENGINE, _engine),
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
        ("model", _model),
        ("task", partial(_task, roles.task)),
        ("reward model", lambda config: _scoring_model(roles.reward_model, config.reward_model)),
        ("gold model", lambda config: _scoring_model(roles.reward_model, config.gold_model)),
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
    engine = config.search.engine
    try:
        need_engine(engine)
    except MissingExtra as error:
        return "warn", f"search.engine = {engine}: {error}"
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
        return "fail", str(error)
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
        return "fail", str(error)
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
        return "fail", f"{address}: {error}"
    with closing(client):
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


def _scoring_model(check: Callable[[ScoringModelSection], str], section: ScoringModelSection) -> tuple[str, str]:
    if not section.configured:
        return "ok", "none is configured"
    if not section.url and is_hub_name(section.path):
        return "unchecked", f"{section.path} is not a local directory: it will be downloaded from the hub"
    try:
        return "ok", check(section)
    except MissingExtra as error:
        return "unchecked", f"{section.source}: {error}"
    except HttpUnavailable as error:
        return "unchecked", f"{error}; start the server before the run"
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
