"""The build of torch that `make` installs: PyTorch's CPU build where no NVIDIA driver is, if its index answers."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tba.tests.process.conftest import free_port

ROOT = Path(__file__).parents[2]
NO_DRIVER = pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")


def add_torch(index: Path, version: str) -> None:
    """Add an empty wheel of torch to a package index."""
    folder = index / "torch"
    folder.mkdir(parents=True)
    name = f"torch-{version}-py3-none-any.whl"
    files = {"METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n", "RECORD": ""}
    files["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"torch-{version}.dist-info/{file}", text)
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "index.html").write_text(f'<a href="{name}#sha256={digest}">{name}</a>')


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of a server with two indexes: /pypi has the default build of torch, /cpu the CPU build."""
    folder = tmp_path_factory.mktemp("site")
    version = (ROOT / "constraints.txt").read_text().partition("\ntorch==")[2].split()[0]
    add_torch(folder / "pypi", version)
    add_torch(folder / "cpu", f"{version}+cpu")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment with pip alone."""
    path = tmp_path_factory.mktemp("made") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True, timeout=300)
    return path


@pytest.fixture
def programs(tmp_path):
    """A function that returns PATH with an nvidia-smi that finds a driver, or fails."""

    def path(driver: bool) -> str:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nexit {0 if driver else 9}\n")
        smi.chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    return path


@pytest.fixture
def options(environment, programs):
    """A function that returns the options that `make` passes to pip for an index of CPU builds."""

    def ask(index: str, *, driver: bool = False) -> str:
        command = [environment / "bin/python", ROOT / "requirements/torch_options.py", index]
        own = os.environ | {"PATH": programs(driver)}
        # An index that is silent ends it by a signal, and `make` reads what it has printed.
        return subprocess.run(command, env=own, timeout=300, stdout=subprocess.PIPE, text=True).stdout.strip()

    return ask


@pytest.fixture
def installed(site, environment, programs):
    """A function that lets `make` install torch, and returns whether it is the CPU build."""

    def install(*variables: str) -> bool:
        target = environment / "installed-torch"
        target.unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_", "MAKE"))}
        own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{site}/pypi", "PATH": programs(driver=False)}
        command = ["make", str(target), f"VENV={environment}", *variables]
        subprocess.run(command, cwd=ROOT, env=kept | own, check=True, timeout=300, capture_output=True)
        (found,) = environment.glob("lib/*/site-packages/torch-*.dist-info")
        subprocess.run(
            [environment / "bin/python", "-m", "pip", "uninstall", "--yes", "torch"], check=True, timeout=300
        )
        return "+cpu" in found.name

    return install


@NO_DRIVER
def test_a_machine_without_a_driver_gets_the_cpu_build_if_its_index_answers(installed, options, site):
    assert installed(f"TORCH_INDEX={site}/cpu")
    assert options(f"http://127.0.0.1:{free_port()}") == options(f"{site}/no-such-index") == ""


@NO_DRIVER
def test_an_index_that_is_silent_does_not_delay_the_installation(options):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert options(f"http://127.0.0.1:{silent.getsockname()[1]}") == ""


def test_a_driver_or_options_of_the_user_leave_the_index_out(installed, options, site):
    assert options(f"{site}/cpu", driver=True) == ""
    assert not installed(f"TORCH_INDEX={site}/cpu", "TORCH_OPTIONS=")
    assert installed(f"TORCH_INDEX=http://127.0.0.1:{free_port()}", f"TORCH_OPTIONS=--extra-index-url {site}/cpu")
