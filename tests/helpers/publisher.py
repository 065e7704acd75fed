"""What the tests of publishing share: a model, a buffer, and publishers of the model."""

from pathlib import Path
from typing import Any

import torch

from tba.common.config import Config
from tba.common.weights import snapshot
from tba.common.wire import messages
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.trainer import FakeSearcher, save_tiny_model
from tba.tests.helpers.weights import verify
from tba.trainer.buffer_link import network
from tba.trainer.distributed import ALONE
from tba.trainer.model.adapters import BASE, FACTORS, gathered
from tba.trainer.model.scorer import weights_of
from tba.trainer.publishing.publisher import Publisher
from tba.trainer.step.build import build


class PublisherHarness:
    """A model, a buffer and publishers of the model."""

    def __init__(
        self,
        root: Path,
        *,
        dtype: str = "float32",
        tie: bool = True,
        hidden: int = 16,
        lora: dict[str, Any] | None = None,
        files: Path | None = None,
        **train: Any,
    ) -> None:
        self.files = files or save_tiny_model(root / "model", tie=tie, hidden=hidden)
        (self.files / "tokenizer_notes.txt").write_text("belongs to the model")
        (self.files / "training_state.bin").write_bytes(b"does not")
        sections = {
            "run": {"dir": str(root / "run"), "name": "r"},
            "model": {"path": str(self.files), "dtype": dtype},
            "train": {"prompts_per_step": 1, "snapshots_in": "disk"} | train,
            "search": {"weights_dir": str(root / "weights")},
            "lora": lora or {},
            # A server on all addresses has no keys here.
            "security": {"insecure": True},
        }
        self.buffer = BufferThread(Config.model_validate(sections))
        self.config = Config.model_validate(sections | {"buffer": {"address": self.buffer.address}})
        self.learner, self.unwrapped = build(self.config, self.files, torch.device("cpu"), ALONE)
        self.model = self.learner.policy
        self.publishers: list[Publisher] = []

    def publisher(self, next_version: int = 0, **lora: Any) -> Publisher:
        """A publisher of the model as it is configured, or with other keys of [lora]."""
        made = Publisher(
            self.config.model_copy(update={"lora": self.config.lora.model_copy(update=lora)}),
            self.model,
            self.files,
            unwrapped=self.unwrapped,
            next_version=next_version,
            dial=network(self.config.buffer.address),
        )
        self.publishers.append(made)
        return made

    def announced(self) -> snapshot.Snapshot:
        """The newest snapshot the buffer knows, verified."""
        return verify(self.announced_ref())

    def announced_ref(self) -> messages.WeightsRef:
        """The newest snapshot the buffer knows."""
        searcher = FakeSearcher(self.buffer.address, prompts=1)
        ref = searcher.wait_for_weights()
        searcher.close()
        return ref

    @torch.no_grad()
    def change_weights(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(0.01)

    @torch.no_grad()
    def change_a_few(self, seed: int, fraction: float = 0.02) -> None:
        """Change a fraction of the elements, by enough to survive rounding."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < fraction
            parameter.copy_(
                torch.where(chosen, parameter + 0.05 * torch.randn(parameter.shape, generator=generator), parameter)
            )

    @torch.no_grad()
    def train_adapters(self, seed: int) -> None:
        """Give the adapters other values, all of them, as large as training makes them."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    def merged(self) -> dict[str, torch.Tensor]:
        """The policy that adapter snapshots describe: the rounded base with the adapters added, in float32."""
        dtype, lora = getattr(torch, self.config.model.dtype), self.config.lora
        weights = {name: tensor.detach().to(dtype).float() for name, tensor in gathered(self.model, BASE)}
        factors = {name: tensor.detach() for name, tensor in gathered(self.model, FACTORS)}
        for name in (key.removeprefix("a/") for key in factors if key.startswith("a/")):
            weights[name] = weights[name] + lora.alpha / lora.rank * (factors[f"b/{name}"] @ factors[f"a/{name}"])
        return weights

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's weights as they are published."""
        dtype = getattr(torch, self.config.model.dtype)
        return {name: tensor.to(dtype).clone() for name, tensor in weights_of(self.model).items()}

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self.buffer.stop()
