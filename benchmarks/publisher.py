"""This publishes snapshots to a searcher while it is measured."""

import itertools
import os
import shutil
import time
from pathlib import Path

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.durable import temporary_directory
from tba.common.snapshot import Canary, Manifest, describe_files, directory_name, seal

_PATIENCE_SECONDS = 120.0


class Publisher:
    """Publishes a model's own weights again and again: what a swap costs does not depend on what they are."""

    def __init__(self, address: str, model: Path, canary: Canary, snapshots: Path) -> None:
        self._address = address
        self._model = model
        self._canary = canary
        self._snapshots = snapshots
        self._versions = itertools.count()
        snapshots.mkdir()

    def make(self) -> wire.WeightsRef:
        """One more version, which nobody hears of yet: that is work of a trainer, not of a searcher."""
        version = next(self._versions)
        final = self._snapshots / directory_name(version)
        temporary = temporary_directory(final)
        shutil.copytree(self._model, temporary, dirs_exist_ok=True)
        manifest = Manifest("run", version, version, time.time(), describe_files(temporary), self._canary)
        sealed = seal(temporary, final, manifest)
        return wire.WeightsRef(version=version, step=version, path=str(final), manifest_sha256=sealed)

    def publish(self, made: wire.WeightsRef) -> None:
        """Announce a version that `make` returned."""
        # A connection each time: one that is kept would break while the server is stopped.
        client = BufferClient(self._address, role="publisher", name="bench")
        hello = wire.Hello(host="bench", pid=os.getpid(), software="bench")
        client.call(hello, wire.Welcome, deadline_seconds=_PATIENCE_SECONDS)
        client.call(wire.AnnounceSnapshot(weights=made, bytes=0), wire.Done, deadline_seconds=_PATIENCE_SECONDS)
        client.close()
