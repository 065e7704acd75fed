"""`tba doctor` on nodes with GPUs: a small package stands for torch, and a small program for nvidia-smi."""

import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba.cli.checks import Plan, examine
from tba.common.config import Config
from tba.common.errors import ConfigError
from tba.common.system import devices
from tba.common.system.devices import assumed_gpus
from tba.common.weights.tensor_file import Tensor
from tba.deploy import doctor
from tba.deploy.doctor import (
    check_caches,
    check_compiler,
    check_cuda,
    check_disk,
    check_other_nodes,
    check_topology,
    check_weights_directory,
    count_parameters,
    deleted_at_logout,
    mount_of,
    numa_nodes,
)
from tba.searcher.build import make_engine
from tba.searcher.engines.stopping import Stopping
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.weights import write_tensor_file
from tba.trainer.step.build import prepare

# By driver, the header of the table that nvidia-smi prints for people.
HEADERS = {
    "550.54.15": "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |",
    "610.43.02": "| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02   CUDA UMD Version: 13.3     |",
}
# Four GPUs: 0 and 1 have NVLink and are on NUMA node 0, 2 and 3 are on node 1. Names of columns are underlined.
MATRIX = "\n".join([
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
    "GPU0\t X \tNV18\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A",
    "GPU1\tNV18\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A",
    "GPU2\tSYS\tSYS\t X \tPHB\tSYS\t32-63\t1\t\tN/A",
    "GPU3\tSYS\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A",
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t",
    "",
    "Legend:",
    "",
    "  X    = Self",
])  # fmt: skip


def config_of(**sections: Any) -> Config:
    return Config.model_validate(sections)


def not_known(_: Config) -> None:
    """The number of parameters of a model that is not here."""


ON_GPUS = config_of(search={"gpus": "0-2"}, train={"gpu": "3"})
ON_CPU = config_of(search={"gpus": "cpu"}, train={"gpu": "cpu"})


@pytest.fixture
def node(tmp_path, monkeypatch) -> Callable[..., None]:
    """A function that puts a torch and an nvidia-smi on this machine, in front of the real ones."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(
        *,
        cuda: str | None = "12.8",
        gpus: int = 4,
        error: str = "",
        driver: str | None = "550.54.15",
        supports: tuple[int, int] | None = (12, 4),
    ) -> None:
        package = tmp_path / "stub/torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(
            "class version: cuda = " + repr(cuda) + "\n__version__ = '2.13.0'\nclass cuda:\n"
            f"    is_available = staticmethod(lambda: {gpus > 0})\n    device_count = staticmethod(lambda: {gpus})\n"
            f"    @staticmethod\n    def init():\n        if {error!r}: raise RuntimeError({error!r})\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        if driver is None:
            monkeypatch.setenv("PATH", "/nowhere")
            return
        monkeypatch.setattr(devices, "_supported_release", lambda: supports)
        rows = "".join(f"{n}, GPU-{n}aaa, 81559, 0\n" for n in range(4))
        buses = "".join(f"{n}, 00000000:{n}B:00.0\n" for n in range(4))
        drivers, header = f"{driver}\n" * 4, HEADERS[driver]
        texts = {"header": header, "driver": drivers, "buses": buses, "matrix": MATRIX, "gpus": rows}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
        for n in range(4):
            (tmp_path / f"pci/0000:{n}b:00.0").mkdir(parents=True, exist_ok=True)
            (tmp_path / f"pci/0000:{n}b:00.0/numa_node").write_text(f"{n // 2}\n")
        monkeypatch.setattr(doctor, "PCI_DEVICES", tmp_path / "pci")
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!/bin/sh\ncd {shlex.quote(str(tmp_path))}\n"
            'case "$1" in topo) cat matrix;; --query-gpu=driver*) cat driver;; *bus_id) cat buses;; '
            '--query-gpu=*) cat gpus;; "") cat header;; esac\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    return install


@pytest.mark.parametrize(("driver", "supports"), [("550.54.15", (12, 4)), ("610.43.02", (13, 3))])
def test_the_driver_is_named_whatever_the_table_of_nvidia_smi_looks_like(node, driver, supports):
    node(driver=driver, supports=supports)
    release = ".".join(map(str, supports))
    expected = f"torch 2.13.0 for CUDA 12.8 shows 4 GPUs with driver {driver} (CUDA {release})"
    assert check_cuda(ON_GPUS) == ("ok", expected)
    assert check_cuda(ON_CPU) == ("ok", "no GPU is configured")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("code", "release"), [("*n = 12040; return 0", (12, 4)), ("*n = 13030; return 0", (13, 3)), ("return 34", None)]
)
def test_the_library_of_the_driver_tells_the_newest_release(tmp_path, monkeypatch, code, release):
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int cuDriverGetVersion(int *n) {{ {code}; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(devices, "_LIBRARY", str(library))
    assert devices._supported_release() == release
    monkeypatch.setattr(devices, "_LIBRARY", str(source))
    assert devices._supported_release() is None


@pytest.mark.parametrize(("machine", "words"), [
    ({"cuda": "13.0"}, "torch 2.13.0 is built for CUDA 13.0, and driver 550.54.15 supports CUDA up to 12.4: update"),
    ({"cuda": None}, "torch 2.13.0 is built without CUDA: install the wheel for CUDA"),
    ({"driver": None, "error": "Found no NVIDIA driver"}, "no NVIDIA driver is visible (nvidia-smi names none), and"),
    ({"supports": None, "error": "no driver"}, "libcuda.so.1 does not load: in a container, set NVIDIA_DRIVER_CAPAB"),
    ({"error": "Error 802: system not yet initialized"}, "torch says: Error 802: system not yet initialized"),
])  # fmt: skip
def test_why_torch_shows_no_gpu_is_named(node, machine, words):
    node(gpus=0, **machine)
    result, detail = check_cuda(ON_GPUS)
    assert (result, words in detail) == ("fail", True), detail


def test_on_a_machine_without_gpus_only_the_check_of_gpus_fails(node):
    node(gpus=0, cuda=None, driver=None)
    found = {finding.check: (finding.result, finding.detail) for finding in examine(Plan(ON_GPUS))}
    assert found["gpus"] == (
        "fail",
        "search.gpus asks for GPU 0-2 and train.gpu asks for GPU 3, but this machine shows no GPU "
        "(CUDA_VISIBLE_DEVICES is empty, or nvidia-smi lists none or is not installed): "
        'set search.gpus = "cpu" and train.gpu = "cpu"',
    )
    assert found["cuda"] == ("unchecked", "no NVIDIA driver is visible, and torch 2.13.0 is built without CUDA")
    assert found["topology"] == ("unchecked", "this machine shows no GPU")


def test_a_missing_or_broken_torch_is_no_finding_about_the_driver(node, tmp_path):
    node()
    (tmp_path / "stub/torch/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    assert check_cuda(ON_GPUS) == ("unchecked", "torch is not installed here")
    (tmp_path / "stub/torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    assert check_cuda(ON_GPUS) == ("fail", "torch does not load: ImportError: libcudart.so.13: cannot open")


def test_the_trainer_says_why_torch_shows_no_gpu(node):
    """The real torch of the tests has no CUDA, or no driver."""
    node(driver=None)
    with pytest.raises(ConfigError, match=r"torch sees none: (torch \S+ is built without CUDA|no NVIDIA driver)"):
        prepare(ON_GPUS, "cuda:0")


def test_triton_needs_a_compiler_and_the_headers_of_python(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    result, detail = check_compiler(ON_GPUS)
    assert (result, "Python.h" in detail) == (("ok" if shutil.which("gcc") else "fail"), bool(shutil.which("gcc")))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    assert "/nowhere/Python.h does not exist" in check_compiler(ON_GPUS)[1]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert check_compiler(ON_GPUS)[1].startswith("CC = no-such-compiler does not exist")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    assert check_compiler(ON_GPUS)[0] == "fail"
    assert check_compiler(ON_CPU)[0] == "ok"


def test_the_kernel_tells_the_numa_nodes_of_gpus(node, tmp_path):
    node()
    assert numa_nodes() == {"0": "0", "1": "0", "2": "1", "3": "1"}
    (tmp_path / "pci/0000:0b:00.0/numa_node").write_text("-1\n")
    (tmp_path / "pci/0000:1b:00.0/numa_node").unlink()
    (tmp_path / "buses").write_text((tmp_path / "buses").read_text().replace("00000000:2B:00.0", "[N/A]"))
    assert numa_nodes() == {"3": "1"}


def test_topology_is_advice(node):
    node()
    result, detail = check_topology(config_of(search={"gpus": "0,3"}, train={"gpu": "GPU-1aaa,2"}))
    assert (result, detail.split("; ")[:2]) == (
        "ok", ["1 pair of GPUs with NVLink", "GPUs that train together without it, which is slow: 1 and 2 (SYS)"],
    )  # fmt: skip
    assert "`numactl --cpunodebind=1 --membind=1` for GPUs 2,3" in detail
    assert "slow" not in check_topology(config_of(train={"gpu": "0,1"}))[1]
    node(driver=None)
    assert check_topology(ON_GPUS)[0] == "unchecked"


@pytest.fixture
def units(tmp_path, monkeypatch) -> Callable[[str], None]:
    """A function that installs an environment file of the units."""
    monkeypatch.setattr(doctor, "UNITS_ENVIRONMENT", tmp_path / "tba.env")
    return (tmp_path / "tba.env").write_text


def test_the_shipped_environment_sets_the_caches_of_the_units(units):
    shipped = (Path(doctor.__file__).parent / "systemd/tba.env").read_text()
    units(shipped)
    assert check_caches(ON_GPUS)[0] == "ok"
    units(shipped.replace("TRITON_CACHE_DIR", "#TRITON_CACHE_DIR"))
    assert "does not set TRITON_CACHE_DIR" in check_caches(ON_GPUS)[1]
    units(shipped.replace("/var/lib/tba/cache/vllm", "/home/ann/vllm"))
    result, detail = check_caches(ON_GPUS)
    assert (result, "VLLM_CACHE_ROOT = /home/ann/vllm is hidden from the units" in detail) == ("fail", True)


@pytest.mark.parametrize(
    ("searchers", "serves", "result"),
    [
        ("trainer", "", "fail"), ("trainer", "tcp://*:5758", "ok"), ("trainer", "tcp://127.0.0.1:*", "ok"),
        ("auto", "", "ok"), ("path", "", "ok"), ("path", "tcp://*:5758", "ok"), ("auto", "tcp://*:5758", "ok"),
    ],
)  # fmt: skip
def test_searchers_that_fetch_from_a_trainer_that_serves_nothing_are_refused(searchers, serves, result, tmp_path):
    config = config_of(
        run={"dir": tmp_path}, model={"path": str(EXAMPLE_MODEL)}, task={"name": "arithmetic"},
        search={"weights_from": searchers, "gpus": "cpu"}, train={"serve_snapshots": serves, "gpu": "cpu"},
    )  # fmt: skip
    (found,) = examine(Plan(config), ["settings"])
    assert (found.result, "set train.serve_snapshots" in found.detail) == (result, result == "fail")


MODEL = {"path": str(EXAMPLE_MODEL)}
ADAPTER = {
    "lora": {"rank": 4, "publish": "adapter"}, "model": MODEL | {"dtype": "float32"}, "search": {"engine": "vllm"},
    "task": {"name": "arithmetic"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({}, True),
        ({"search": {"engine": "vllm", "gpus": "0-1"}}, True),
        ({"search": {"engine": "vllm", "gpus": "cpu"}}, False),
        ({"search": {"engine": "transformers"}}, False),
        ({"model": MODEL | {"dtype": "bfloat16"}}, False),
        ({"lora": {"rank": 4, "publish": "merged"}}, False),
        ({"lora": {}}, False),
    ],
)
def test_float32_adapters_that_vllm_would_apply_on_a_gpu_are_refused_before_a_start(sections, refused):
    config = config_of(**ADAPTER | sections)
    (found,) = examine(Plan(config, assumed_gpus("8x80")), ["settings"])
    words = 'Set model.dtype = "bfloat16", or lora.publish = "merged"'
    assert (found.result == "fail", words in found.detail) == (refused, refused)
    if refused:
        with pytest.raises(ConfigError, match=words):
            make_engine(config, Stopping(None, (), ()), device="cuda", name="s")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_environment_with_a_space_in_its_path_is_refused_for_vllm_on_a_cpu(monkeypatch):
    def engine(**search: str) -> str:
        config = config_of(search={"engine": "vllm", "gpus": "cpu"} | search)
        return examine(Plan(config), ["engine"])[0].result

    monkeypatch.setattr(sys, "prefix", "/home/ann/runs/.venv")
    assert engine() == "ok"
    monkeypatch.setattr(sys, "prefix", "/home/ann/my runs/.venv")
    assert engine() == "warn"
    assert engine(engine="transformers") == "ok"


@pytest.fixture
def no_units(monkeypatch, tmp_path):
    """No unit is installed, and the caches are in directories that can be written to."""
    monkeypatch.setattr(doctor, "UNITS_ENVIRONMENT", tmp_path / "tba.env")
    (tmp_path / "caches").mkdir()
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "caches"))


@pytest.mark.usefixtures("no_units")
def test_a_cache_of_this_user_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "closed/triton"))
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    result, detail = check_caches(ON_GPUS)
    assert (result, f"{tmp_path}/closed/triton cannot be written to: set TRITON_CACHE_DIR" in detail) == ("warn", True)


@pytest.mark.usefixtures("no_units", "no_home")
def test_a_user_without_a_home_directory_is_told_where_caches_are_set(monkeypatch):
    assert check_caches(ON_GPUS)[0] == "ok"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    assert check_caches(ON_GPUS) == ("warn", "this user has no home directory: set VLLM_CACHE_ROOT, or HOME")


@pytest.fixture
def storage(tmp_path) -> Callable[..., Config]:
    """A function that configures a run of a model of 1,000,000 parameters in bfloat16."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    weights = {"w": Tensor("BF16", (1000, 1000), np.zeros(1_000_000, np.uint16))}
    write_tensor_file(directory / "model.safetensors", weights)
    places = {"run": {"dir": tmp_path / "run"}, "search": {"weights_dir": tmp_path / "w"}}
    return partial(config_of, model={"path": str(directory)}, **places)


def test_disk_is_compared_with_what_the_run_stores_at_the_size_of_its_model(storage, tmp_path, monkeypatch):
    """Checkpoints take 12 bytes per parameter, snapshots 2 in bfloat16: 3 and 4 + 10 + 2 of them, and 4 on the node."""
    config = storage(train={"steps": 100, "keep_snapshot_every": 10})
    assert count_parameters(config) == 1_000_000
    monkeypatch.setattr(doctor, "_LOW_DISK_GIB", 0)
    usage = shutil.disk_usage(tmp_path)

    def result(free: int) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        return check_disk(config, not_known)[0]

    assert (result(76_000_000), result(75_999_999)) == ("ok", "warn")
    # What the run has stored already is not asked for again.
    config.checkpoints.mkdir(parents=True)
    (config.checkpoints / "old").write_bytes(bytes(10_000_000))
    assert result(66_000_000) == "ok"


def test_the_file_system_of_a_path_is_the_last_mount_above_it(tmp_path):
    (tmp_path / "a b/c").mkdir(parents=True)
    mounts = tmp_path / "mounts"
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {spaced} nfs4 rw 0 0\ntmpfs {spaced}/c tmpfs rw 0 0\n")
    found = [mount_of(tmp_path / path, mounts) for path in ("new", "a b/new", "a b/c/new")]
    assert [(mount.type, mount.is_network) for mount in found] == [("ext4", False), ("nfs4", True), ("tmpfs", False)]


def test_the_weights_directory_is_described(storage, tmp_path, monkeypatch):
    config = storage()
    result, detail = check_weights_directory(config)
    assert result == "ok"
    assert detail.startswith(f"{tmp_path}/w/run on ")
    assert "other runs" not in detail
    left = tmp_path / "w" / "stopped" / f"v00000009-{'0' * 16}"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1 << 20))
    assert f"; other runs have 1 MiB in {tmp_path}/w: delete" in check_weights_directory(config)[1]
    monkeypatch.setattr(doctor, "mount_of", lambda path: doctor.Mount(path.parent, "nfs4"))
    result, detail = check_weights_directory(config)
    assert (result, "is on nfs4: locks need a local file system" in detail) == ("fail", True)
    monkeypatch.setattr(doctor, "mount_of", lambda path: doctor.Mount(path.parent, "xfs"))
    assert "kept ones are copied, not linked" in check_weights_directory(config)[1]


def test_systemd_deletes_the_shared_memory_of_users_that_log_out(tmp_path):
    user = next((user for user in pwd.getpwall() if user.pw_uid >= 1000), None)
    assert user is not None
    assert not deleted_at_logout(user.pw_uid, tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert deleted_at_logout(user.pw_uid, tmp_path)
    assert not deleted_at_logout(0, tmp_path)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger" / user.pw_name).touch()
    assert not deleted_at_logout(user.pw_uid, tmp_path)


LOCAL = "for this machine only"


@pytest.mark.parametrize(("address", "serves", "result", "words"), [
    ("tcp://127.0.0.1:5757", "", "ok", LOCAL),
    ("ipc:///tmp/buffer", "", "ok", LOCAL),
    ("tcp://*:5757", "", "warn", 'set train.serve_snapshots = "tcp://*:5758"'),
    ("tcp://node1:5757", "", "warn", "their searchers cannot get weights"),
    ("tcp://0.0.0.0:5757", "tcp://127.0.0.1:5758", "warn", "train.serve_snapshots tcp://127.0.0.1:5758 is for this"),
    ("tcp://[::]:5757", "tcp://*:5758", "ok", "serves snapshots at tcp://*:5758"),
])  # fmt: skip
def test_a_buffer_for_other_nodes_needs_weights_for_them(tmp_path, monkeypatch, address, serves, result, words):
    def check(**train: str) -> doctor.Result:
        return check_other_nodes(config_of(run={"dir": tmp_path}, buffer={"address": address}, train=train))

    found, detail = check(serve_snapshots=serves)
    assert (found, words in detail) == (result, True), detail
    # A network file system shares snapshots unless they stay in memory.
    monkeypatch.setattr(doctor, "mount_of", lambda path: doctor.Mount(path, "nfs4"))
    assert [check(snapshots_in=kept)[0] for kept in ("auto", "memory")] == ["ok", "ok" if words == LOCAL else "warn"]


@pytest.mark.parametrize(("how", "results"), [
    ({}, ["warn", "unchecked"]), ({"strict": True}, ["fail", "unchecked"]), ({"starts": True}, ["fail", "fail"]),
])  # fmt: skip
def test_a_missing_package_is_named_with_the_setting_that_needs_it(tmp_path, monkeypatch, how, results):
    for module in ("vllm", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    config = config_of(search={"engine": "vllm", "gpus": "cpu"}, reward_model={"path": str(tmp_path)})
    engine, reward = examine(Plan(config, **how), ["engine", "reward model"])
    assert [engine.result, reward.result] == results
    assert engine.detail.startswith("search.engine = vllm: vllm is not installed: ")
    assert reward.detail.startswith(f"{tmp_path}: torch is not installed: ")
    assert all(found.detail.endswith("; a role here needs it") for found in (engine, reward))


@pytest.mark.needs("datasets")
def test_what_was_not_looked_at_is_unchecked(tmp_path, hub_offline):
    config = config_of(
        run={"dir": tmp_path}, model={"path": "org/model"}, task={"name": "gsm8k", "train": "openai/gsm8k"},
        search={"gpus": "cpu"}, train={"gpu": "cpu"}, buffer={"address": f"ipc://{tmp_path}/b"},
    )  # fmt: skip
    findings = {found.check: found for found in examine(Plan(config))}
    assert [findings[name].result for name in ("model", "task", "weights directory")] == ["warn"] + ["unchecked"] * 2
    assert examine(Plan(config, strict=True), ["model"])[0].result == "fail"
    elsewhere = {found.check: found.result for found in examine(Plan(config, assumed_gpus("8x80")))}
    assert (elsewhere["model"], elsewhere["task"]) == ("unchecked", "unchecked")
    assert findings["task"].detail == "openai/gsm8k: data of the hub, downloaded at the start"


@pytest.mark.slow
def test_a_file_of_weights_whose_header_cannot_be_read_is_named(example_model, tmp_path):
    shutil.copytree(example_model, tmp_path / "model")
    header = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / "model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (found,) = examine(Plan(config_of(model={"path": str(tmp_path / "model")})), ["model"])
    assert found.result == "fail"
    assert "model.safetensors is not a safetensors file: RecursionError" in found.detail


def test_the_endpoint_of_searchers_is_shown_and_a_taken_port_is_a_warning():
    secret = {"serve_token": "0123456789abcdef"}
    assert doctor.check_endpoint(Config()) == ("ok", "search.serve is not set")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve = f"127.0.0.1:{taken.getsockname()[1]}"
        result, detail = doctor.check_endpoint(Config.model_validate({"search": {"serve": serve}}))
        assert (result, serve in detail) == ("warn", True)
    result, detail = doctor.check_endpoint(Config.model_validate({"search": {"serve": serve} | secret}))
    assert (result, f"http://{serve}/v1 with a token" in detail) == ("ok", True)
    assert secret["serve_token"] not in detail


def test_the_size_of_a_directory_is_known_while_a_run_makes_and_deletes_what_is_in_it(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").write_bytes(b"x" * 8192)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            for n in range(20):
                (tmp_path / f"v{n}").mkdir()
                (tmp_path / f"v{n}/file").touch()
            for n in range(20):
                shutil.rmtree(tmp_path / f"v{n}")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert {doctor._size_of(tmp_path) for _ in range(300)} == {8192}
    finally:
        over.set()
        thread.join()
