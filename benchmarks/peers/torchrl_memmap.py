"""TorchRL: a ReplayBuffer over LazyMemmapStorage, in the process that puts and samples.

The arrays are memory-mapped files of a fixed width and a capacity chosen beforehand; the kernel decides when pages
reach the disk. The number of rows is only in the process until `dumps` writes it, which is cheap if the storage is in
the folder where `dumps` would write it, as its documentation recommends.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer

from benchmarks.peers.worker import (
    BATCH,
    CAPACITY,
    DISTINCT,
    GROUP,
    IDS,
    LOGPROBS,
    PER_PROMPT,
    PeerBuffer,
    count_intact,
    main,
)

logging.getLogger("torchrl").setLevel(logging.ERROR)
# The subfolder in which `dumps` expects the storage.
STORAGE = "storage"


class TorchrlBuffer(PeerBuffer):
    """Rows of fixed width; the prompt is a number, because a mapped file contains no strings."""

    packages = ("torchrl", "tensordict", "torch", "numpy")

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._ids, self._logprobs = torch.from_numpy(IDS), torch.from_numpy(LOGPROBS)
        self.replay = _replay(folder, capacity)

    def put(self, first: int) -> int:
        data = slice(first % DISTINCT, first % DISTINCT + GROUP)
        number = torch.arange(first, first + GROUP)
        rows = {
            "ids": self._ids[data],
            "logprobs": self._logprobs[data],
            "prompt": number // PER_PROMPT,
            "reward": number.float(),
            "version": torch.zeros_like(number),
        }
        self.replay.extend(TensorDict(rows, batch_size=[GROUP]))
        return first + GROUP

    def sample(self) -> tuple[Any, Any]:
        batch = self.replay.sample(BATCH)
        return batch["ids"], batch["logprobs"]

    def save(self) -> None:
        self.replay.dumps(self._folder)


def survivors(folder: Path, confirmed: int) -> dict[str, Any]:
    """Count the rows that `loads` returns; without a dump, also those in the bare files."""
    if not (folder / STORAGE / "storage_metadata.json").exists():
        bare = TensorDict.load_memmap(folder / STORAGE)
        return {"rows": 0, "in_files": count_intact(_rows(bare[: confirmed + GROUP]), confirmed)}
    replay = _replay(folder, CAPACITY)
    replay.loads(folder)
    return {"rows": count_intact(_rows(replay[:]), confirmed)}


def _replay(folder: Path, capacity: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder / STORAGE, existsok=True))


def _rows(table: TensorDict) -> Any:
    return zip(table["reward"].tolist(), table["ids"].numpy(), table["logprobs"].numpy(), strict=True)


if __name__ == "__main__":
    main(TorchrlBuffer, survivors)
