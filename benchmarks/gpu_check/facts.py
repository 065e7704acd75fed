"""The machine: what torch and tba say of it against what the driver and the kernel say."""

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_check.findings import Findings
from tba.common.system.devices import ask_nvidia_smi, find_driver, list_gpus
from tba.common.weights.tensor_file import blake3_of_bytes
from tba.tests.helpers.gpu_steps import GB, error, timed
from tba.trainer.metrics.flops import peak_flops

# Of BLAKE3's test_vectors.json.
_BLAKE3_OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def facts(findings: Findings, options: Any) -> None:
    """The host, and on a GPU its name, memory, driver, speed of products and of copies."""
    kib = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    findings.relative("host memory: /proc/meminfo and sysconf, GB", kib * 1024 / GB, pages / GB, 0.01)
    findings.check("BLAKE3 of no bytes", blake3_of_bytes(b""), _BLAKE3_OF_NOTHING)
    if options.device == "cuda":
        _card(findings)
        _speed(findings)


def _card(findings: Findings) -> None:
    card, driver = torch.cuda.get_device_properties(0), find_driver()
    uuid = f"GPU-{str(card.uuid).removeprefix('GPU-')}"
    fields = "--query-gpu=name,memory.total,driver_version,compute_cap"
    output = ask_nvidia_smi(f"--id={uuid}", fields, "--format=csv,noheader,nounits") or ""
    name, mib, version, capability = [part.strip() for part in output.split(",")]
    findings.check("name by torch", card.name, name)
    findings.check("compute capability by torch", f"{card.major}.{card.minor}", capability)
    findings.check("driver by tba", driver.version if driver else "none", version)
    # nvidia-smi writes [N/A] for a card in MIG slices.
    if mib.isdigit():
        findings.relative("memory by torch, GB", card.total_memory / GB, int(mib) * 2**20 / GB, 0.03)
        mine = next(gpu for gpu in list_gpus() if gpu.uuid in ("", uuid))
        findings.relative("memory by tba, GB", mine.total_mib * 2**20 / GB, card.total_memory / GB, 0.03)
    free, total = torch.cuda.mem_get_info()
    findings.note("CUDA context and other processes, GB (the preflight counts 2.1)", (total - free) / GB)


def _speed(findings: Findings) -> None:
    def seconds(call: Callable[[], Any]) -> float:
        return median([timed("cuda", call)[1] for _ in range(4)][1:])

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / seconds(lambda: left @ right)
    findings.note("bfloat16 products, TFLOP/s", rate / 1e12)
    exact = left[:64].double() @ right.double()
    findings.check("bfloat16 products: error against float64", error((left @ right)[:64], exact), 0.0, 1e-2)
    if peak := peak_flops(torch.device("cuda")):
        findings.at_most("bfloat16 products as a share of the peak in tba's table", rate / peak, 1.05)
    device = torch.full((1 << 31,), 7, dtype=torch.uint8, device="cuda")
    pinned = torch.empty_like(device, device="cpu", pin_memory=True)
    back = seconds(lambda: pinned.copy_(device, non_blocking=True))
    to = seconds(lambda: device.copy_(pinned, non_blocking=True))
    findings.note("pinned memory to the device and back, GB/s", [device.nbytes / GB / one for one in (to, back)])
    findings.check("least and largest byte that came back", [int(pinned.min()), int(pinned.max())], [7, 7])
