"""Errors of loading a model: a lack of memory, which may pass, or faulty files, which stay faulty."""

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Any

from tba.common.errors import ConfigError, OutOfMemory, TbaError, first_line

# torch raises OutOfMemoryError for GPU memory only, of which vLLM's workers report the text. On a CPU, torch and the
# libraries that map files and start threads raise general errors with these texts.
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "bad_alloc",
    "can't start new thread",
    "error: out of memory",
    "CUDA out of memory",
)
# The start of torch's message for an error of the GPU driver.
_DRIVER_ERROR = "CUDA error: "


@contextlib.contextmanager
def loading(what: str, device: object = "cpu") -> Iterator[None]:
    """Turn errors of loading `what` into OutOfMemory or ConfigError, but for those of the GPU driver: they may pass."""
    # Imported here, since the core does not depend on safetensors.
    from safetensors import SafetensorError

    try:
        yield
    except (MemoryError, OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if str(error).startswith(_DRIVER_ERROR) and not out_of_memory(error):
            raise
        raise not_loaded(what, error, device) from error


def not_loaded(what: str, error: Exception, device: object = "cpu") -> TbaError:
    """Return the error to raise when a library could not load `what`: OutOfMemory or ConfigError."""
    if out_of_memory(error):
        return OutOfMemory(
            f"out of memory while {what} was loaded on {device} ({first_line(error)}): end other processes that use "
            "its memory, or choose a smaller model"
        )
    return ConfigError(
        f"{what} cannot be loaded: {first_line(error)}: check that its files are complete and that the installed "
        "transformers supports this model"
    )


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lack of memory."""
    if error is None:
        return False
    # Not imported: without torch there are no errors of torch, and the core does not depend on it.
    torch: Any = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
        or out_of_memory(error.__cause__ or error.__context__)
    )
