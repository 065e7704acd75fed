"""The paper's own buffer, written anew from its description: Python lists in the trainer's memory.

Per prompt: identical responses (the same tuple of token ids) once, the newest wins; the newest 100 are kept. A
batch draws prompts uniformly without replacement, then trajectories of each. The paper's code never saves it; the
variant that saves pickles the whole buffer to a new file and renames it.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_worker import (
    BATCH,
    DISTINCT,
    GROUP,
    IDS,
    LOGPROBS,
    PER_PROMPT,
    Opener,
    PeerBuffer,
    count_intact,
    main,
)

CAP = 100  # trajectories of one prompt
SAVED = "buffer.pickle"
Row = tuple[tuple[int, ...], np.ndarray, float, int]  # ids, log-probabilities, reward, policy version


class ListBuffer(PeerBuffer):
    """Prompt -> list of rows, oldest first. The log-probabilities stay arrays: as a list they would take 4x."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / SAVED
        self._prompts: dict[str, list[Row]] = {}
        self._random = np.random.default_rng(0)

    def put(self, first: int) -> int:
        for number in range(first, first + GROUP):
            place = number % DISTINCT
            ids = tuple(IDS[place].tolist())
            rows = self._prompts.setdefault(f"p{number // PER_PROMPT}", [])
            rows[:] = [row for row in rows if row[0] != ids][-(CAP - 1) :]
            rows.append((ids, LOGPROBS[place].copy(), float(number), 0))
        return first + GROUP

    def sample(self) -> tuple[Any, Any]:
        prompts = self._random.choice(list(self._prompts), BATCH // PER_PROMPT, replace=False)
        picked = []
        for prompt in prompts:
            rows = self._prompts[prompt]
            picked += [rows[place] for place in self._random.choice(len(rows), PER_PROMPT, replace=False)]
        return np.array([row[0] for row in picked], np.int32), np.stack([row[1] for row in picked])

    def save(self) -> None:
        new = self._file.with_suffix(".new")
        with new.open("wb") as file:
            pickle.dump(self._prompts, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file)


class ListOpener(Opener):
    """Nothing is on the disk before the first save."""

    def open(self, folder: Path, capacity: int) -> PeerBuffer:  # noqa: ARG002
        return ListBuffer(folder)

    def survivors(self, folder: Path, confirmed: int) -> dict[str, Any]:
        if not (folder / SAVED).exists():
            return {"rows": 0}
        prompts: dict[str, list[Row]] = pickle.loads((folder / SAVED).read_bytes())
        rows = [row for group in prompts.values() for row in group]
        return {"rows": count_intact(((int(reward), ids, lp) for ids, lp, reward, _ in rows), confirmed)}


if __name__ == "__main__":
    main(ListOpener())
