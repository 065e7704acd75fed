"""Start a buffer server from a configuration."""

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping

from tba.buffer.server.writer import BufferServer
from tba.buffer.service.service import BufferService
from tba.buffer.store.starts import MODEL_WEIGHTS, model_weights, record_of, refuse_other_runs, refuse_other_work
from tba.buffer.store.store import Store
from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import AddressInUse, ConfigError
from tba.common.log import get_logger
from tba.common.run_status import check_address
from tba.common.system.process import keep_freed_memory, notify_systemd, objects_frozen, software
from tba.common.wire.channels import ServerChannel
from tba.common.wire.keys import server_keys
from tba.common.wire.socket_files import is_private, make_socket_directory

log = get_logger(__name__)

# Two threads are busy. The writer returns from SQLite many times per transaction and must not wait long for the GIL;
# but each forced switch costs some microseconds.
_SWITCH_SECONDS = 1e-3
# Queued requests are not garbage, but a collection every 700 objects would scan all of them again and again: it took
# half of the time of decoding.
_COLLECT_EVERY = 50_000


def serve(config: Config, stop: Callable[[], bool], origins: Mapping[str, str] | None = None) -> None:
    """Serve the buffer of a run until `stop()`. `origins` says what set each dotted key, and is recorded.

    Raises AddressInUse; LockTaken if another server has the database; ConfigError if the database is the record of an
    offline run, if the one in run.dir holds another run, or if the run is of another task or model; StorageError if it
    is unusable.
    """
    with contextlib.ExitStack() as resources:
        channel = resources.enter_context(contextlib.closing(_bind(config)))
        store = resources.enter_context(contextlib.closing(Store(config.database, durability=config.buffer.durability)))
        refuse_other_runs(config)
        refuse_other_work(config)
        settings = {**record_of(config), MODEL_WEIGHTS: model_weights(config)}
        run = store.open_run(
            config.run.name, seed=config.run.seed, config=settings, software=software(), origins=origins
        )
        if run.seed != config.run.seed:
            log.warning("the run keeps the seed that it was started with", seed=run.seed, asked=config.run.seed)
        service = BufferService(store, run, config, SystemClock())
        log.info("serving", address=channel.address, database=str(config.database), run=run.name)
        if channel.keys is None and not is_private(channel.address):
            log.warning("every client that reaches the address may read and change the run: security.insecure is set")
        notify_systemd("READY=1")
        keep_freed_memory()
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.set_threshold(_COLLECT_EVERY, 20, 100)
        endpoint = None
        if config.metrics.prometheus:
            from tba.buffer.server.prometheus import open_endpoint

            if (endpoint := open_endpoint(config.metrics.prometheus, run.name)) is not None:
                resources.callback(endpoint.close)
        queue_bytes = config.buffer.queue_mib << 20
        with objects_frozen():
            BufferServer(channel, service, queue_bytes=queue_bytes, endpoint=endpoint).run(stop)
    log.info("stopped")


def _bind(config: Config) -> ServerChannel:
    """Listen at the buffer's address. Raises AddressInUse, which names the run if the listener there is a buffer."""
    address, security = config.address, config.security
    keys = server_keys(security.keys, address, "buffer.address", insecure=security.insecure)
    make_socket_directory(address)
    try:
        return ServerChannel(address, keys=keys)
    except AddressInUse:
        # A wildcard such as tcp://* cannot be dialled: then the first error has to do.
        with contextlib.suppress(ConfigError):
            check_address(config)
        raise
