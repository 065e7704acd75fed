"""The cost of the spool for a searcher whose buffer keeps up: each put is written to disk and acknowledged soon after.

The spool (`searcher/delivery/spool.py`) is in a temporary directory on this disk. It is compared with the cost of a put
without it (columns, message, encoding), and with a bare write of the same bytes to a file.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.table import print_table
from tba.common.wire import messages
from tba.common.wire.codec import encode_request
from tba.common.wire.trajectory import Trajectory, pack
from tba.searcher.delivery.spool import Owner, Spool

ROUNDS = 15
BARE_FILE_BYTES = 8 << 20
# Responses of a group, tokens of each.
SHAPES = ((4, 6), (24, 64), (24, 512), (24, 4096))


def main() -> None:
    headings = ["group", "KiB", "encode us", "spool us", "bare write us", "spool / encode", "spool / write"]
    print_table("a put of a searcher, medians", headings, [_row(*shape) for shape in SHAPES])


def _row(samples: int, tokens: int) -> list[str]:
    group = [_trajectory(tokens) for _ in range(samples)]
    frames = _encoded(group)
    size = sum(map(len, frames))
    count = max(5, min(500, (64 << 20) // size))
    with tempfile.TemporaryDirectory(prefix="tba-bench-") as folder:
        spool = Spool(Path(folder), Owner("r", "run", "s", "h"), limit_bytes=512 << 20)
        file = os.open(Path(folder) / "bare", os.O_WRONLY | os.O_CREAT)
        encode, spooled, bare = [], [], []
        offsets, ids = itertools.count(0, size), itertools.count()

        def spool_one() -> None:
            id_ = next(ids)
            spool.append(id_, frames)
            spool.acknowledge(id_)

        for _ in range(ROUNDS):
            encode.append(_seconds(lambda: _encoded(group), count))
            spooled.append(_seconds(spool_one, count))
            bare.append(_seconds(lambda: os.pwritev(file, frames, next(offsets) % BARE_FILE_BYTES), count))
        os.close(file)
        spool.close()
    costs = [statistics.median(seconds) for seconds in (encode, spooled, bare)]
    shown = [f"{1e6 * seconds:,.0f}" for seconds in costs]
    ratios = [f"{costs[1] / costs[0]:.2f}", f"{costs[1] / costs[2]:.2f}"]
    return [f"{samples} x {tokens}", f"{size / 1024:,.0f}", *shown, *ratios]


def _seconds(work: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - started) / count


def _encoded(group: list[Trajectory]) -> list[bytes]:
    columns, arrays = pack(group)
    message = messages.PutTrajectories(first_sequence=0, rows=messages.Rows(**columns))
    return encode_request(message, id=1, role="searcher", sender="s", run="r" * 32, frames=arrays)


def _trajectory(tokens: int) -> Trajectory:
    return Trajectory(
        prompt_key="p0",
        lease=1,
        prompt_ids=np.arange(64, dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_runs=np.array([[0, tokens]], np.int32),
        reward=1.0,
        reward_parts={"correct": 1.0},
        stop_reason="eos",
        sampling={"temperature": 1.0, "top_p": 1.0},
        created_at=0.0,
        generation_seconds=0.0,
        text="word " * tokens,
    )


if __name__ == "__main__":
    main()
