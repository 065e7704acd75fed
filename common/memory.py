"""Loading models: telling a lack of memory, which may pass, from all that is wrong with their files, which does not."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Any

from tba.common.errors import ConfigError, MemoryShort, TbaError, first_line

# torch has a class for a GPU's lack of memory. For the CPU's it has words, as have the libraries that map files and
# start threads.
_WORDS = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "bad_alloc",
    "can't start new thread",
    "error: out of memory",
)
# How torch begins what a GPU's driver says.
_DRIVER_WORDS = "CUDA error: "


@contextlib.contextmanager
def loading(what: str, device: object = "cpu") -> Iterator[None]:
    """Load a model, or a part of one, from files to a device (whose `str` is its name) with libraries of Hugging Face.

    Raises MemoryShort, or ConfigError for what does not pass by itself, with a sentence. A fault of the GPU, which may,
    stays what it is, as does all that is raised for other reasons.
    """
    # Not at the top: the core needs no such library.
    from safetensors import SafetensorError

    try:
        yield
    except (MemoryError, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if str(error).startswith(_DRIVER_WORDS) and not out_of_memory(error):
            raise
        raise not_loaded(what, error, device) from error


def not_loaded(what: str, error: Exception, device: object = "cpu") -> TbaError:
    """What to raise where a library has not loaded `what`: MemoryShort, or else ConfigError."""
    if out_of_memory(error):
        return MemoryShort(
            f"out of memory while {what} was loaded on {device} ({first_line(error)}): end what else takes its memory, "
            "or take a smaller model"
        )
    return ConfigError(
        f"{what} cannot be loaded: {first_line(error)}: see that its files are complete, and that the installed "
        "transformers knows such models"
    )


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
