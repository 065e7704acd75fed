"""Model FLOPs utilisation (MFU): FLOPs that an update needs, divided by what the devices could compute."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tba.common.log import get_logger
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.preflight.shape import active_fraction

log = get_logger(__name__)

# Dense bfloat16 peaks in TFLOP/s with sums in float32, by the name that torch prints, without the vendor. Where a data
# sheet gives the rate with sparsity, this is half of it. A part of a name would take an RTX A1000 for an A100.
_PEAK_TFLOPS = {
    # NVIDIA HGX B300 and B200 (36 PFLOP/s for 8), GB300 NVL72 and GB200 NVL72 (360 PFLOP/s for 72).
    "B300 SXM6 AC": 2250.0,
    "B200": 2250.0,
    "GB300": 2500.0,
    "GB200": 2500.0,
    # NVIDIA H200 Tensor Core GPU; GH200 Grace Hopper Superchip.
    "H200": 989.5,
    "H200 NVL": 835.5,
    "GH200 480GB": 989.5,
    # NVIDIA H100 Tensor Core GPU: SXM, PCIe, NVL; H800 and H20 for China.
    "H100 80GB HBM3": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H800": 989.5,
    "H20": 148.0,
    # NVIDIA A100, A30, A40, A10 Tensor Core GPU; A10G as in AWS G5.
    "A100-SXM4-40GB": 312.0,
    "A100-SXM4-80GB": 312.0,
    "A100-PCIE-40GB": 312.0,
    "A100 80GB PCIe": 312.0,
    "A800-SXM4-80GB": 312.0,
    "A30": 165.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    # NVIDIA L40S, L40, L4.
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    # NVIDIA RTX Blackwell PRO, Ada Professional and Ampere GA102 architecture whitepapers. The Server Edition: four
    # times its 120 TFLOP/s of float32, as for the others.
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "RTX PRO 6000 Blackwell Server Edition": 480.0,
    "RTX 6000 Ada Generation": 364.2,
    "RTX A6000": 154.8,
    # NVIDIA RTX Blackwell, Ada and Ampere GA102 GPU architecture whitepapers: half of the rate with sums in float16.
    "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090": 71.0,
    # AMD Instinct MI300X.
    "Instinct MI300X": 1307.4,
}


class Throughput:
    """Tokens per second, and MFU where the peak of the device is known.

    The FLOPs are those that the forward and backward passes of a batch need: 6 per parameter and token (Kaplan et al.
    2020), 4 where it is frozen; of routed experts only those that compute a token; the head's only where a response
    token is predicted; plus causal attention: 6 x layers x attention width x length^2 per row. A prompt of several rows
    counts once. Padding, recomputation and the reference do not count.
    """

    def __init__(self, model: PreTrainedModel, devices: int = 1) -> None:
        peak = peak_flops(model.device)
        self._peak = None if peak is None else peak * devices
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        outside = {id(head): head.numel(), id(weight := model.get_input_embeddings().weight): weight.numel()}
        active = active_fraction(model)
        # Per parameter and token: 2 for forward, 2 for the gradient of the input, 2 for its own gradient if it trains.
        self._body: float = sum(
            parameter.numel() * (6 if parameter.requires_grad else 4) * (active if ".experts." in name else 1)
            for name, parameter in model.named_parameters()
            if id(parameter) not in outside
        )
        self._head: int = head.numel() * (6 if head.requires_grad else 4)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention: int = 6 * config.num_hidden_layers * config.num_attention_heads * width

    def flops(self, rows: Sequence[Row]) -> float:
        rows = [one for row in rows for one in row.sequences]
        prompts = [len(ids) for ids in {row.prompt_ids.tobytes(): row.prompt_ids for row in rows}.values()]
        predicted = sum(len(row.response_ids) for row in rows)
        pairs = sum(length**2 for length in prompts)
        pairs += sum(row.tokens**2 - len(row.prompt_ids) ** 2 for row in rows)
        return float(self._body * (sum(prompts) + predicted) + self._head * predicted + self._attention * pairs)

    def metrics(self, batch: TrainBatch, seconds: float) -> dict[str, float]:
        """Metrics of a step that took `seconds`; {} if the clock did not advance."""
        if seconds <= 0:
            return {}
        tokens = sum(row.tokens for row in batch.rows)
        mfu = {} if self._peak is None else {"mfu": self.flops(batch.rows) / seconds / self._peak}
        return {"tokens_per_second": tokens / seconds, **mfu}


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOPs per second of a device, None if unknown. Logs the name of a GPU that is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = _PEAK_TFLOPS.get(name.removeprefix("NVIDIA ").removeprefix("AMD "))
    if known is None:
        log.info("no MFU: the peak of this GPU is not known", gpu=name)
        return None
    return known * 1e12
