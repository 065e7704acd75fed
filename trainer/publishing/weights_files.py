"""The weights files of snapshots between kept ones: mapped, in memory if there is room, and written again and again.

    free       WEIGHTS/.v00000000-….part/    under an exclusive lock; being filled or waiting for it
    published  WEIGHTS/v00000042-….../       under a shared lock, so that searchers do not delete it

A published directory that is not the newest, and that no searcher holds, becomes free again: its name changes before
its content does. A file that is written again causes no page faults, and stays registered as pinned memory.
"""

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from tba.common.log import get_logger
from tba.common.system.durable import require_space
from tba.common.weights import node_store
from tba.common.weights.snapshot import Manifest, SnapshotKey, write_manifest
from tba.common.weights.tensor_file import Layout, Tensor
from tba.trainer.model.host_buffers import Tensors, register, unregister

log = get_logger(__name__)

WEIGHTS = "model.safetensors"
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
           torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
           torch.int64: "I64"}  # fmt: skip
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class WeightsFile:
    """A directory with a weights file of `layout` that this process has mapped: `tensors` are its content.

    Raises OSError if there is no space, and leaves nothing then.
    """

    def __init__(self, path: Path, layout: Layout, *, pinned: bool) -> None:
        self.path = path
        path.mkdir(mode=0o755)
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX)
            self.content, self._inode = _map(path / WEIGHTS, layout)
        except BaseException:
            self.delete()
            raise
        # Copies from a GPU are asynchronous only into registered memory.
        self._pinned = pinned and register(self.content.ctypes.data, self.content.nbytes)
        self.bits: dict[str, Tensor] = layout.view(self.content)
        flat = torch.from_numpy(self.content)
        self.tensors: Tensors = {
            name: flat[span.start : span.end].view(_TORCH[span.dtype]).view(span.shape)
            for name, span in layout.spans.items()
        }

    def publish(self, final: Path) -> None:
        """Give the directory its final name. From now on it never changes, until `take`."""
        os.rename(self.path, final)
        self.path = final
        fcntl.flock(self._directory, fcntl.LOCK_SH)

    def take(self, part: Path) -> bool:
        """Make a published directory free. False if it is in use. Raises FileNotFoundError if it is lost."""
        if not node_store.try_lock(self._directory):
            # The attempt has released the shared lock: flock(2).
            fcntl.flock(self._directory, fcntl.LOCK_SH)
            return False
        if not node_store.is_named(self._directory, self.path):
            raise FileNotFoundError(self.path)
        os.rename(self.path, part)
        self.path = part
        weights = (part / WEIGHTS).stat()
        # A hard link elsewhere is a snapshot of its own.
        if weights.st_ino != self._inode or weights.st_nlink > 1:
            raise FileNotFoundError(f"{part / WEIGHTS} is linked elsewhere")
        # Also the mark: the content is about to change.
        self.clear()
        return True

    def clear(self) -> None:
        """Delete the files besides the weights, which are of an older version or of an attempt that failed."""
        for path in self.path.iterdir():
            if path.name != WEIGHTS:
                path.unlink()

    def close(self) -> None:
        """Release the directory and the memory. The files stay."""
        if getattr(self, "_pinned", False):
            unregister(self.content.ctypes.data)
        self.tensors, self.bits = {}, {}
        os.close(self._directory)

    def delete(self) -> None:
        """Release the directory and the memory, and delete the files."""
        # A searcher may have replaced the directory meanwhile.
        if node_store.is_named(self._directory, self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()


class WeightsFilePool:
    """The weights files of one trainer. The training thread acquires them, the publisher's thread does the rest.

    There are as many as are in use at the same time: the newest, the one being written, the one being filled, and those
    that searchers hold. `floor` is the space in bytes that must stay free.

    Files are made and deleted outside of the lock on the lists: reserving, populating and pinning 15 GB takes seconds.
    """

    def __init__(self, directory: Path, layout: Layout, device: torch.device, floor: int) -> None:
        self.directory = directory
        # The reason why `acquire` returned None.
        self.no_room = ""
        self._layout = layout
        self._pinned = device.type == "cuda"
        self._floor = floor
        # Held by the thread that makes a file: the other one waits for it instead of making another one.
        self._making = threading.Lock()
        # Guards everything below.
        self._lock = threading.Lock()
        # The directory of the file that was made last, which may still be unlocked.
        self._new: Path | None = None
        self._free: list[WeightsFile] = []
        # Acquired and not sealed.
        self._taken: list[WeightsFile] = []
        # Oldest first.
        self._published: list[WeightsFile] = []
        # How many of them are older than the one announced last.
        self._old = 0
        # Published files that must still be written to disk.
        self._held: list[WeightsFile] = []
        # To be deleted.
        self._unused: list[WeightsFile] = []
        node_store.make_directory(directory)
        # Before the first file: after a crash there may be no room for it. The newest is what searchers may ask for.
        _delete_all(self._leftovers(keep=1))

    def acquire(self) -> WeightsFile | None:
        """A file to fill; None if there is no room for one more, with the reason in `no_room`.

        Returns at once if a file is free. Otherwise makes one, or waits for the one that the other thread is making.
        """
        if (free := self._take()) is not None:
            return free
        with self._making:
            return self._take() or (self._take() if self._make() else None)

    def _take(self) -> WeightsFile | None:
        with self._lock:
            if not self._free and not self._reclaim():
                return None
            self._taken.append(self._free.pop())
            return self._taken[-1]

    def give_back(self, file: WeightsFile) -> None:
        """The content of a file is not published after all."""
        with self._lock:
            self._taken.remove(file)
            self._free.append(file)

    def seal(self, file: WeightsFile, manifest: Manifest) -> str:
        """Publish a filled file. Returns the sha256 of the manifest."""
        digest = write_manifest(file.path, manifest)
        node_store.mark_verified(file.path, digest)
        file.publish(self.directory / SnapshotKey(manifest.version, digest).name)
        with self._lock:
            self._taken.remove(file)
            self._published.append(file)
        return digest

    def hold(self, file: WeightsFile) -> None:
        """Do not use a published file again until `let_go`."""
        with self._lock:
            self._held.append(file)

    def let_go(self, file: WeightsFile) -> None:
        with self._lock:
            self._held.remove(file)

    def announced(self) -> None:
        """The newest file is announced: older ones may be used again. One spare file is made, more are deleted."""
        with self._lock:
            self._old = len(self._published) - 1
            self._reclaim()
            self._unused += self._free[1:]
            del self._free[1:]
            left, spare = self._leftovers(), bool(self._free)
        _delete_all(left)
        self._delete_unused()
        if not spare and self._making.acquire(blocking=False):
            try:
                self._make()
            finally:
                self._making.release()

    def close(self) -> None:
        """Delete what no searcher uses, except the announced one: searchers that start later may ask for it."""
        with self._lock:
            self._reclaim()
            for file in (*self._free, *self._taken, *self._unused):
                file.delete()
            for file in self._published:
                file.close()
            self._free, self._taken, self._published, self._unused = [], [], [], []
            self._old = 0

    def _leftovers(self, *, keep: int = 0) -> list[Path]:
        """What earlier processes left, except the newest `keep` snapshots. Other processes may use some of it."""
        own = {file.path for file in self._published} | {self._new}
        snapshots = [path for path in self.directory.glob(node_store.SNAPSHOT) if path not in own]
        left = sorted(snapshots, key=node_store.modified_at)
        parts = [path for path in self.directory.glob(f".{node_store.SNAPSHOT}.part") if path not in own]
        # Those that are deleted already are of a process that was killed while it did that.
        return [*left[: len(left) - keep], *parts, *self.directory.glob(node_store.DELETED)]

    def _reclaim(self) -> bool:
        """Free published files that are not needed any more. Returns whether a file is free."""
        for file in self._published[: self._old]:
            if file in self._held:
                continue
            try:
                if not file.take(self._part()):
                    continue
                self._free.append(file)
            except FileNotFoundError as error:
                log.info("snapshot file not used again", reason=str(error))
                self._unused.append(file)
            self._published.remove(file)
            self._old -= 1
        return bool(self._free)

    def _make(self) -> bool:
        """Make a free file, if there is room. The caller holds `_making`."""
        self._delete_unused()
        self.no_room = ""
        with self._lock:
            self._new = self._part()
        try:
            require_space(self.directory, self._layout.bytes, self._floor)
            made = WeightsFile(self._new, self._layout, pinned=self._pinned)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.no_room = f"{self.directory}: {error.strerror}"
            return False
        with self._lock:
            self._free.append(made)
        return True

    def _delete_unused(self) -> None:
        with self._lock:
            unused, self._unused = self._unused, []
        for file in unused:
            file.delete()

    def _part(self) -> Path:
        return self.directory / f".v00000000-{secrets.token_hex(8)}.part"


def _delete_all(paths: Iterable[Path]) -> None:
    """Delete directories of snapshots that no process uses."""
    for path in paths:
        if path.match(node_store.DELETED):
            shutil.rmtree(path, ignore_errors=True)
        else:
            node_store.delete(path)


def _map(path: Path, layout: Layout) -> tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", int]:
    """Create a file with the header of a layout and map it. Returns its bytes, and the number of its inode."""
    with path.open("x+b") as file:
        # With all its blocks: writing to a mapped hole of a full file system would kill the process.
        os.posix_fallocate(file.fileno(), 0, layout.bytes)
        file.write(layout.prefix)
        file.flush()
        mapped = mmap.mmap(file.fileno(), layout.bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return np.frombuffer(mapped, np.uint8), os.fstat(file.fileno()).st_ino
