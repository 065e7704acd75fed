"""A publication from a model on the device to the parameters of an engine, with each copy compared."""

import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open

from benchmarks import bare
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.publication import ALONE, Publisher, memcpy_of
from tba.common.weights.snapshot import MANIFEST
from tba.tests.helpers.gpu_steps import GB, qwen, random_model
from tba.tests.helpers.trainer import make_row
from tba.trainer.publishing.snapshot_writer import WEIGHTS, Written


def _publish(findings: Findings, options: Any, size: str, rounds: int) -> None:
    """Publish a model some times, as fast as that goes."""
    model = random_model(qwen(size, tiny=options.tiny), options.device)
    published = 2 * sum(parameter.numel() for parameter in model.parameters())
    places = [place for place in (Path("/dev/shm"), options.work) if shutil.disk_usage(place).free > 4 * published]
    if not places:
        raise Skip(f"no room for three snapshots of {published / GB:.0f} GB in /dev/shm and {options.work}")
    findings.note("GB published, and where", [published / GB, str(places[0])])
    part = min(published, 4 << 30)
    findings.note("a memcpy of that size, s", memcpy_of(part)()[0] * published / part)
    path = Publisher(options.work / f"publish-{size}", model, places[0] / f"{options.work.name}-{size}")
    held = []
    try:
        for number in range(rounds):
            seconds = {name: wall for name, (wall, _) in path.round(number).items()}
            served = sum(value for name, value in seconds.items() if name not in ALONE)
            findings.note(f"round {number}, s", seconds | {"step to served": served})
            held.append(torch.cuda.memory_reserved() / GB if options.device == "cuda" else 0.0)
        findings.note("memory of the allocator after each round, GB", held)
        findings.check("pinned memory of the snapshot", path.pinned, options.device == "cuda")
        findings.at_most("growth of the allocator since the second round, GB", held[-1] - held[1], 0.3)
        _compare(findings, model, path.written, path.engine)
    finally:
        path.close()


@torch.no_grad()
def _compare(findings: Findings, model: Any, written: Written, engine: dict[str, torch.Tensor]) -> None:
    """Compare files, engine and canary with the model itself, by other libraries than those that wrote them."""
    manifest, weights = written.manifest, written.path / WEIGHTS
    hashed = blake3(max_threads=blake3.AUTO).update_mmap(weights).hexdigest()
    findings.check("BLAKE3 of the file", hashed, manifest.files[WEIGHTS].blake3)
    digest = hashlib.sha256((written.path / MANIFEST).read_bytes()).hexdigest()
    findings.check("SHA-256 of the manifest", digest, written.manifest_sha256)
    parameters = dict(model.named_parameters())
    in_file, in_engine = 0, 0
    with safe_open(weights, "pt") as file:
        findings.check("tensors in the file that the model lacks", sorted(set(file.keys()) ^ parameters.keys()), [])
        for name, parameter in parameters.items():
            # From here on the model has the published weights, for the canary.
            parameter.copy_(parameter.bfloat16())
            in_file += not torch.equal(file.get_tensor(name).to(parameter.device), parameter.bfloat16())
            in_engine += not torch.equal(engine[name], parameter.bfloat16())
    findings.check("tensors that differ in the file, read by safetensors", in_file, 0)
    findings.check("tensors that differ in the engine after the swap", in_engine, 0)
    rows = [make_row(0, sequence[:1], sequence[1:]) for sequence in manifest.canary.sequences]
    canary_R = torch.tensor([logprob for logprobs in manifest.canary.logprobs for logprob in logprobs])
    largest = float((bare.logprobs(model, rows).cpu() - canary_R).abs().max())
    findings.check("canary: largest error of a log-probability", largest, 0.0, 1e-2)


# Stages.
publish15, publish7 = partial(_publish, size="1.5B", rounds=6), partial(_publish, size="7B", rounds=3)
