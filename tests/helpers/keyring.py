"""Keys of a server and its clients, for tests."""

from pathlib import Path

from tba.common.wire.channels import new_pair
from tba.common.wire.keys import AUTHORIZED, ClientKeys, ServerKeys, buffer_key, server_keys, write_pair, write_public


class Keyring:
    """The directory of keys of a server's node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        write_pair(directory, new_pair("node0"))

    def server(self) -> ServerKeys:
        """Return the keys of a server on this node."""
        keys = server_keys(self.directory, "tcp://127.0.0.1:1", "buffer.address", insecure=False)
        assert keys is not None
        return keys

    def client(self, name: str, *roles: str) -> ClientKeys:
        """Return the keys of a new client, authorised if it has roles."""
        pair = new_pair(name)
        if roles:
            self.authorize(name, pair.public, *roles)
        return ClientKeys(pair, buffer_key(self.directory))

    def authorize(self, name: str, public: str, *roles: str) -> None:
        """Admit a key."""
        write_public(self.directory / AUTHORIZED / f"{name}.pub", public=public, roles=roles)

    def revoke(self, name: str) -> None:
        """Admit a key no longer."""
        (self.directory / AUTHORIZED / f"{name}.pub").unlink()
