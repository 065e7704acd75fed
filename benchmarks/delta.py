"""Weights on their way: deltas and adapters against the full snapshot in bytes, their parts in memcpys, and the fetch.

Random bf16 weights of 128 and 512 million parameters in tensors of the shapes of a model; 1 % or 25 % of the elements
differ, or each tensor has an adapter of rank 16. A memcpy is one `numpy.copyto` of the same bytes, measured anew for
each part; both are the best of three, in CPU time of this process, which other work on the machine disturbs less. The
fetch is in wall-clock time.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.table import print_table
from tba.common import adapter, delta
from tba.common.clock import SystemClock
from tba.common.durable import copy_file, sha256_of
from tba.common.low_rank import Factors, merge
from tba.common.tensor_file import Tensor, map_tensors, read_layout, sha256_of_tensors, write_tensor_file
from tba.searcher.fetch import Fetcher
from tba.tests.weights_lab import WEIGHTS, RandomWeights
from tba.trainer.serve import SnapshotServer

MILLIONS = (128, 512)
CHANGED = (0.01, 0.25)
WIDTH = 2048
ROUNDS = 3
RANK = 16
THREADS = 2
FETCHED = 256 << 20  # bytes

Weights = dict[str, Tensor]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        rows = [row for millions in MILLIONS for row in deltas(millions, Path(folder))]
        headings = ["parameters, changed", "full/delta", "build", "write", "hash result", "copy", "patch", "check"]
        print_table("deltas: bytes, and times in memcpys of the model", headings, rows)
        rows = [adapters(millions, Path(folder)) for millions in MILLIONS]
        headings = ["parameters, rank", "full/adapter", "merge", "write", "hash result", "copy", "merge", "check"]
        title = "adapters: bytes, and times in memcpys of the model"
        print_table(title, [*headings, "by matmul", f"{THREADS} threads, wall clock"], rows)
        headings = ["way", "MB/s", "times as long"]
        print_table(f"{FETCHED >> 20} MiB over loopback", headings, fetches(Path(folder)))


def deltas(millions: int, folder: Path) -> Iterator[list[str]]:
    """A row for each share of changed elements: what the trainer does, then what the searcher does."""
    rng = np.random.default_rng(0)
    old = {
        f"layer.{n}": Tensor("BF16", (4096, WIDTH), rng.integers(0, 1 << 16, 4096 * WIDTH, dtype=np.uint16))
        for n in range(millions * 10**6 // (4096 * WIDTH))
    }
    space = {name: np.empty_like(tensor.bits) for name, tensor in old.items()}
    whole = sum(tensor.bits.nbytes for tensor in old.values())
    write_tensor_file(folder / "old", old)
    layout = read_layout(folder / "old")
    for changed in CHANGED:
        new = {name: replace(tensor, bits=flipped(tensor.bits, changed, rng)) for name, tensor in old.items()}
        built = delta.build_delta(old, new, most_bytes=whole)
        assert built is not None

        def memcpys(part: Callable[[], object], before: Callable[[], object] = lambda: None) -> str:
            clock = time.process_time
            return f"{best(part, before, clock) / best(lambda: copy(old, space), clock=clock):.1f}"

        row = [
            f"{millions} M, {changed:.0%}",
            f"{whole / sum(tensor.bits.nbytes for tensor in built.values()):.1f}",
            memcpys(lambda new=new: delta.build_delta(old, new, most_bytes=whole)),
            memcpys(lambda built=built: write_tensor_file(folder / delta.FILE, built)),
            memcpys(lambda new=new: sha256_of_tensors(layout, new)),
            memcpys(
                lambda: copy_file(folder / "old", folder / "new"),
                before=lambda: (folder / "new").unlink(missing_ok=True),
            ),
            memcpys(lambda: delta.apply_delta(folder / delta.FILE, map_tensors(folder / "new", writable=True))),
            memcpys(lambda: sha256_of_tensors(layout, map_tensors(folder / "new"))),
        ]
        mapped = map_tensors(folder / "new")
        assert all(np.array_equal(tensor.bits, mapped[name].bits) for name, tensor in new.items())
        yield row


def adapters(millions: int, folder: Path) -> list[str]:
    """What the trainer does, what the searcher does, a merge by matrix products, and what a second thread gains."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    names = [f"layer.{n}" for n in range(millions * 10**6 // (4096 * WIDTH))]
    base = {name: Tensor("BF16", (4096, WIDTH), normal(rng, 4096, WIDTH).view("<u4") >> 16) for name in names}
    base = {name: replace(tensor, bits=tensor.bits.reshape(-1).astype("<u2")) for name, tensor in base.items()}
    factors = {
        name: Factors(normal(rng, RANK, WIDTH), 1e-3 * normal(rng, 4096, RANK), np.float32(2.0)) for name in names
    }
    into = {name: replace(tensor, bits=np.empty_like(tensor.bits)) for name, tensor in base.items()}
    space = {name: np.empty_like(tensor.bits) for name, tensor in base.items()}
    for file in ("old", "new"):
        (folder / file).unlink(missing_ok=True)
    write_tensor_file(folder / "old", base)
    layout, tensors = read_layout(folder / "old"), adapter.tensors_of(factors)

    def memcpys(part: Callable[[], object], before: Callable[[], object] = lambda: None) -> str:
        clock = time.process_time
        return f"{best(part, before, clock) / best(lambda: copy(base, space), clock=clock):.1f}"

    def fresh() -> None:
        (folder / "new").unlink(missing_ok=True)
        copy_file(folder / "old", folder / "new")

    row = [
        f"{millions} M, {RANK}",
        f"{sum(one.bits.nbytes for one in base.values()) / sum(one.bits.nbytes for one in tensors.values()):.1f}",
        memcpys(lambda: merge(base, factors, into, threads=1)),
        memcpys(lambda: write_tensor_file(folder / adapter.FILE, tensors)),
        memcpys(lambda: sha256_of_tensors(layout, into)),
        memcpys(
            lambda: copy_file(folder / "old", folder / "new"), before=lambda: (folder / "new").unlink(missing_ok=True)
        ),
        memcpys(
            lambda: adapter.apply_adapter(folder / adapter.FILE, map_tensors(folder / "new", writable=True), threads=1),
            before=fresh,
        ),
        memcpys(lambda: sha256_of_tensors(layout, map_tensors(folder / "new"))),
    ]
    mapped = map_tensors(folder / "new")
    assert all(np.array_equal(tensor.bits, mapped[name].bits) for name, tensor in into.items())
    row.append(memcpys(lambda: by_matmul(base, factors, into)))
    seconds = [best(lambda n=n: merge(base, factors, into, threads=n)) for n in (1, THREADS)]
    return [*row, f"1/{seconds[0] / seconds[1]:.1f}"]


def by_matmul(base: Weights, factors: dict[str, Factors], into: Weights) -> None:
    """The merge that nobody defines the bits of."""
    for name, factor in factors.items():
        weight, target = (
            torch.from_numpy(one[name].bits.view(np.int16)).view(torch.bfloat16).view(one[name].shape)
            for one in (base, into)
        )
        product = torch.from_numpy(factor.high) @ torch.from_numpy(factor.low)
        target.copy_(product.mul_(float(factor.scaling)).add_(weight))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers of the size of weights."""
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)


def flipped(bits: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The bits with the lowest one of a share of the elements turned round."""
    return np.where(rng.random(len(bits), dtype=np.float32) < share, bits ^ np.uint16(1), bits)


def copy(weights: Weights, space: dict[str, np.ndarray]) -> None:
    """The memcpy that everything is compared with."""
    for name, tensor in weights.items():
        np.copyto(space[name], tensor.bits)


def best(
    part: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = ROUNDS,
) -> float:
    """Seconds of the fastest of a few rounds."""
    seconds = []
    for _ in range(rounds):
        before()
        started = clock()
        part()
        seconds.append(clock() - started)
    return min(seconds)


def fetches(folder: Path) -> list[list[str]]:
    """From file to file through a bare TCP connection, 2 MiB at a time, and by the searcher's fetch; in turns."""
    server = SnapshotServer("tcp://127.0.0.1:*", folder / "snapshots")
    trainer = RandomWeights(folder / "snapshots", elements=FETCHED // 2, address=server.address)
    ref, target = trainer.full(), folder / "fetched"
    fetcher = Fetcher(server.address, SystemClock(), wanted=lambda: True, tell=lambda _: None)
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
    """One connection, read to its end."""

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
