"""How long a child may take to end after SIGTERM: a trainer saves a checkpoint first."""

from tba.common.config import Config
from tba.deploy.doctor_storage import CHECKPOINT_BYTES, count_parameters

# What a child needs besides a checkpoint: a searcher delivers, the buffer commits.
_SECONDS = 20.0
# Writing, fsync and sha256 after one another on an NVMe disk of 2 GB/s.
_BYTES_PER_SECOND = 0.5e9
# The checkpoint in progress is finished before the last one begins.
_CHECKPOINTS = 2
# For a model whose files are not on this machine.
_UNKNOWN_SECONDS = 600.0


def drain_seconds(config: Config) -> float:
    """Return `launch.drain_seconds` for a child that does not train."""
    setting = config.launch.drain_seconds
    return _SECONDS if setting == "auto" else setting


def trainer_drain_seconds(config: Config) -> float:
    """Return `launch.drain_seconds` for the trainer: with `auto` enough for the checkpoints of its model."""
    if config.launch.drain_seconds != "auto":
        return config.launch.drain_seconds
    # Checkpoints of adapters are small.
    trained = 0 if config.lora.rank else count_parameters(config)
    if trained is None:
        return _UNKNOWN_SECONDS
    return _SECONDS + _CHECKPOINTS * CHECKPOINT_BYTES * trained / _BYTES_PER_SECOND
