"""The web interface on a large buffer: the time of each page at the server.

    python -m benchmarks.pages [--rows 1000000] [--keep FOLDER]

The database is that of `benchmarks.scale`, with the batches that it samples, short texts and their full-text index.
Each page is rendered five times in this process, without a network, with a warm file cache. *No row matches* is the
most expensive filter: the whole budget of time passes, and the page links to the rest of the search.
"""

import argparse
import contextlib
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from starlette.testclient import TestClient

from benchmarks import scale, serving
from benchmarks.table import print_table
from tba.buffer.tools.search import index_path, search
from tba.ui.app import make_app

_REPEATS = 5
_PAGES = {
    "run": "/r/run",
    "changes, polled": "/r/run/live",
    "charts": "/r/run/charts.json",
    "steps": "/r/run/steps",
    "step of 512 slots": "/r/run/steps/50",
    "prompts": "/r/run/prompts",
    "prompts: never solved": "/r/run/prompts?kind=never",
    "prompt": "/r/run/prompts/1000",
    "trajectory": "/r/run/trajectories/{middle}",
    "compare": "/r/run/compare?a={middle}&b=7",
    "waste": "/r/run/waste",
    "waste: charts": "/r/run/waste.json",
    "compare two runs": "/r/run/compare?kind=runs&b=run",
    "trajectories": "/r/run/trajectories",
    "by reward": "/r/run/trajectories?reward_min=0.4&reward_max=0.6&sort=best",
    "by step": "/r/run/trajectories?step=50",
    "by version": "/r/run/trajectories?version=0",
    "by prompt": "/r/run/trajectories?prompt=1000",
    "by searcher": "/r/run/trajectories?searcher=1",
    "deep page": "/r/run/trajectories?sort=best&after=0.5%3A{middle}",
    "words of every row": "/r/run/trajectories?text=answer",
    "words of one row": "/r/run/trajectories?text=answer+number{middle}",
    "words and no length": "/r/run/trajectories?text=answer&length_min=100000",
    "no row matches: words": "/r/run/trajectories?text=even+odd",
    "no row matches: trained": "/r/run/trajectories?trained=yes&sort=oldest&length_min=100000",
    "no row matches: error": "/r/run/trajectories?error=yes",
    "no row matches: length": "/r/run/trajectories?length_min=100000",
    "no row matches: part": "/r/run/trajectories?part=none&sort=worst",
}


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as scratch:
        directory = scale.made((options.keep or Path(scratch)) / f"rows{options.rows}", options.rows)
        browser = TestClient(make_app([directory]), base_url="http://127.0.0.1")
        if browser.get("/r/run/steps/50").status_code != 200:
            with serving.serving(directory) as (_, address):
                scale.batch_ms(address)
        _index_texts(directory / "buffer.sqlite")
        rows = []
        for name, address in _PAGES.items():
            times, cpu, size = _measure(browser, address.format(middle=options.rows // 2))
            figures = (statistics.median(times), max(times), statistics.median(cpu), size / 1024)
            rows.append([name, *(f"{figure:.0f}" for figure in figures)])
    print_table(f"pages over {options.rows:,} rows", ["page", "median ms", "max ms", "CPU ms", "KiB"], rows)


def _index_texts(database: Path) -> None:
    """Give every response a text and make the full-text index, unless it is there."""
    if index_path(database).exists():
        return
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "UPDATE trajectory_rows SET text = 'answer number' || id || iif(id % 2, ' odd', ' even') WHERE text IS NULL"
        )
    search(database, "answer", limit=1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the pages of the web interface on a large buffer")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the buffer")
    parser.add_argument("--keep", type=Path, help="folder for the database, kept")
    return parser.parse_args()


def _measure(browser: TestClient, address: str) -> tuple[list[float], list[float], int]:
    """Return the milliseconds of each request, those of CPU time in it, and the bytes of the page."""
    times, cpu = [], []
    for _ in range(_REPEATS):
        started, used = time.perf_counter(), time.process_time()
        reply = browser.get(address)
        times.append(1000 * (time.perf_counter() - started))
        cpu.append(1000 * (time.process_time() - used))
        assert reply.status_code == 200, f"{address}: {reply.status_code}"
    return times, cpu, len(reply.content)


if __name__ == "__main__":
    main()
