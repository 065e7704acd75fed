"""Snapshots of random weights, with and without deltas, in the real format and without a model."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tba.common.system.durable import temporary_directory
from tba.common.weights import delta, snapshot
from tba.common.weights.snapshot import DELTA, MANIFEST, Canary, Delta, Manifest, Snapshot, directory_name
from tba.common.weights.snapshot_server import SnapshotServer
from tba.common.weights.tensor_file import Tensor, content_of
from tba.common.wire import messages
from tba.common.wire.messages import FetchChunk
from tba.tests.helpers.checks import not_none

WEIGHTS = "model.safetensors"


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    path.write_bytes(b"".join(content_of(tensors)))


@dataclass
class RandomWeights:
    """Publishes versions 0, 1, 2 ... of a model of random bits; `truth` has the bytes of each complete weights file."""

    directory: Path
    elements: int = 100_000
    address: str = ""
    refs: list[messages.WeightsRef] = field(default_factory=list)
    truth: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(len(str(self.directory)))
        self._tensors = {
            name: Tensor("BF16", (size,), self._rng.integers(0, 1 << 16, size, dtype=np.uint16))
            for name, size in (("a", self.elements), ("b", 1003))
        }

    def full(self) -> messages.WeightsRef:
        """Publish everything."""
        self._change(0.01)
        return self._publish(None)

    def delta(self) -> messages.WeightsRef:
        """Publish everything, and what changed since the last version."""
        last, old = self.refs[-1], dict(self._tensors)
        self._change(0.01)
        changed = not_none(delta.build_delta(old, self._tensors, max_bytes=1e12))
        directory = self.directory / delta.FOLDER / directory_name(len(self.refs))
        directory.mkdir(parents=True)
        size = delta.write_delta(directory / DELTA, changed)
        entry = snapshot.describe_file(directory / DELTA)
        ref = self._publish(Delta(entry, size, last.version, last.manifest_sha256))
        shutil.copyfile(Path(ref.path) / MANIFEST, directory / MANIFEST)
        return ref

    def path(self, version: int, name: str) -> Path:
        """A published file, or the delta of a version."""
        return self.directory / (delta.FOLDER if name == DELTA else "") / directory_name(version) / name

    def _change(self, fraction: float) -> None:
        for name, tensor in self._tensors.items():
            chosen = self._rng.random(len(tensor.bits)) < fraction
            self._tensors[name] = Tensor(
                "BF16", tensor.shape, np.where(chosen, tensor.bits ^ np.uint16(1), tensor.bits)
            )

    def _publish(self, change: Delta | None) -> messages.WeightsRef:
        version = len(self.refs)
        final = self.directory / directory_name(version)
        temporary = temporary_directory(final)
        (temporary / "config.json").write_text("{}")
        write_tensor_file(temporary / WEIGHTS, self._tensors)
        self.truth.append((temporary / WEIGHTS).read_bytes())
        files = snapshot.describe_files(temporary)
        digest = snapshot.seal(temporary, final, Manifest("test", version, version, 0.0, files, Canary([], []), change))
        ref = messages.WeightsRef(
            version=version, step=version, path=str(final), manifest_sha256=digest, address=self.address
        )
        self.refs.append(ref)
        return ref


class CountingServer(SnapshotServer):
    """The trainer's file server; `served` counts the bytes served of each file."""

    def __init__(self, endpoint: str, directory: Path) -> None:
        self.served: dict[str, int] = {}
        super().__init__(endpoint, directory)

    def _chunk(self, reader: bytes, asked: FetchChunk) -> tuple[int, bytes]:
        size, data = super()._chunk(reader, asked)
        self.served[asked.file] = self.served.get(asked.file, 0) + len(data)
        return size, data


def verify(ref: messages.WeightsRef) -> Snapshot:
    """Read a published snapshot after checking the hash of every published file."""
    path = Path(ref.path)
    snapshot.check_manifest(path, ref.manifest_sha256)
    found = snapshot.read(path)
    for name, entry in found.manifest.files.items():
        snapshot.check_file(path / name, entry)
    return found


def flip_a_byte(path: Path, at: int = -100) -> None:
    """Damage a file in place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
