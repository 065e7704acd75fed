"""[run], [model], [eval], [launch] and [security]: name, model, evaluation, supervision, and who may connect."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tba.common.config.section import GpuList, NonNegative, PositiveFloat, Section, matching


class RunSection(Section):
    """The name of the run and where it writes."""

    name: Annotated[
        str, matching(r"[A-Za-z0-9._-]{1,100}", "1 to 100 letters, digits, dots, dashes and underscores")
    ] = "run"
    """Letters, digits, dot, dash and underscore."""
    dir: Path = Path("runs/run")
    """Directory of database, snapshots, checkpoints and metrics."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of all randomness. Below 2^63."""


class ModelSection(Section):
    """The model that training starts from."""

    path: str = ""
    """A Hugging Face model directory or hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of published weights and engines; the trainer's master weights are float32."""
    head_dtype: Literal["model", "float32"] = "model"
    """Dtype of the logits in vLLM and in the trainer: `model` rounds them to model.dtype; with `float32` both sides
    agree better, and a step costs a little more ([measured](benchmarks-models.md#logits-in-float32))."""


class EvalSection(Section):
    """Evaluation on held-out prompts (docs/evaluation.md)."""

    at_end: bool = False
    """Whether `tba run` evaluates kept snapshots (`train.keep_snapshot_every`) and draws the plot at its end."""
    gpu: GpuList | Literal[""] = ""
    """The GPU, or `cpu`, of a searcher that evaluates kept snapshots during `tba run`."""
    samples: NonNegative = 0
    """Sampled answers per held-out prompt, besides the greedy one, for pass@k, diversity and KL."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Temperature of the sampled responses."""
    stored_responses: NonNegative = 500
    """Held-out prompts, from the first, whose greedy response is stored."""
    kl: bool = False
    """Measure the KL divergence of sampled responses from a frozen copy of model.path."""
    embedder: str = ""
    """A sentence encoder (model directory or hub id) for `embedding_distance` (docs/evaluation.md)."""


class LaunchSection(Section):
    """Supervision of child processes by `tba run`, and by `tba search` with several searchers."""

    max_restarts: NonNegative = 5
    """A child with more failures in a row is broken. `tba run` ends without its buffer, its trainer or all
    searchers."""
    drain_seconds: PositiveFloat | Literal["auto"] = "auto"
    """Seconds that a child has to end after SIGTERM. auto is 20, and for a trainer also two checkpoints at 0.5 GB/s:
    386 s for 7 B parameters."""


class SecuritySection(Section):
    """Keys that encrypt and authenticate the connections between machines ([security](security.md))."""

    keys: Path | None = None
    """Directory of this node's key pair and of the keys that it admits (`tba keys`). Without it TCP sockets are open to
    every program that reaches them."""
    insecure: bool = False
    """Whether servers may listen without keys where other machines connect."""
