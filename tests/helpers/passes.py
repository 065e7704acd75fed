"""Passes over the weights: the bytes that a block copies, widens, hashes, writes and syncs, by kind.

The primitives through which weights pass in this package are wrapped and do their work as always.
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tba.common.system import durable
from tba.common.weights import snapshot
from tba.trainer.publishing import snapshot_writer


def _size(path: Path, *_: Any) -> int:
    return path.stat().st_size if path.is_file() else 0


# Owner and name of a function, what it does, and the bytes of a call.
_PRIMITIVES: tuple[tuple[Any, str, str, Callable[..., int]], ...] = (
    (torch.Tensor, "copy_", "copied", lambda target, *_: target.nbytes),
    (torch.Tensor, "float", "widened", lambda tensor: tensor.nbytes),
    (snapshot, "blake3_of", "hashed", _size),
    (snapshot_writer, "blake3_of_bytes", "hashed", lambda content: content.nbytes),
    (Path, "write_bytes", "written", lambda _, content: len(content)),
    (os, "copy_file_range", "written", lambda source, *_: os.fstat(source).st_size),
    (durable, "sync", "synced", _size),
)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes that pass in the block, in all threads of the process."""
    passed: Counter[str] = Counter()

    def counting(real: Callable[..., Any], kind: str, size: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any, **named: Any) -> Any:
            passed[kind] += size(*arguments)
            return real(*arguments, **named)

        return call

    with contextlib.ExitStack() as wrapped:
        for owner, name, kind, size in _PRIMITIVES:
            wrapped.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name), kind, size)))
        yield passed
