"""Directories that a user may not read or enter."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The user without rights, on most systems.
_OTHER_USER = 65534


@contextmanager
def closed_directory(mode: int) -> Iterator[Path]:
    """Make a directory of this user with a mode. Root may enter all, so its process becomes another user meanwhile."""
    # Every user may enter /dev/shm. The temporary directory may be one that only its user may enter.
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    directory.chmod(mode)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(directory, _OTHER_USER, _OTHER_USER)
            os.setresuid(_OTHER_USER, _OTHER_USER, 0)
        yield directory
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        directory.chmod(0o700)
        shutil.rmtree(directory)
