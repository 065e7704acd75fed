"""The files of the repository, also in an unpacked archive or where git does not trust the owner of the clone."""

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]


def source_files(*patterns: str) -> list[Path]:
    """Return the files whose path from the root matches a pattern, without what .gitignore names and environments."""
    ignored = [".git", *(ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    found = []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        # A pattern that begins with a slash is for the root alone.
        kept = {
            name
            for name in (*folders, *files)
            if not any(fnmatch(f"/{here / name}" if rule[0] == "/" else name, rule.rstrip("/")) for rule in ignored)
        }
        folders[:] = [name for name in folders if name in kept and not Path(folder, name, "pyvenv.cfg").exists()]
        names = [str(here / name) for name in files if name in kept]
        found += [ROOT / name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return sorted(found)


def copy_sources(folder: Path) -> Path:
    """Copy the files of the repository into a folder, and return it."""
    for path in source_files("*"):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder
