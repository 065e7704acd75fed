"""Serve this node's snapshots to other nodes."""

from tba.common.clock import Clock
from tba.common.config import Config
from tba.common.errors import AddressInUse
from tba.common.log import get_logger
from tba.common.weights.node_store import make_directory, weights_directory
from tba.common.weights.snapshot_server import NodeServer, address_of
from tba.common.wire.keys import server_keys, with_key

log = get_logger(__name__)

_RETRY_SECONDS = 10.0


class Serving:
    """Runs the node's server in this searcher unless another searcher of the node does. Used by one thread.

    `address` is the node's, whichever of its searchers listens there; empty if the node serves nothing.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._endpoint = config.search.serve_snapshots
        self._keys = None
        if self._endpoint:
            self._keys = server_keys(config.security, self._endpoint, "search.serve_snapshots")
        self.address = with_key(address_of(self._endpoint), self._keys)
        self._directory = weights_directory(config)
        self._clock = clock
        self._server: NodeServer | None = None
        # Monotonic.
        self._retry_at = 0.0

    def update(self) -> None:
        """Listen if no searcher of this node does. Raises ConfigError, or what ended the server."""
        if self._server is not None:
            self._server.check()
        elif self._endpoint and self._clock.monotonic() >= self._retry_at:
            try:
                make_directory(self._directory)
                self._server = NodeServer(self._endpoint, self._directory, self._keys)
            except AddressInUse:
                log.debug("another searcher of this node serves its snapshots", address=self.address)
                self._retry_at = self._clock.monotonic() + _RETRY_SECONDS

    def close(self) -> None:
        """End the server. Closing twice is fine."""
        if self._server is not None:
            self._server.close()
