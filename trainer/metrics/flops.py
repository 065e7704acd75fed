"""Model FLOPs utilisation (MFU): FLOPs that an update needs, divided by what the devices could compute."""

from collections.abc import Sequence
from typing import Literal

import torch
from transformers import PreTrainedModel

from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.preflight.shape import active_fraction, is_routed

# Dense bfloat16 peaks in TFLOP/s from the vendors' data sheets, by part of the device's name; the first match wins.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 4090", 165.0),
    ("MI300X", 1307.0),
)


class ModelFlops:
    """Floating-point operations that the forward and backward passes of a batch need.

    6 per parameter and token (Kaplan et al. 2020), 4 where it is frozen; of routed experts only those that compute a
    token; the head's only where a response token is predicted; plus causal attention: 6 x layers x attention width x
    length^2 per row. A prompt of several rows counts once. Padding, recomputation and the reference do not count.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        outside = {id(head): head.numel(), id(weight := model.get_input_embeddings().weight): weight.numel()}
        active = active_fraction(model)
        # Per parameter and token: 2 for forward, 2 for the gradient of the input, 2 for its own gradient if it trains.
        self._body: float = sum(
            parameter.numel() * (6 if parameter.requires_grad else 4) * (active if is_routed(name) else 1)
            for name, parameter in model.named_parameters()
            if id(parameter) not in outside
        )
        self._head: int = head.numel() * (6 if head.requires_grad else 4)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention: int = 6 * config.num_hidden_layers * config.num_attention_heads * width

    def update(self, rows: Sequence[Row]) -> float:
        """FLOPs of one update on these rows."""
        prompts = [len(ids) for ids in {row.prompt_ids.tobytes(): row.prompt_ids for row in rows}.values()]
        predicted = sum(len(row.response_ids) for row in rows)
        pairs = sum(length**2 for length in prompts)
        pairs += sum(row.tokens**2 - len(row.prompt_ids) ** 2 for row in rows)
        return float(self._body * (sum(prompts) + predicted) + self._head * predicted + self._attention * pairs)


def peak_flops(device: torch.device, tflops: float | Literal["auto"]) -> float | None:
    """Peak FLOPs per second of a device, None if unknown."""
    if tflops != "auto":
        return tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((known * 1e12 for part, known in _PEAK_TFLOPS if part in name), None)


class Throughput:
    """Tokens per second, and MFU where the peak of the device is known."""

    def __init__(self, model: PreTrainedModel, peak_tflops: float | Literal["auto"], devices: int = 1) -> None:
        self._flops = ModelFlops(model)
        peak = peak_flops(model.device, peak_tflops)
        self._peak = None if peak is None else peak * devices

    def metrics(self, batch: TrainBatch, seconds: float) -> dict[str, float]:
        """Metrics of a step that took `seconds`; {} if the clock did not advance."""
        if seconds <= 0:
            return {}
        tokens = sum(row.tokens for row in batch.rows)
        mfu = {} if self._peak is None else {"mfu": self._flops.update(batch.rows) / seconds / self._peak}
        return {"tokens_per_second": tokens / seconds, **mfu}
