"""Publishes snapshots without a trainer, for tests of searchers."""

import shutil
from pathlib import Path

from tba.common.system.durable import temporary_directory
from tba.common.weights.snapshot import Canary, Manifest, describe_files, directory_name, seal
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import ClientStatus, GetStatus, Status
from tba.tests.helpers.checks import wait_until


def write_snapshot(model: Path, directory: Path, version: int, *, canary_error: float = 0.0) -> tuple[Path, str]:
    """Write a snapshot of a model, whose step is its version. Returns its path and the hash of its manifest."""
    final = directory / directory_name(version)
    temporary = temporary_directory(final)
    shutil.copytree(model, temporary, dirs_exist_ok=True)
    manifest = Manifest("test", version, version, 0.0, describe_files(temporary), _canary(model, canary_error))
    return final, seal(temporary, final, manifest)


def _canary(directory: Path, error: float) -> Canary:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sequence = torch.tensor([[3, 4, 13, 5, 6, 15, 7, 8]])
    with torch.no_grad():
        logprobs = model(sequence).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(1, sequence[0, 1:, None])[:, 0] + error
    return Canary(sequence.tolist(), [chosen.tolist()])


class Announcer:
    """Publishes valid and invalid snapshots of a model, as a trainer would."""

    def __init__(self, address: str, model: Path, directory: Path) -> None:
        self.client = BufferClient(address, role="publisher", name="test")
        self.client.call(messages.Hello(host="h", pid=1), messages.Welcome, deadline_seconds=120)
        self._model = model
        self._directory = directory

    def announce(self, version: int, *, canary_error: float = 0.0, flip_a_byte: bool = False) -> None:
        final, digest = write_snapshot(self._model, self._directory, version, canary_error=canary_error)
        if flip_a_byte:
            content = bytearray((final / "model.safetensors").read_bytes())
            content[-1000] ^= 1
            (final / "model.safetensors").write_bytes(content)
        ref = messages.WeightsRef(version=version, step=version, path=str(final), manifest_sha256=digest)
        self.client.call(messages.AnnounceSnapshot(weights=ref, bytes=1), messages.Done, deadline_seconds=120)

    def status(self) -> Status:
        return self.client.call(GetStatus(), Status, deadline_seconds=120)[0]

    def searchers(self) -> list[ClientStatus]:
        return [client for client in self.status().clients if client.role == "searcher"]

    def wait_for(self, condition) -> ClientStatus:
        """Wait until the status of the searcher meets a condition, and return it."""
        found: list[ClientStatus] = []
        wait_until(lambda: found.extend(filter(condition, self.searchers())) or found)
        return found[0]
