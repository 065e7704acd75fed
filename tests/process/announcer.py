"""Snapshots without a trainer, for tests of searchers."""

import shutil
import time
from pathlib import Path

from tba.common import wire
from tba.common.client import BufferClient
from tba.common.durable import temporary_directory
from tba.common.snapshot import Canary, Manifest, describe_files, directory_name, seal


class Announcer:
    """Publishes snapshots of the example model, good ones and bad ones, as a trainer would."""

    def __init__(self, address: str, model: Path, directory: Path) -> None:
        self.client = BufferClient(address, role="publisher", name="test")
        self.client.call(wire.Hello(host="h", pid=1, software="t"), wire.Welcome, deadline_seconds=30)
        self._model = model
        self._directory = directory

    def announce(self, version: int, *, canary_error: float = 0.0, flip_a_byte: bool = False) -> None:
        final = self._directory / directory_name(version)
        temporary = temporary_directory(final)
        shutil.copytree(self._model, temporary, dirs_exist_ok=True)
        manifest = Manifest("test", version, version, 0.0, describe_files(temporary), self._canary(canary_error))
        digest = seal(temporary, final, manifest)
        if flip_a_byte:
            content = bytearray((final / "model.safetensors").read_bytes())
            content[-1000] ^= 1
            (final / "model.safetensors").write_bytes(content)
        ref = wire.WeightsRef(version=version, step=version, path=str(final), manifest_sha256=digest)
        self.client.call(wire.AnnounceSnapshot(weights=ref, bytes=1), wire.Done, deadline_seconds=10)

    def _canary(self, error: float) -> Canary:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        sequence = torch.tensor([[3, 4, 13, 5, 6, 15, 7, 8]])
        with torch.no_grad():
            logprobs = model(sequence).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, sequence[0, 1:, None])[:, 0] + error
        return Canary(sequence.tolist(), [chosen.tolist()])

    def searcher(self) -> wire.ClientStatus | None:
        status, _ = self.client.call(wire.GetStatus(), wire.Status, deadline_seconds=10)
        return next((client for client in status.clients if client.role == "searcher"), None)

    def wait_for(self, condition, seconds: float = 90) -> wire.ClientStatus:
        deadline = time.monotonic() + seconds
        while (searcher := self.searcher()) is None or not condition(searcher):
            assert time.monotonic() < deadline, searcher
            time.sleep(0.1)
        return searcher
