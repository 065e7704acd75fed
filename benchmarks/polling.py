"""What ingest costs more while a page of `tba ui` follows the run, in pairs.

    python -m benchmarks.polling [--pairs 8] [--rows 60000]

A producer puts rows into a real server, a block without a page and a block with one by turns, in changing order. The
page is that of a run: `tba ui` in a process of its own, asked every 2 s for what has changed and then for the charts,
as a browser does.

- *rows per CPU second*: of the server process, while it takes rows as fast as it can. On a busy machine single blocks
  differ by a tenth; the standard error says what the pairs settle.
- *idle*: CPU time of the server without rows, in percent of a core. This is what the page itself asks of it.
- *rows per second*: on the wall clock. On a machine without a free core it includes that of `tba ui` itself.
"""

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks import scale, serving
from benchmarks.table import print_table

_POLL_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
_IDLE_SECONDS = 10.0
_IDLE_BLOCKS = 3


def main() -> None:
    options = _options()
    with (
        tempfile.TemporaryDirectory(prefix="tba-bench-") as scratch,
        serving.serving(Path(scratch), "run.name=run") as (process, address),
    ):
        serving.prepare(address, -(-options.rows // scale.PER_PROMPT))
        server = psutil.Process(process.pid)
        # The first block fills caches.
        _block(server, address, options.rows)
        pairs = [_pair(server, address, Path(scratch), options.rows, number) for number in range(options.pairs)]
        idle = [_idle(server, Path(scratch), is_polled) for is_polled in (False, True) * _IDLE_BLOCKS]
    rows = []
    for name, column in (("rows per CPU second of the server", 0), ("rows per second", 1)):
        without, with_page = ([pair[kind][column] for pair in pairs] for kind in (0, 1))
        ratios = [new / old for old, new in zip(without, with_page, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        figures = (statistics.median(without), statistics.median(with_page))
        rows.append([name, *(f"{one:,.0f}" for one in figures), f"{statistics.median(ratios):.3f}", f"{error:.3f}"])
    print_table(
        "idle, % of a core", ["without", "with a page"], [[f"{statistics.mean(idle[kind::2]):.2f}" for kind in (0, 1)]]
    )
    headings = ["", "without", "with a page", "median ratio", "standard error"]
    print_table(f"{options.pairs} pairs of {options.rows:,} rows", headings, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ingest with and without a page that follows the run")
    parser.add_argument("--pairs", type=int, default=8, help="blocks with and without a page")
    parser.add_argument("--rows", type=int, default=60_000, help="rows of a block")
    return parser.parse_args()


def _pair(
    server: psutil.Process, address: str, directory: Path, rows: int, number: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the figures of a block without a page and of one with a page; the order changes from pair to pair."""
    figures = {}
    for is_polled in ((False, True), (True, False))[number % 2]:
        with _page(directory) if is_polled else contextlib.nullcontext():
            figures[is_polled] = _block(server, address, rows)
    return figures[False], figures[True]


def _block(server: psutil.Process, address: str, rows: int) -> tuple[float, float]:
    """Put rows. Returns the rows per CPU second of the server and per second."""
    used, started = _cpu_seconds(server), time.perf_counter()
    scale.fill(address, rows)
    seconds, cpu = time.perf_counter() - started, _cpu_seconds(server) - used
    return rows / cpu, rows / seconds


def _idle(server: psutil.Process, directory: Path, is_polled: bool) -> float:
    """Return the CPU time of the server without rows, in percent of a core."""
    with _page(directory) if is_polled else contextlib.nullcontext():
        used, started = _cpu_seconds(server), time.perf_counter()
        time.sleep(_IDLE_SECONDS)
        return 100 * (_cpu_seconds(server) - used) / (time.perf_counter() - started)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _page(directory: Path) -> Iterator[None]:
    """Follow the run with a page for the block."""
    port = serving.free_address().rpartition(":")[2]
    command = [sys.executable, "-m", "tba", "ui", str(directory), "--port", port]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    base, stop = f"http://127.0.0.1:{port}", threading.Event()
    try:
        # Before the block starts, so that it is not the start of Python that is measured.
        live = _first(base)
        follower = threading.Thread(target=_follow, args=(base, live, stop))
        follower.start()
        yield
        stop.set()
        follower.join()
    finally:
        process.terminate()
        process.wait()


def _first(base: str) -> str:
    """Wait until the page opens. Returns the address that it polls."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return _polled(_read(f"{base}/r/run"))
        except OSError:
            assert time.monotonic() < deadline, "`tba ui` does not answer"
            time.sleep(0.1)


def _follow(base: str, live: str, stop: threading.Event) -> None:
    _read(f"{base}/r/run/charts.json")
    while not stop.wait(_POLL_SECONDS):
        if changed := _read(base + live):
            live = _polled(changed)
            _read(f"{base}/r/run/charts.json")


def _polled(page: str) -> str:
    found = re.search(r'hx-get="([^"]*)"', page)
    assert found, "the page polls nothing"
    return found[1]


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=_PATIENCE_SECONDS) as reply:
        text: str = reply.read().decode()
    return text


if __name__ == "__main__":
    main()
