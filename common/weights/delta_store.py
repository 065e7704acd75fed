"""The deltas of a directory of snapshots, for nodes that fetch: the trainer writes and serves them.

    SNAPSHOTS/deltas/v00000041/{delta.safetensors.zst, manifest.json}

The manifest has the same bytes as the snapshot's own. A delta outlives its snapshot, since newer ones are based on it;
but a chain of deltas as large as the weights has no use.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from tba.common.weights import delta
from tba.common.weights.snapshot import MANIFEST, Delta, Manifest, SnapshotKey, describe_file, directory_name
from tba.common.weights.tensor_file import Tensor

NAME = "deltas"

# As a fraction of all bytes. A delta saves bytes to transfer and costs the node that fetches it a copy of its base.
_LARGEST = 0.5


class DeltaStore:
    """The deltas below a directory of snapshots. Used by one thread; others may read what it has published."""

    def __init__(self, snapshots: Path) -> None:
        self._directory = snapshots / NAME

    def build(
        self, version: int, base: SnapshotKey, old: Mapping[str, Tensor], new: Mapping[str, Tensor]
    ) -> Delta | None:
        """Write the delta of a version from `old` to `new`, tensors of the same layout; None if it is not worth it."""
        whole = sum(tensor.bits.nbytes for tensor in new.values())
        changed = delta.build_delta(old, new, max_bytes=_LARGEST * whole)
        if changed is None:
            return None
        directory = self._directory / directory_name(version)
        directory.mkdir(parents=True, exist_ok=True)
        size = delta.write_delta(directory / delta.FILE, changed)
        return Delta(describe_file(directory / delta.FILE), size, base.version, base.manifest_sha256)

    def publish(self, snapshot: Path, manifest: Manifest) -> None:
        """Serve the delta of a snapshot that is sealed, and delete deltas that no node would use any more."""
        if manifest.delta is not None:
            shutil.copyfile(snapshot / MANIFEST, self._directory / directory_name(manifest.version) / MANIFEST)
        self._collect(sum(entry.bytes for entry in manifest.files.values()))

    def discard(self, version: int) -> None:
        """Delete the delta of a snapshot that was not sealed."""
        shutil.rmtree(self._directory / directory_name(version), ignore_errors=True)

    def clear(self) -> None:
        """Delete all deltas."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, whole: int) -> None:
        size = 0
        for directory in sorted(self._directory.glob("v????????"), reverse=True):
            file = directory / delta.FILE
            size += file.stat().st_size if file.is_file() else 0
            if size >= whole:
                shutil.rmtree(directory, ignore_errors=True)
