"""What hands do to a directory that a process uses: it is deleted, moved or replaced, and put back."""

import shutil
from pathlib import Path


def delete(directory: Path) -> None:
    """Delete it, although a process may write into it meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def move(directory: Path) -> None:
    directory.rename(directory.with_name("aside"))


def replace(directory: Path) -> None:
    move(directory)
    directory.mkdir()


def replace_by_a_file(directory: Path) -> None:
    move(directory)
    directory.write_text("not a directory")


HANDS = (delete, move, replace, replace_by_a_file)


def repair(directory: Path) -> None:
    """Put back what was moved."""
    if (aside := directory.with_name("aside")).exists():
        directory.unlink() if directory.is_file() else shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
