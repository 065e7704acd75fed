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


def test_the_command_line_loads_no_role_before_a_command_runs():
    code = "import sys, tba.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    roles = [name for name in loaded if name.startswith(("tba.buffer", "tba.searcher", "tba.trainer", "tba.ui"))]
    # These declare commands, and import nothing else of their roles.
    assert all(name.count(".") == 1 or name.endswith("commands") for name in roles), roles
    assert not {"sqlite3", "pydantic", "numpy", "zmq"} & set(loaded)
