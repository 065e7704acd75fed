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
from pathlib import Path

from starlette.testclient import TestClient

from benchmarks import scale
from benchmarks.harness import Seconds, print_table, timed
from benchmarks.serving import Server
from tba.buffer.tools.search import index_path, search
from tba.ui.app import make_app

_REPEATS = 5
_PAGES = {
    "run": "/r/run",
    "changes, polled": "/r/run/live",
    "steps": "/r/run/steps",
    "step of 512 slots": "/r/run/steps/50",
    "prompts": "/r/run/prompts",
    "prompts: never solved": "/r/run/prompts?kind=never",
    "trajectory": "/r/run/trajectories/{middle}",
    "waste": "/r/run/waste",
    "waste: charts": "/r/run/waste.json",
    "trajectories": "/r/run/trajectories",
    "by reward": "/r/run/trajectories?reward_min=0.4&reward_max=0.6&sort=best",
    "by step": "/r/run/trajectories?step=50",
    "by version": "/r/run/trajectories?version=0",
    "words of every row": "/r/run/trajectories?text=answer",
    "words of one row": "/r/run/trajectories?text=answer+number{middle}",
    "no row matches: words": "/r/run/trajectories?text=even+odd",
    "no row matches: trained": "/r/run/trajectories?trained=yes&sort=oldest&length_min=100000",
    "no row matches: error": "/r/run/trajectories?error=yes",
    "no row matches: length": "/r/run/trajectories?length_min=100000",
    "no row matches: part": "/r/run/trajectories?part=none&sort=worst",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the buffer")
    parser.add_argument("--keep", type=Path, help="folder for the database, kept")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as scratch:
        directory = scale.made((options.keep or Path(scratch)) / f"rows{options.rows}", options.rows)
        browser = TestClient(make_app([directory]), base_url="http://127.0.0.1")
        if browser.get("/r/run/steps/50").status_code != 200:
            with Server(directory) as server:
                scale.batch_ms(server)
        _index_texts(directory / "buffer.sqlite")
        for name, address in _PAGES.items():
            seconds = _measured(browser, address.format(middle=options.rows // 2))
            wall, cpu = zip(*seconds, strict=True)
            rows.append(
                [name, *(f"{1000 * one:.0f}" for one in (statistics.median(wall), max(wall), statistics.median(cpu)))]
            )
    print_table(f"pages over {options.rows:,} rows", ["page", "median ms", "max ms", "CPU ms"], rows)


def _index_texts(database: Path) -> None:
    """Give every response a text and make the full-text index, unless it is there."""
    if index_path(database).exists():
        return
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "UPDATE trajectory_rows SET text = 'answer number' || id || iif(id % 2, ' odd', ' even') WHERE text IS NULL"
        )
    search(database, "answer", limit=1)


def _measured(browser: TestClient, address: str) -> list[Seconds]:
    found = [timed(lambda: browser.get(address)) for _ in range(_REPEATS)]
    assert {reply.status_code for _, reply in found} == {200}, address
    return [seconds for seconds, _ in found]


if __name__ == "__main__":
    main()
