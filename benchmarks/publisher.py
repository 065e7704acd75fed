"""Snapshots for a searcher that is being measured."""

import itertools
import os
import shutil
import time
from pathlib import Path

from tba.common.system.durable import temporary_directory
from tba.common.weights.snapshot import Canary, Manifest, describe_files, directory_name, seal
from tba.common.wire import messages
from tba.common.wire.client import BufferClient

_PATIENCE_SECONDS = 120.0


class Publisher:
    """Publishes the same weights under new versions: the cost of a swap does not depend on their values."""

    def __init__(self, address: str, model: Path, canary: Canary, snapshots: Path) -> None:
        self._address = address
        self._model = model
        self._canary = canary
        self._snapshots = snapshots
        self._versions = itertools.count()
        snapshots.mkdir()

    def make(self) -> messages.WeightsRef:
        """Write the next version without announcing it: this is a trainer's work, and not part of the measurement."""
        version = next(self._versions)
        final = self._snapshots / directory_name(version)
        temporary = temporary_directory(final)
        shutil.copytree(self._model, temporary, dirs_exist_ok=True)
        manifest = Manifest("run", version, version, time.time(), describe_files(temporary), self._canary)
        sealed = seal(temporary, final, manifest)
        return messages.WeightsRef(version=version, step=version, path=str(final), manifest_sha256=sealed)

    def publish(self, made: messages.WeightsRef) -> None:
        """Announce a version that `make` returned."""
        # A new connection each time: a permanent one would break while the server is stopped.
        client = BufferClient(self._address, role="publisher", name="bench")
        hello = messages.Hello(host="bench", pid=os.getpid())
        client.call(hello, messages.Welcome, deadline_seconds=_PATIENCE_SECONDS)
        client.call(messages.AnnounceSnapshot(weights=made, bytes=0), messages.Done, deadline_seconds=_PATIENCE_SECONDS)
        client.close()
