"""Snapshots of random weights, full and deltas, in the real format and without a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tba.common import delta, snapshot, wire
from tba.common.durable import temporary_directory
from tba.common.snapshot import Canary, FileEntry, Manifest, directory_name
from tba.common.tensor_file import Tensor, map_tensors, read_layout, sha256_of_tensors, write_tensor_file
from tba.trainer.serve import SnapshotServer

WEIGHTS = "model.safetensors"


@dataclass
class RandomWeights:
    """Publishes versions 0, 1, 2 ... of a "model" of random bits; `truth` has the bytes of each complete file."""

    directory: Path
    elements: int = 100_000
    address: str = ""
    refs: list[wire.WeightsRef] = field(default_factory=list)
    truth: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(len(str(self.directory)))
        self._tensors = {
            name: Tensor("BF16", (size,), self._rng.integers(0, 1 << 16, size, dtype=np.uint16))
            for name, size in (("a", self.elements), ("b", 1003))
        }

    def full(self) -> wire.WeightsRef:
        """Publish everything."""
        self._change(0.01)
        temporary = self._begin()
        (temporary / "config.json").write_text("{}")
        write_tensor_file(temporary / WEIGHTS, self._tensors)
        files = snapshot.describe_files(temporary)
        return self._publish(temporary, files, (temporary / WEIGHTS).read_bytes(), {})

    def delta(self) -> wire.WeightsRef:
        """Publish what changed since the last version."""
        last = self.refs[-1]
        before = snapshot.read(Path(last.path)).manifest.complete_files
        old = dict(self._tensors)
        self._change(0.01)
        temporary = self._begin()
        changed = delta.build_delta(old, self._tensors, most_bytes=1e12)
        files = {delta.FILE: FileEntry(*write_tensor_file(temporary / delta.FILE, changed))}
        complete = self.directory / "complete.tmp"
        write_tensor_file(complete, self._tensors)
        digest = sha256_of_tensors(read_layout(complete), map_tensors(complete))
        base = {
            "base": last.version,
            "base_manifest_sha256": last.manifest_sha256,
            "complete": {**before, WEIGHTS: FileEntry(before[WEIGHTS].bytes, digest)},
        }
        return self._publish(temporary, files, complete.read_bytes(), base)

    def path(self, version: int, name: str) -> Path:
        """A published file."""
        return self.directory / directory_name(version) / name

    def _change(self, fraction: float) -> None:
        for name, tensor in self._tensors.items():
            chosen = self._rng.random(len(tensor.bits)) < fraction
            self._tensors[name] = Tensor(
                "BF16", tensor.shape, np.where(chosen, tensor.bits ^ np.uint16(1), tensor.bits)
            )

    def _begin(self) -> Path:
        return temporary_directory(self.directory / directory_name(len(self.refs)))

    def _publish(
        self, temporary: Path, files: dict[str, FileEntry], truth: bytes, base: dict[str, Any]
    ) -> wire.WeightsRef:
        version = len(self.refs)
        final = self.directory / directory_name(version)
        manifest = Manifest("test", version, version, 0.0, files, Canary([], []), **base)
        digest = snapshot.seal(temporary, final, manifest)
        ref = wire.WeightsRef(
            version=version, step=version, path=str(final), manifest_sha256=digest, address=self.address
        )
        self.refs.append(ref)
        self.truth.append(truth)
        return ref


class CountingServer(SnapshotServer):
    """The trainer's file server, and how many bytes of each file it has served."""

    def __init__(self, endpoint: str, directory: Path) -> None:
        self.served: dict[str, int] = {}
        super().__init__(endpoint, directory)

    def _chunk(self, asked: wire.FetchChunk) -> tuple[int, bytes]:
        size, data = super()._chunk(asked)
        self.served[asked.file] = self.served.get(asked.file, 0) + len(data)
        return size, data


def flip_a_byte(path: Path, at: int = -100) -> None:
    """Damage a file in place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
