"""What may be loaded by what. The directions between packages are checked by `make check` (import-linter)."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "vllm", "safetensors", "matplotlib"}
# What a host of the buffer, or a command that only reads, imports.
CORE = (
    "tba.cli",
    "tba.buffer.server.start",
    "tba.buffer.tools.stats",
    "tba.buffer.tools.import_file",
    "tba.common.wire.client",
    "tba.deploy.launcher",
)


@pytest.mark.slow
def test_importing_the_core_loads_nothing_heavy():
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); print(name, *sys.modules)"
    command = [sys.executable, "-c", code, *CORE]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = {name: HEAVY.intersection(modules) for name, *modules in map(str.split, lines)}
    assert {name: heavy for name, heavy in loaded.items() if heavy} == {}
    assert list(loaded) == list(CORE)
