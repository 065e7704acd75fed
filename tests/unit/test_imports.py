"""What may be loaded by what. The directions between packages are checked by `make check` (import-linter)."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "vllm", "safetensors", "matplotlib"}


@pytest.mark.parametrize(
    "module",
    [
        "tba.cli",
        "tba.buffer.server.start",
        "tba.buffer.tools.stats",
        "tba.buffer.tools.import_file",
        "tba.common.wire.client",
        "tba.deploy.launcher",
    ],
)
def test_importing_the_core_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert module in loaded
    assert not loaded & HEAVY


def test_the_command_line_loads_no_role_before_a_command_runs():
    code = "import sys, tba.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    roles = [name for name in loaded if name.startswith(("tba.buffer", "tba.searcher", "tba.trainer", "tba.ui"))]
    # These declare commands and import nothing else of their roles.
    buffer = ["command_options", "commands", "maintenance_commands"]
    assert sorted(roles) == [
        *("tba.buffer", *(f"tba.buffer.{name}" for name in buffer)),
        *(f"tba.{role}{module}" for role in ("searcher", "trainer", "ui") for module in ("", ".commands")),
    ]
    assert not {"sqlite3", "pydantic", "numpy", "zmq"} & set(loaded)
