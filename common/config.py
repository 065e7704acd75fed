"""The configuration of a run: one TOML file for all roles, one frozen object per section.

Relative paths are relative to the directory the command runs in. The docstring under a field is its
documentation: `docs/configuration.md` and the comments of `tba config show` are made from it.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
_ONE_GPU = r"^(cpu|\d+|GPU-\S+|MIG-\S+)$"
_GPU_LIST = r"^(cpu|all|((\d+(-\d+)?|GPU-[^,\s]+|MIG-[^,\s]+)(,|$))+)$"
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of the sections: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )


class RunSection(Section):
    """What the run is called and where it writes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] = "run"
    """Name of the run: letters, digits, dot, dash and underscore."""
    dir: Path = Path("runs/run")
    """Directory for the database, snapshots, checkpoints and metrics."""
    seed: NonNegative = 0
    """Seed of everything random: prompt order, sampling from the buffer, generation, initialisation."""


class ModelSection(Section):
    """The model to start from."""

    path: str = ""
    """A Hugging Face model directory, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the published weights and of the engines. The trainer's masters are float32."""


class TaskSection(Section):
    """What is asked, and how answers are scored."""

    name: Literal["arithmetic", "gsm8k"] = "arithmetic"
    """The task."""
    train: str = ""
    """gsm8k: a local jsonl file with `question` and `answer`, or a hub id such as openai/gsm8k."""
    test: str = ""
    """gsm8k: the held-out jsonl file; empty takes the hub id's test split."""
    limit: NonNegative = 0
    """Use only the first so many training prompts; 0 is all."""
    held_out_limit: NonNegative = 0
    """Use only the first so many held-out prompts; 0 is all."""


class BufferSection(Section):
    """The replay buffer: where it listens, how durable it is, how it samples."""

    address: Annotated[str, Field(pattern=r"^(tcp://\S+:(\d+|\*)|ipc://\S+)$")] = "tcp://127.0.0.1:5757"
    """ZeroMQ endpoint: the buffer binds it and everybody dials it (tcp://HOST:PORT or ipc://PATH)."""
    database: Path | None = None
    """SQLite file; by default `buffer.sqlite` in run.dir."""
    durability: Literal["power", "process"] = "power"
    """What an acknowledged write survives: a power cut (synchronous=FULL) or the death of the process."""
    queue_mib: Positive = 256
    """Requests that wait for a transaction, in MiB; at this limit the server reads no more, and producers wait."""
    min_free_mib: NonNegative = 128
    """Free disk space, in MiB, below which new trajectories are refused until there is more; 0 never refuses."""
    lease_seconds: PositiveFloat = 120.0
    """A searcher that is silent for so long, in seconds, loses its prompts to others."""
    recency_fraction: Fraction = 0.95
    """m: the probability that a group comes from the most recent data, else it is chosen by reward."""
    recency_window: NonNegative = 3
    """Data of at most so many optimiser steps of staleness counts as recent (the paper: 2k - 1)."""
    inverse_temperature: NonNegativeFloat = 0.0
    """Within a prompt, the reward rule draws with probability softmax(this x reward); 0 is uniform."""
    max_staleness: NonNegative | Literal["unbounded"] = "unbounded"
    """Most optimiser steps between the policy that generated and the step that trains; 0 is synchronous."""
    min_fill: NonNegative = 0
    """Trajectories that must be sampleable before the first step."""
    prompt_cap: Positive = 100
    """Newest trajectories kept for sampling per prompt; older ones stay in history."""
    dedup: bool = True
    """Sample only the newest of identical responses to a prompt; all of them stay in history."""


class SearchSection(Section):
    """Generation: the engine, and how it explores."""

    engine: Literal["transformers", "vllm"] = "vllm"
    """The generation engine."""
    gpus: Annotated[str, Field(pattern=_GPU_LIST)] = "all"
    """GPUs, one searcher each: `0-6`, `0,2,4`, `all`, or `cpu`."""
    cpu_searchers: Positive = 1
    """Number of searchers when gpus is `cpu`."""
    samples_per_prompt: Positive = 24
    """S: responses generated for each leased prompt, handed over together."""
    max_in_flight: Positive = 256
    """Responses generated at the same time by one engine."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this much probability."""
    max_tokens: Positive = 512
    """Longest response, in tokens."""
    canary_tolerance: PositiveFloat | None = None
    """Largest |log-probability difference| to the trainer that a hot reload may show on the canary. By default
    1e-3 where model.dtype is float32 and 0.5 where it is bfloat16, whose rounding alone makes up to about 0.15."""
    max_model_len: NonNegative = 0
    """vLLM: longest prompt plus response; 0 is the model's own limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """vLLM on a GPU: the part of its memory that the engine may take."""
    kv_cache_gib: PositiveFloat = 1.0
    """vLLM on a CPU: size of the KV cache in GiB."""
    enforce_eager: bool = False
    """vLLM: run without compilation and CUDA graphs."""


class TrainSection(Section):
    """The optimiser, the objective, and when to publish and save."""

    gpu: Annotated[str, Field(pattern=_ONE_GPU)] = "0"
    """The trainer's GPU, or `cpu`."""
    steps: Positive = 1000
    """Optimiser steps of the whole run."""
    prompts_per_step: Positive = 7
    """B: prompt groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 20
    """K: trajectories of one prompt in a batch; at least 2, since log Z is estimated over them."""
    micro_batch_tokens: Positive = 16384
    """Tokens (padding included) in one forward and backward pass; a whole group is the least."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "wsd"
    """Learning-rate schedule after the warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: NonNegative = 50
    """Steps of linear warm-up."""
    decay_steps: NonNegative = 500
    """wsd: steps of decay at the end."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.99)
    """AdamW moment decays."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""
    beta: PositiveFloat = 0.012
    """KL coefficient at the first step."""
    beta_final: PositiveFloat = 0.004
    """KL coefficient from `beta_anneal_steps` on; linear in between."""
    beta_anneal_steps: NonNegative = 500
    """Steps over which beta goes from `beta` to `beta_final`; 0 keeps `beta_final` from the start."""
    publish_every: Positive = 2
    """k: a snapshot for the searchers every so many steps."""
    keep_snapshots: Positive = 4
    """Newest snapshots kept on disk."""
    keep_snapshot_every: NonNegative = 0
    """Also keep the snapshots of every so many steps, for evaluation; 0 keeps none."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. Steps after the newest one are repeated on resume, with the same batches."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept on disk."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    threads: NonNegative = 0
    """CPU threads for torch; 0 leaves it to torch."""


class EvalSection(Section):
    """Held-out evaluation, greedy."""

    at_end: bool = False
    """`tba run` evaluates the kept snapshots when training is done, and draws the picture."""


class LaunchSection(Section):
    """`tba run`: how the launcher treats its children."""

    max_restarts: NonNegative = 5
    """Times that each child is restarted after it failed or was killed."""
    restart_delay_seconds: NonNegativeFloat = 1.0
    """Pause before a restart; doubles each time."""
    drain_seconds: PositiveFloat = 20.0
    """Time for a child to end after SIGTERM, before it is killed."""


class Config(Section):
    """The whole configuration."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    buffer: BufferSection = BufferSection()
    search: SearchSection = SearchSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    launch: LaunchSection = LaunchSection()

    @property
    def database(self) -> Path:
        """The SQLite file of the buffer."""
        return self.buffer.database or self.run.dir / "buffer.sqlite"

    @property
    def snapshots(self) -> Path:
        """Directory of the published snapshots."""
        return self.run.dir / "snapshots"

    @property
    def checkpoints(self) -> Path:
        """Directory of the trainer's checkpoints."""
        return self.run.dir / "checkpoints"

    @property
    def max_staleness(self) -> int | None:
        """The staleness limit in optimiser steps, None for unbounded."""
        return None if self.buffer.max_staleness == "unbounded" else self.buffer.max_staleness

    @property
    def canary_tolerance(self) -> float:
        """The tolerance of the canary, by the type of the weights unless it is set."""
        return self.search.canary_tolerance or (1e-3 if self.model.dtype == "float32" else 0.5)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.max_staleness is not None and self.max_staleness < self.train.publish_every - 1:
            raise ValueError(
                f"buffer.max_staleness = {self.max_staleness} needs train.publish_every <= "
                f"{self.max_staleness + 1}: with weights published every {self.train.publish_every} steps "
                "no data could be fresh enough"
            )
        if self.task.name == "gsm8k" and not self.task.train:
            raise ValueError("task.train is needed for gsm8k: a jsonl file or a hub id")
        return self
