"""What works on one GPU, within nine minutes: `make gpu-check`. docs/gpu.md says what it checks, and what it found.

    python -m benchmarks.gpu_check --out build/gpu-check     # on a GPU
    python -m benchmarks.gpu_check --tiny --device cpu       # the same code with tiny models, to try the command

It runs from a checkout, without vLLM or a network. Each stage has its own process and time limit.
"""

from typing import NamedTuple


class Stage(NamedTuple):
    """A stage: the module with the function of its name, its time limit, and the least time that is worth a start."""

    name: str
    module: str
    limit: float
    least: float


# In the order of their value: what a short time on a GPU should show first. Times are in seconds.
STAGES = (
    Stage("facts", "facts", 45, 5),
    Stage("kernel", "attention", 30, 5),
    Stage("packed", "attention", 45, 10),
    Stage("step", "steps", 30, 5),
    Stage("speed15", "capacity", 80, 20),
    Stage("run", "running", 140, 40),
    Stage("publish15", "publishing", 45, 10),
    Stage("fsdp", "steps", 45, 10),
    Stage("oom", "capacity", 45, 10),
    Stage("publish7", "publishing", 75, 25),
    Stage("offload", "capacity", 120, 40),
    Stage("speed05", "capacity", 45, 15),
)
