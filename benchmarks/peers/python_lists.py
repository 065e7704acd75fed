"""The paper's buffer, written from its description: Python lists in the trainer's memory.

Of identical responses to a prompt (the same token ids) only the newest is kept, and at most the newest 100 per prompt.
A batch draws prompts uniformly without replacement, then trajectories of each. The paper's code never saves the buffer;
the variant that saves pickles all of it to a new file, which it then renames.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.worker import (
    BATCH,
    DISTINCT,
    GROUP,
    IDS,
    LOGPROBS,
    PER_PROMPT,
    PeerBuffer,
    count_intact,
    main,
)

MAX_PER_PROMPT = 100
FILE = "buffer.pickle"
# Token ids, log-probabilities, reward, policy version.
Row = tuple[tuple[int, ...], np.ndarray, float, int]


class ListBuffer(PeerBuffer):
    """Prompt -> list of rows, oldest first. Log-probabilities stay arrays: as lists they would need 4x the memory."""

    def __init__(self, folder: Path, _: int) -> None:
        self._file = folder / FILE
        self._prompts: dict[str, list[Row]] = {}
        self._random = np.random.default_rng(0)

    def put(self, first: int) -> int:
        for number in range(first, first + GROUP):
            data = number % DISTINCT
            ids = tuple(IDS[data].tolist())
            rows = self._prompts.setdefault(f"p{number // PER_PROMPT}", [])
            rows[:] = [row for row in rows if row[0] != ids][-(MAX_PER_PROMPT - 1) :]
            rows.append((ids, LOGPROBS[data].copy(), float(number), 0))
        return first + GROUP

    def sample(self) -> tuple[Any, Any]:
        drawn = []
        for prompt in self._random.choice(list(self._prompts), BATCH // PER_PROMPT, replace=False):
            rows = self._prompts[prompt]
            drawn += [rows[n] for n in self._random.choice(len(rows), PER_PROMPT, replace=False)]
        return np.array([row[0] for row in drawn], np.int32), np.stack([row[1] for row in drawn])

    def save(self) -> None:
        new = self._file.with_suffix(".new")
        with new.open("wb") as file:
            pickle.dump(self._prompts, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file)


def survivors(folder: Path, confirmed: int) -> dict[str, Any]:
    """Count the rows in the last pickle. Without a save there is no file."""
    if not (folder / FILE).exists():
        return {"rows": 0}
    prompts: dict[str, list[Row]] = pickle.loads((folder / FILE).read_bytes())
    rows = [row for group in prompts.values() for row in group]
    return {"rows": count_intact(((int(reward), ids, lp) for ids, lp, reward, _ in rows), confirmed)}


if __name__ == "__main__":
    main(ListBuffer, survivors)
