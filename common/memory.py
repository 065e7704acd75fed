"""Telling a lack of memory, which may pass, from all that is wrong with a model's files, which does not."""

import errno
import sys
from collections.abc import Iterator
from typing import Any

from tba.common.errors import ConfigError, MemoryShort, TbaError, first_line

# torch has a class for a GPU's lack of memory. For the CPU's it has words, as have the libraries that map files and
# start threads.
_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory", "bad_alloc", "can't start new thread")


def not_loaded(what: str, error: Exception) -> TbaError:
    """What to raise where a library has not loaded `what`: MemoryShort, or else ConfigError."""
    if out_of_memory(error):
        return MemoryShort(f"out of memory while {what} was loaded")
    return ConfigError(f"{what} cannot be loaded: {first_line(error)}")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory was short."""
    return any(_says_so(one) for one in _chain(error))


def _says_so(error: BaseException) -> bool:
    # Not imported: there is an error of torch's only where torch is loaded, and the core needs none.
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(words in str(error) for words in _WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
