"""From the configuration to a learner, the same on every rank."""

from pathlib import Path

import torch
import xxhash
from transformers import PreTrainedModel

from tba.common.config import Config
from tba.trainer.adapters import add_adapters, fingerprint
from tba.trainer.model import load_model, structure_of
from tba.trainer.objectives.choose import choose
from tba.trainer.ranks import Ranks
from tba.trainer.step import Learner


def build(config: Config, files: Path, device: torch.device, ranks: Ranks) -> tuple[Learner, PreTrainedModel]:
    """A learner at step 0, and its model as the files have it: without adapters, and not divided over ranks.

    Where there are neither, the second is the policy itself, else only its structure. Raises ConfigError, MemoryShort.
    """
    # FSDP takes each layer's part to the GPU itself: never is the whole model there.
    place = device if ranks.size == 1 else torch.device("cpu")
    policy = load_model(files, place)
    plain, reference, adapter = policy, None, None
    if config.lora.rank or ranks.size > 1:
        plain = structure_of(policy)
    if config.lora.rank:
        add_adapters(policy, config.lora)
        # How they are published may change from one start to the next.
        adapter = {**config.lora.model_dump(mode="json", exclude={"publish"}), "base": fingerprint(files)}
    elif config.objective.uses_reference:
        reference = load_model(files, place)
    objective = choose(config.objective, longest_response=config.search.max_tokens)
    autocast = device.type == "cuda" and config.model.dtype == "bfloat16"
    learner = Learner(
        policy,
        reference,
        config.train,
        objective,
        autocast=autocast,
        ranks=ranks,
        reference_config=config.reference,
        entropy=config.metrics.entropy,
        lineage=_lineage(config),
    )
    learner.adapter = adapter
    return learner, plain


def _lineage(config: Config) -> str:
    """What decides the weights of a step, as a few letters."""
    settings = config.model_dump_json(include={"model", "train", "objective", "reference"})
    return xxhash.xxh32_hexdigest(settings.encode())
