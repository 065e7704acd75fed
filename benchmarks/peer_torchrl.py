"""TorchRL: a ReplayBuffer over LazyMemmapStorage, in the process that puts and samples.

The arrays are files mapped into memory, of a fixed width and of a capacity chosen beforehand; pages reach the disk
when the kernel likes. How many rows there are is known to the process alone until `dumps` writes it down, which is
cheap if the storage lies where `dumps` would put it, as its documentation recommends.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer

from benchmarks.peer_worker import (
    BATCH,
    CAPACITY,
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

logging.getLogger("torchrl").setLevel(logging.ERROR)
STORAGE = "storage"  # where `dumps` keeps the storage in its folder


class TorchrlBuffer(PeerBuffer):
    """Rows of fixed width; the prompt is its number, because a mapped file holds no strings."""

    packages = ("torchrl", "tensordict", "torch", "numpy")

    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder = folder
        self._ids, self._logprobs = torch.from_numpy(IDS), torch.from_numpy(LOGPROBS)
        self.replay = _replay(folder, capacity)

    def put(self, first: int) -> int:
        place = slice(first % DISTINCT, first % DISTINCT + GROUP)
        number = torch.arange(first, first + GROUP)
        rows = {
            "ids": self._ids[place],
            "logprobs": self._logprobs[place],
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


class TorchrlOpener(Opener):
    """What `loads` gives back; where nothing was dumped, also what the bare files hold."""

    def open(self, folder: Path, capacity: int) -> PeerBuffer:
        return TorchrlBuffer(folder, capacity)

    def survivors(self, folder: Path, confirmed: int) -> dict[str, Any]:
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
    main(TorchrlOpener())
