"""The build of torch that `make` installs: PyTorch's CPU build where no NVIDIA driver is, if its index answers."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba.tests.helpers.hub import Hub, serve_hub
from tba.tests.process.conftest import ROOT, free_port

NO_DRIVER = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")


@pytest.fixture
def options(tmp_path):
    """A function that returns the options that `make` passes to pip for an index of CPU builds."""

    def ask(index: str, *, driver: bool = False) -> str:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nexit {0 if driver else 9}\n")
        smi.chmod(0o755)
        # Without its site packages, this interpreter has no torch.
        command = [sys.executable, "-S", str(ROOT / "requirements/torch_options.py"), index]
        own = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        # An index that is silent ends it by a signal, and `make` reads what it has printed.
        return subprocess.run(command, env=own, timeout=300, stdout=subprocess.PIPE, text=True).stdout.strip()

    return ask


@NO_DRIVER
def test_a_machine_without_a_driver_gets_the_cpu_build_if_its_index_answers(options, tmp_path):
    # A hub of models answers like an index of packages, of which it has torch.
    with serve_hub(Hub({"torch": tmp_path})) as hub:
        index = hub.address
        assert options(index) == f"--extra-index-url {index}"
        assert options(f"http://127.0.0.1:{free_port()}") == options(f"{index}/no-such-index") == ""
        assert options(index, driver=True) == ""


@NO_DRIVER
def test_an_index_that_is_silent_does_not_delay_the_installation(options):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        assert options(f"http://127.0.0.1:{silent.getsockname()[1]}") == ""
        assert time.monotonic() - began < 30
