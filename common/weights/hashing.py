"""BLAKE3 hashes of files and of memory, in threads: a cryptographic hash at several GB/s and core.

Specification: https://github.com/BLAKE3-team/BLAKE3-specs. Its hash is the root of a tree over chunks of the input, so
that many threads work on one file, and one hash still vouches for all of it.
"""

from pathlib import Path

from blake3 import blake3


def blake3_of(path: Path) -> str:
    """The BLAKE3 of a file as hex digits. The file is mapped, not copied."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def blake3_of_bytes(content: memoryview | bytes) -> str:
    """The BLAKE3 of memory as hex digits."""
    return blake3(content, max_threads=blake3.AUTO).hexdigest()
