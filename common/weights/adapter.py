"""The files of an adapter snapshot, in PEFT's format: low-rank factors on the weights of a full snapshot.

    adapter_config.json          rank, alpha, and the directory of the base
    adapter_model.safetensors    of each layer NAME, float32:
        base_model.model.NAME.lora_A.weight    [rank, in]
        base_model.model.NAME.lora_B.weight    [out, rank]

A layer's weight is W + alpha / rank x B A (LoRA, Hu et al. 2021, section 4.1). vLLM and PEFT load the directory as it
is; `Adapter.change` is for everything else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tba.common.errors import SnapshotCorrupt
from tba.common.system.durable import write_json
from tba.common.weights.model_files import read_json

FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one weight [out, in]: `a` [rank, in] and `b` [out, rank]."""

    a: Floats
    b: Floats


@dataclass(frozen=True, slots=True)
class Adapter:
    """The factors by the names of their weights (`NAME.weight`), and the number that scales their products."""

    factors: Mapping[str, Factors]
    scaling: float

    def change(self, name: str) -> Floats:
        """Return what the adapter adds to a weight [out, in]."""
        one = self.factors[name]
        product: Floats = one.b @ one.a
        product *= np.float32(self.scaling)
        return product


def save(directory: Path, adapter: Adapter, *, rank: int, base: Path) -> None:
    """Write the files of an adapter. `base` is the directory of the full snapshot that it belongs to."""
    from safetensors.numpy import save_file

    tensors: dict[str, Floats] = {}
    for name, one in adapter.factors.items():
        layer = _PREFIX + name.removesuffix(".weight")
        tensors |= {layer + _A: np.ascontiguousarray(one.a), layer + _B: np.ascontiguousarray(one.b)}
    save_file(tensors, directory / FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "bias": "none",
        "r": rank,
        "lora_alpha": adapter.scaling * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in adapter.factors}),
    }
    write_json(directory / CONFIG, config)


def load(directory: Path) -> Adapter:
    """Read the files of an adapter. Raises SnapshotCorrupt if they are missing or malformed."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        config = read_json(directory / CONFIG)
        tensors = load_file(directory / FILE)
        layers = [name.removeprefix(_PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A)]
        factors = {
            f"{layer}.weight": Factors(tensors[_PREFIX + layer + _A], tensors[_PREFIX + layer + _B]) for layer in layers
        }
        return Adapter(factors, config["lora_alpha"] / config["r"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SnapshotCorrupt(f"{directory} holds no readable adapter: {error}") from error
