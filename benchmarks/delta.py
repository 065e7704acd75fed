"""Deltas: their size relative to the full snapshot, the cost of each part in memcpys, and the fetch.

Random bf16 weights of 128 and 512 million parameters in tensors of the shapes of a model: normal, of standard deviation
0.02, rounded from float32. The float32 weights walk randomly, by plus or minus one update a step, as AdamW's do: one
step of 2.5e-7, where about 1 % of the rounded weights change, or 16 steps of 1e-6, where about 10 % do.

A memcpy is one `numpy.copyto` of the same bytes, measured again for each part. Both are the best of three, in CPU time
of this process, which other work on the machine disturbs less. The fetch is in wall-clock time.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.table import print_table
from tba.common.clock import SystemClock
from tba.common.system.durable import copy_file, sha256_of
from tba.common.weights import delta
from tba.common.weights.hashing import blake3_of
from tba.common.weights.snapshot_server import SnapshotServer
from tba.common.weights.tensor_file import Tensor, map_tensors
from tba.searcher.weights.fetch import Fetcher
from tba.searcher.weights.progress import Progress
from tba.tests.helpers.weights import WEIGHTS, RandomWeights, write_tensor_file

MILLIONS = (128, 512)
# Size of an update, and steps between two snapshots.
WALKS = ((2.5e-7, 1), (1e-6, 16))
WIDTH = 2048
ROUNDS = 3
# Bytes.
FETCHED = 256 << 20

Weights = dict[str, Tensor]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        rows = [row for millions in MILLIONS for row in deltas(millions, Path(folder))]
        headings = [
            "parameters, changed",
            "full/content",
            "full/sent",
            "build",
            "pack",
            "unpack",
            "copy",
            "patch",
            "check",
        ]
        print_table("deltas: bytes, and times in memcpys of the model", headings, rows)
        headings = ["way", "MB/s", "times as long"]
        print_table(f"{FETCHED >> 20} MiB over loopback", headings, fetches(Path(folder)))


def deltas(millions: int, folder: Path) -> Iterator[list[str]]:
    """Yield a row for each walk: the trainer's work, then the searcher's."""
    count = millions * 10**6 // (4096 * WIDTH)
    old = {f"layer.{n}": walked(n, 0.0, 0) for n in range(count)}
    space = {name: np.empty_like(tensor.bits) for name, tensor in old.items()}
    whole = sum(tensor.bits.nbytes for tensor in old.values())
    write_tensor_file(folder / "old", old)
    for update, steps in WALKS:
        new = {f"layer.{n}": walked(n, update, steps) for n in range(count)}
        changed = sum(np.count_nonzero(old[name].bits != tensor.bits) for name, tensor in new.items())
        built = delta.build_delta(old, new, max_bytes=whole)
        assert built is not None

        def memcpys(part: Callable[[], object], before: Callable[[], object] = lambda: None) -> str:
            clock = time.process_time
            return f"{best(part, before, clock) / best(lambda: copy(old, space), clock=clock):.1f}"

        size = delta.write_delta(folder / delta.FILE, built)
        row = [
            f"{millions} M, {2 * changed / whole:.1%}",
            f"{whole / size:.1f}",
            f"{whole / (folder / delta.FILE).stat().st_size:.1f}",
            memcpys(lambda new=new: delta.build_delta(old, new, max_bytes=whole)),
            memcpys(lambda built=built: delta.write_delta(folder / delta.FILE, built)),
            memcpys(lambda size=size: delta.unpack_delta(folder / delta.FILE, folder / "delta", size)),
            memcpys(
                lambda: copy_file(folder / "old", folder / "new"),
                before=lambda: unlinked(folder / "new"),
            ),
            memcpys(
                lambda: delta.apply_delta(folder / "delta", map_tensors(folder / "new", writable=True)),
                before=lambda: copy_file(folder / "old", unlinked(folder / "new")),
            ),
            memcpys(lambda: blake3_of(folder / "new")),
        ]
        mapped = map_tensors(folder / "new")
        assert all(np.array_equal(tensor.bits, mapped[name].bits) for name, tensor in new.items())
        yield row


def walked(seed: int, update: float, steps: int) -> Tensor:
    """Return a tensor after a random walk of its float32 weights, rounded to bf16."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(4096 * WIDTH, dtype=np.float32) * np.float32(0.02)
    if steps:
        # The sum of that many signs.
        signs = 2 * rng.binomial(steps, 0.5, len(weights)).astype(np.float32) - steps
        weights += np.float32(update) * signs
    bits = weights.view(np.uint32)
    # To the nearest, ties to even.
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return Tensor("BF16", (4096, WIDTH), rounded.astype(np.uint16))


def unlinked(path: Path) -> Path:
    """Delete a file, and return its path."""
    path.unlink(missing_ok=True)
    return path


def copy(weights: Weights, space: dict[str, np.ndarray]) -> None:
    """Make the memcpy that everything else is compared with."""
    for name, tensor in weights.items():
        np.copyto(space[name], tensor.bits)


def best(
    part: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = ROUNDS,
) -> float:
    """Return the seconds of the fastest of a few rounds."""
    seconds = []
    for _ in range(rounds):
        before()
        started = clock()
        part()
        seconds.append(clock() - started)
    return min(seconds)


def fetches(folder: Path) -> list[list[str]]:
    """Time copies through a bare TCP connection, 2 MiB at a time, and by the searcher's fetch, alternating."""
    server = SnapshotServer("tcp://127.0.0.1:*", folder / "snapshots")
    trainer = RandomWeights(folder / "snapshots", elements=FETCHED // 2, address=server.address)
    ref, target = trainer.full(), folder / "fetched"
    fetcher = Fetcher(server.address, SystemClock(), Progress())
    seconds: dict[str, list[float]] = {"a plain socket into a file": [], "tba": [], "tba, with the hash checked": []}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2 * ROUNDS):
            target.unlink(missing_ok=True)
            plain = best(lambda: through(listener, trainer.path(0, WEIGHTS), target), rounds=1)
            target.unlink()
            fetch = best(lambda: fetcher.fetch(ref.version, WEIGHTS, target), rounds=1)
            check = best(lambda: sha256_of(target), rounds=1)
            for times, value in zip(seconds.values(), (plain, fetch, fetch + check), strict=True):
                times.append(value)
    assert target.read_bytes() == trainer.truth[0]
    fetcher.close()
    server.close()
    plain = min(seconds["a plain socket into a file"])
    return [[way, f"{FETCHED / min(t) / 1e6:,.0f}", f"{min(t) / plain:.2f}"] for way, t in seconds.items()]


def through(listener: socket.socket, source: Path, target: Path) -> None:
    """Copy a file over one connection, which is read to its end."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, source.open("rb", buffering=0) as file:
            while chunk := file.read(2 << 20):
                connection.sendall(chunk)

    thread = threading.Thread(target=serve)
    thread.start()
    buffer = memoryview(bytearray(2 << 20))
    with socket.create_connection(listener.getsockname()) as connection, target.open("wb", buffering=0) as file:
        while received := connection.recv_into(buffer):
            file.write(buffer[:received])
    thread.join()


if __name__ == "__main__":
    main()
