"""The configuration of a run: one TOML file for all roles, one frozen object per section.

Relative paths are relative to the directory the command runs in. The docstring under a field is its
documentation: `docs/configuration.md` and the comments of `tba config show` are made from it.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
_GPU_LIST = r"^(cpu|all|((\d+(-\d+)?|GPU-[^,\s]+|MIG-[^,\s]+)(,|$))+)$"
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# One value, several to choose from, or the ends of a range.
Explored = float | tuple[float, ...] | dict[Literal["min", "max"], float]


TASKS = ("arithmetic", "gsm8k")
_OWN_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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

    name: str = "arithmetic"
    """The task: arithmetic, gsm8k, or your own as `package.module:factory` on PYTHONPATH, see docs/rewards.md."""
    train: str = ""
    """gsm8k: a local jsonl file with `question` and `answer`, or a hub id such as openai/gsm8k."""
    test: str = ""
    """gsm8k: the held-out jsonl file; empty takes the hub id's test split."""
    limit: NonNegative = 0
    """Use only the first so many training prompts; 0 is all."""
    held_out_limit: NonNegative = 0
    """Use only the first so many held-out prompts; 0 is all."""
    reward_workers: NonNegative = 2
    """Processes per searcher that score responses; 0 scores in the searcher, where no limit holds."""
    reward_seconds: PositiveFloat = 10.0
    """A response that is not scored in so many seconds becomes a row with an error, and its worker is replaced."""
    reward_memory_mib: Annotated[int, Field(ge=128)] = 1024
    """Memory of one reward worker, in MiB."""
    load_seconds: PositiveFloat = 600.0
    """A reward worker that has not loaded the task in so many seconds is started again."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in TASKS and not _OWN_TASK.fullmatch(name):
            raise ValueError(
                f"no task has this name; they are {', '.join(TASKS)}, and your own as `package.module:factory`"
            )
        return name

    @property
    def is_own(self) -> bool:
        """It comes from a module of the user."""
        return self.name not in TASKS


class RewardModelSection(Section):
    """A sequence classifier whose logit is a part of the reward, beside the task's own: docs/rewards.md."""

    path: str = ""
    """A Hugging Face model directory, or a hub id, of a classifier with one label; empty uses none."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")] = "auto"
    """Where it computes, in a process of its own for each searcher: auto is the searcher's device, whose
    search.gpu_memory_utilization must leave room for it; `cuda:1` is the GPU that nvidia-smi calls 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights; auto is that of the checkpoint."""
    weight: float = 1.0
    """The reward is the task's own plus this times the logit."""
    template: Literal["concatenation", "chat"] = "concatenation"
    """What it reads. concatenation: prompt and response as one text; chat: a turn of the user and one of the assistant,
    by the chat template of its tokenizer."""
    batch_tokens: Positive = 16384
    """Tokens of one forward pass, padding included; a single pair may have more."""
    max_length: NonNegative = 0
    """Longest pair of prompt and response in its tokens; a longer one becomes a row with an error. 0 is the model's own
    limit."""
    time_limit_seconds: PositiveFloat = 60.0
    """Pairs of a forward pass that takes longer, in seconds, become rows with an error, and the process is replaced; so
    do pairs that wait longer for one that does not start."""
    load_seconds: PositiveFloat = 600.0
    """Time to load the model, in seconds, before the process is replaced."""


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
    """m: the probability that a group comes from the most recent data, else it is chosen by priority."""
    recency_fraction_final: Fraction | Literal["same"] = "same"
    """m from training step `recency_anneal_steps` on, linear in between; same keeps `recency_fraction`."""
    recency_anneal_steps: NonNegative = 0
    """Training steps over which m goes from `recency_fraction` to `recency_fraction_final`."""
    recency_window: NonNegative = 3
    """Data of at most so many optimiser steps of staleness counts as recent (the paper: 2k - 1)."""
    prompt_priority: Literal["uniform", "recency", "softmax", "rank"] = "uniform"
    """The priority rule across prompts. uniform: all alike; recency: those with recent data that no batch had yet,
    then those with recent data, then any; softmax: by inverse_temperature x score; rank: by rank_exponent and the
    rank of the score. The score of a prompt is the mean reward of its sampleable trajectories."""
    trajectory_priority: Literal["uniform", "recency", "softmax", "rank"] = "softmax"
    """The priority rule within a prompt. uniform: all alike; recency: the recent ones alike, or all if none is recent;
    softmax: by inverse_temperature x reward; rank: by rank_exponent and the rank of the reward."""
    inverse_temperature: NonNegativeFloat = 0.0
    """softmax draws with probability proportional to exp(this x reward); 0 is uniform."""
    rank_exponent: NonNegativeFloat = 1.0
    """rank draws the i-th best with probability proportional to 1 / i^this; 0 is uniform."""
    flat_group_weight: Fraction = 1.0
    """A factor on the chance of a prompt whose sampleable rewards are all equal (or whose only one it is): 1 is no
    preference, 0 takes such a prompt only when there is nothing else of the same recency. Under
    `prompt_priority = "rank"` anything below 1 ranks them behind all others."""
    replacement: Literal["if_needed", "never", "always"] = "if_needed"
    """Whether a group may hold a trajectory twice. if_needed: where a prompt has fewer than train.samples_per_prompt;
    never: such a prompt is not sampled. A prompt is at most once in a batch in any case."""
    max_staleness: NonNegative | Literal["unbounded"] = "unbounded"
    """Most optimiser steps between the policy that generated and the step that trains; 0 is synchronous."""
    min_fill: NonNegative = 0
    """Trajectories that must be sampleable before the first step."""
    samples_per_insert: PositiveFloat | Literal["unbounded"] = "unbounded"
    """How often a trajectory is trained on, on average: the trainer waits while it would be more often, and searchers
    wait while it is less often by more than `samples_per_insert_slack`."""
    samples_per_insert_slack: Positive | Literal["auto"] = "auto"
    """How many trajectories searchers may be ahead of `samples_per_insert`; auto is twice the least that works."""
    prompt_cap: Positive = 100
    """Trajectories kept for sampling per prompt; the others stay in history."""
    prompt_keep: Literal["newest", "best", "reservoir"] = "newest"
    """Which of a prompt's trajectories are kept: the newest; those with the highest reward, of equal ones the newer;
    or a uniform sample of all that came, drawn by run.seed."""
    max_trajectories: Positive | Literal["unbounded"] = "unbounded"
    """Trajectories kept for sampling in all; the oldest leave, and stay in history."""
    max_payload_bytes: Positive | Literal["unbounded"] = "unbounded"
    """Bytes of token ids, log-probabilities and masks kept for sampling in all; the oldest leave sampling."""
    dedup: bool = True
    """Sample only the newest of identical responses to a prompt; all of them stay in history."""


class SearchSection(Section):
    """Generation: the engine, and how it explores."""

    engine: Literal["transformers", "vllm"] = "vllm"
    """The generation engine."""
    gpus: Annotated[str, Field(pattern=_GPU_LIST)] = "all"
    """GPUs, one searcher each: `0-6`, `0,2,4`, UUIDs, `all`, or `cpu`."""
    tensor_parallel: Positive = 1
    """vLLM: GPUs that share one engine; `gpus` is cut into consecutive groups of so many, one searcher each."""
    cpu_searchers: Positive = 1
    """Number of searchers when gpus is `cpu`."""
    samples_per_prompt: Positive = 24
    """S: responses generated for each leased prompt, handed over together."""
    max_in_flight: Positive = 256
    """Responses generated at the same time by one engine."""
    temperature: Explored = 1.0
    """Sampling temperature: one value, several to draw from (`[0.7, 1.0, 1.3]`), or a range (`{min = 0.7, max = 1.3}`).
    0 is greedy. Each trajectory records its own; the trainer compares log-probabilities only with those sampled at
    temperature 1 and top_p 1."""
    top_p: Explored = 1.0
    """Nucleus sampling: the smallest set of tokens with this much probability. One value, several or a range, drawn
    apart from the temperature."""
    explore: Literal["sample", "group", "searcher"] = "sample"
    """What temperature and top_p are drawn for, where they are several or a range: each response, each prompt's
    responses together, or each searcher once. All follow from run.seed."""
    max_tokens: Positive = 512
    """Longest response, in tokens."""
    reference_logprobs: bool = False
    """Compute the reference log-probabilities in the searcher (the paper's way), with a frozen copy of model.path on
    its device, in a thread beside generation; else the trainer computes those of the trajectories that it samples."""
    spool_dir: Path | None = None
    """Directory where searchers keep what the buffer has not acknowledged; by default `spool` in run.dir. One that
    died is delivered for by the next one that starts with this directory on the same machine."""
    spool_mib: PositiveFloat = 512.0
    """Size of one searcher's spool in MiB, at which it stops to generate until the buffer is back."""
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
    keep_prefix_cache: bool = False
    """vLLM: let prompts reuse keys and values that older weights computed. Faster, and the log-probabilities that are
    recorded are then those of mixed weights."""
    weights_from: Literal["auto", "path", "trainer"] = "auto"
    """Where snapshots come from. path: the trainer's directory, on a shared file system; trainer: its
    `train.serve_snapshots`; auto: the path where it is there, else the trainer."""
    weights_dir: Path | None = None
    """Where a node keeps the weights that its searchers serve or prepare, three to four times the model, and once more
    with `lora.publish = "adapter"`: a local disk, or /dev/shm. By default a directory of the user and the run in the
    system's temporary directory."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _check_temperature(cls, value: Any) -> Any:
        # vLLM takes what is between for 0.01, and the recorded temperature would not be the true one.
        if any(0 < number < 0.01 or number < 0 for number in _explored_numbers(value)):
            raise ValueError("a temperature is 0 (greedy) or at least 0.01")
        return value

    @field_validator("top_p", mode="before")
    @classmethod
    def _check_top_p(cls, value: Any) -> Any:
        if not all(0 < number <= 1 for number in _explored_numbers(value)):
            raise ValueError("top_p is more than 0 and at most 1")
        return value


class TrainSection(Section):
    """The optimiser, the objective, and when to publish and save."""

    gpu: Annotated[str, Field(pattern=_GPU_LIST)] = "0"
    """The trainer's GPU, or several (`6,7`, `4-7`, UUIDs, `all`) that train together by FSDP2, or `cpu`."""
    processes: Positive = 1
    """Processes that train together when gpu is `cpu`: by FSDP2 as on GPUs, to try it."""
    sharding: Literal["auto", "all", "optimizer"] = "auto"
    """What several processes divide. all: weights, gradients and optimiser states; each layer is gathered for each pass
    and its gradient reduced after it. optimizer: during a step each process keeps whole weights and gradients, gathered
    and reduced once. auto is optimizer where that takes at most half of a GPU's memory."""
    steps: Positive = 1000
    """Optimiser steps of the whole run."""
    prompts_per_step: Positive = 7
    """B: prompt groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 20
    """K: trajectories of one prompt in a batch; at least 2, since log Z is estimated over them."""
    prefetch: bool = True
    """Ask for the next batch while this one trains. It is then drawn about one step earlier than it would be, from
    what had come by then. With buffer.max_staleness = 0 it is never asked ahead: there is no data for it yet."""
    micro_batch_tokens: Positive = 16384
    """Tokens (padding not counted) whose activations are held at once; a whole group is the least."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: a micro-batch is one row of all its sequences, without padding, and attention stays within each. padded:
    passes over rows of like length. auto packs on a GPU in bfloat16 where the model allows it, and pads on a CPU."""
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
    beta_anneal_stop: NonNegative | Literal["off"] = "off"
    """Step at which annealing stops early: from it on beta is `beta_final` at once (the paper's TL;DR runs: a slope
    over half of the run, cut at an eighth of it). off goes down to the end."""
    max_skipped_steps: Positive = 5
    """Steps in a row whose loss or gradient is not finite, and which change no weights, before the trainer saves a
    checkpoint and stops. docs/metrics.md says what a skipped step is."""
    publish_every: Positive = 2
    """k: a snapshot for the searchers every so many steps."""
    keep_snapshots: Positive = 4
    """Newest snapshots kept on disk."""
    keep_snapshot_every: NonNegative = 0
    """Also keep the snapshots of every so many steps, for evaluation; 0 keeps none."""
    full_snapshot_every: Positive = 10
    """Every so many snapshots a full one. In between a delta on the one before is published where it is less than half
    as large; the first, the last and those kept for evaluation are full in any case. 1 publishes full ones only."""
    min_free_mib: NonNegative = 512
    """Free disk space, in MiB, that a snapshot must leave: without it the newest one waits, older ones that wait are
    dropped, and training goes on; 0 never waits."""
    serve_snapshots: Annotated[str, Field(pattern=r"^(|tcp://\S+:(\d+|\*)|ipc://\S+)$")] = ""
    """ZeroMQ endpoint (tcp://HOST:PORT) where the trainer serves its snapshots to searchers that do not see run.dir;
    the announcement carries it, with this machine's name for a HOST of `*`. Empty serves none."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. They are written beside training; one that comes due while the one before is still
    being written is left out. Steps after the newest one are repeated on resume, with the same batches."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept on disk."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    threads: NonNegative = 0
    """CPU threads for torch; 0 leaves it to torch."""


_POLICY_GRADIENTS = ("reinforce", "rloo", "tba_prime", "grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo")


class ObjectiveSection(Section):
    """What the trainer minimises: docs/objectives.md has the formulas side by side, and when to use which."""

    name: Literal[
        "tb",
        "tb_learned_z",
        "tba_prime",
        "reinforce",
        "rloo",
        "grpo",
        "dr_grpo",
        "ppo_clip",
        "proximal_rloo",
        "cispo",
        "online_dpo",
        "oapl",
    ] = "tb"
    """The objective. train.beta is its KL coefficient, and the temperature of online_dpo and oapl."""
    kl: Literal["auto", "none", "reference", "ema"] = "auto"
    """Policy gradients (reinforce to cispo, and tba_prime): the anchor of the KL in the reward. reference: the
    reference policy; ema: a moving average of the weights, estimated from the log-probabilities that came with the
    response, without a forward pass; none: no KL. auto is reference for tba_prime and none for the others."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """kl = "ema": decay of the moving average per optimiser step."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """grpo, dr_grpo, ppo_clip, proximal_rloo: a ratio below 1 - this is clipped."""
    clip_high: PositiveFloat = 0.2
    """grpo, dr_grpo, ppo_clip, proximal_rloo: a ratio above 1 + this is clipped."""
    cispo_cap: PositiveFloat = 5.0
    """cispo: the largest importance weight of a token."""
    truncation: PositiveFloat | Literal["off"] = 8.0
    """tba_prime: the largest importance weight of a token; off weighs every token 1, as in the paper's Eq. 7."""
    value_beta: PositiveFloat | Literal["beta"] = "beta"
    """oapl: the temperature of the value estimate; beta takes train.beta."""
    log_z_learning_rate: PositiveFloat = 1e-3
    """tb_learned_z: constant learning rate of the head that predicts log Z from the prompt."""

    @property
    def anchor(self) -> str:
        """What the KL in the reward is measured against: "none", "reference" or "ema"."""
        if self.kl != "auto":
            return self.kl
        return "reference" if self.name == "tba_prime" else "none"

    @property
    def uses_reference(self) -> bool:
        """Whether the objective needs log-probabilities of the reference policy."""
        return self.name in ("tb", "tb_learned_z", "online_dpo") or self.anchor == "reference"

    @model_validator(mode="after")
    def _kl_is_used(self) -> Self:
        if self.kl != "auto" and self.name not in _POLICY_GRADIENTS:
            raise ValueError(f"objective.kl has no meaning for {self.name}: its anchor is part of the formula")
        return self


class LoraSection(Section):
    """Low-rank adapters (PEFT): what trains instead of the whole model, which stays frozen and is the reference."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: PositiveFloat = 32.0
    """An adapter adds alpha / rank x B A to its weight."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | Literal["all"] = "all"
    """Names of the linear layers that get one, such as `["q_proj", "v_proj"]`; all are all but the output head."""
    publish: Literal["merged", "adapter"] = "merged"
    """merged: weights with the adapters merged in, in full or as deltas. adapter: the base once, then the adapters
    alone, and each searcher merges; docs/operations.md says what that saves and costs. The last snapshot and those of
    `train.keep_snapshot_every` are full in any case, and `train.full_snapshot_every` is not needed."""

    @model_validator(mode="after")
    def _there_are_adapters(self) -> Self:
        if self.publish == "adapter" and not self.rank:
            raise ValueError('lora.publish = "adapter" has no meaning without adapters: set lora.rank')
        return self


class ReferenceSection(Section):
    """The policy that the objective's KL is measured against."""

    kind: Literal["frozen", "reset", "ema"] = "frozen"
    """frozen: the model that training starts from; reset: the policy of every `every`-th step (the paper's TBA');
    ema: a moving average of the policy's weights, brought up to date every `every` steps."""
    every: Positive = 50
    """reset, ema: steps between two references. Each needs its own log-probabilities of what is sampled, which are
    computed once and stored: a small number makes them of little use."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """ema: the part of the old reference that stays in the new one."""


class MetricsSection(Section):
    """Where the trainer's numbers go besides metrics.jsonl: docs/metrics.md says what each one means."""

    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: str = ""
    """Project on Weights & Biases (extra `wandb`; WANDB_MODE=offline writes to run.dir only); empty sends nothing."""
    trackio: str = ""
    """Project on Trackio (extra `trackio`; local, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set); empty sends
    nothing."""
    prometheus: Annotated[str, Field(pattern=r"^(|[^\s:]+:\d+)$")] = ""
    """HOST:PORT where Prometheus may scrape the last step (extra `prometheus`); empty opens no port."""
    entropy: bool = True
    """Measure the entropy of the policy, in the same pass over the logits as the log-probabilities."""
    peak_tflops: PositiveFloat | Literal["auto"] = "auto"
    """Peak of the trainer's device in TFLOP/s, for the model FLOPs utilisation; auto knows some GPUs, and no CPU."""


class EvalSection(Section):
    """Held-out evaluation, greedy."""

    at_end: bool = False
    """`tba run` evaluates the kept snapshots when training is done, and draws the picture."""


class LaunchSection(Section):
    """`tba run`, and `tba search` with several searchers: how children are watched."""

    max_restarts: NonNegative = 5
    """Failures in a row after which a child counts as broken. It is still restarted while another child does its work:
    the launcher gives up when the buffer, the trainer, or all searchers are broken."""
    restart_delay_seconds: NonNegativeFloat = 1.0
    """Pause before a restart, in seconds; doubles with each failure in a row."""
    restart_delay_max_seconds: NonNegativeFloat = 60.0
    """Longest pause before a restart, in seconds."""
    stable_seconds: PositiveFloat = 600.0
    """A child that ran for so long, in seconds, has its failures forgotten."""
    summary_seconds: PositiveFloat = 10.0
    """`tba search` with several searchers: seconds between two summary lines."""
    drain_seconds: PositiveFloat = 20.0
    """Time for a child to end after SIGTERM, before it is killed."""


class Config(Section):
    """The whole configuration."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    reward_model: RewardModelSection = RewardModelSection()
    buffer: BufferSection = BufferSection()
    search: SearchSection = SearchSection()
    train: TrainSection = TrainSection()
    objective: ObjectiveSection = ObjectiveSection()
    lora: LoraSection = LoraSection()
    reference: ReferenceSection = ReferenceSection()
    metrics: MetricsSection = MetricsSection()
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
    def spool(self) -> Path:
        """Directory of the searchers' spools."""
        return self.search.spool_dir or self.run.dir / "spool"

    @property
    def max_staleness(self) -> int | None:
        """The staleness limit in optimiser steps, None for unbounded."""
        return _bound(self.buffer.max_staleness)

    @property
    def recency_fraction_final(self) -> float | None:
        """m at the end of its schedule, None where it stays what it is."""
        final = self.buffer.recency_fraction_final
        return None if final == "same" else final

    @property
    def samples_per_insert(self) -> float | None:
        """How often a trajectory is trained on, on average; None for unbounded."""
        return _bound(self.buffer.samples_per_insert)

    @property
    def least_slack(self) -> int:
        """The smallest `samples_per_insert_slack`: one batch, and one lease, so that never both sides wait."""
        ratio = self.samples_per_insert or math.inf
        batch = self.train.prompts_per_step * self.train.samples_per_prompt
        return math.floor(batch / ratio) + 1 + self.search.samples_per_prompt

    @property
    def samples_per_insert_slack(self) -> int:
        """How many trajectories searchers may be ahead."""
        slack = self.buffer.samples_per_insert_slack
        return 2 * self.least_slack if slack == "auto" else slack

    @property
    def max_trajectories(self) -> int | None:
        """Most sampleable trajectories, None for unbounded."""
        return _bound(self.buffer.max_trajectories)

    @property
    def max_payload_bytes(self) -> int | None:
        """Most sampleable bytes, None for unbounded."""
        return _bound(self.buffer.max_payload_bytes)

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

    @model_validator(mode="after")
    def _a_moving_reference_is_used(self) -> Self:
        kind = self.reference.kind
        if kind == "frozen":
            return self
        if self.search.reference_logprobs:
            raise ValueError(
                f'reference.kind = "{kind}" moves in the trainer: searchers cannot compute its log-probabilities, set '
                "search.reference_logprobs = false"
            )
        if self.lora.rank:
            raise ValueError(f'reference.kind = "{kind}" has no meaning with adapters: their base is the reference')
        if not self.objective.uses_reference:
            raise ValueError(f'reference.kind = "{kind}" has no meaning for {self.objective.name} without a reference')
        return self

    @model_validator(mode="after")
    def _batches_can_be_had(self) -> Self:
        """A batch that the remover or the replacement rule makes impossible would be waited for without end."""
        buffer, group = self.buffer, self.train.samples_per_prompt if self.buffer.replacement == "never" else 1
        if group > buffer.prompt_cap:
            raise ValueError(
                f'buffer.replacement = "never" needs buffer.prompt_cap >= train.samples_per_prompt = {group}'
            )
        if self.max_staleness is not None and group > self.search.samples_per_prompt:
            raise ValueError(
                f'buffer.replacement = "never" with a bounded buffer.max_staleness needs search.samples_per_prompt >= '
                f"train.samples_per_prompt = {group}: one visit must give a whole group"
            )
        least = max(buffer.min_fill, group * self.train.prompts_per_step)
        if self.max_trajectories is not None and self.max_trajectories < least:
            raise ValueError(f"buffer.max_trajectories = {self.max_trajectories} is less than the {least} of a batch")
        return self

    @model_validator(mode="after")
    def _rates_agree(self) -> Self:
        """The rate limiter must never hold back both sides at once; `tba.buffer.rate_limiter` has the reasons."""
        if self.samples_per_insert is None:
            return self
        if self.samples_per_insert_slack < self.least_slack:
            raise ValueError(
                f"buffer.samples_per_insert_slack = {self.samples_per_insert_slack} must be at least "
                f"{self.least_slack}: what a batch uses up and one visit of a prompt, or both sides would wait"
            )
        samples, responses = self.train.samples_per_prompt, self.search.samples_per_prompt
        if self.max_staleness is not None and self.samples_per_insert * responses < samples:
            raise ValueError(
                f"buffer.samples_per_insert = {self.samples_per_insert:g} with a bounded buffer.max_staleness must be "
                f"at least train.samples_per_prompt / search.samples_per_prompt = {samples / responses:g}: fresh data "
                "is limited to what the batches need"
            )
        return self


def _explored_numbers(value: Any) -> list[float]:
    """The numbers of an `Explored`, for checks. Raises ValueError if it is none."""
    if isinstance(value, dict):
        if set(value) != {"min", "max"}:
            raise ValueError("a range has two ends: { min = 0.7, max = 1.3 }")
        numbers = [value["min"], value["max"]]
    else:
        numbers = list(value) if isinstance(value, list | tuple) else [value]
    if not numbers:
        raise ValueError("the list is empty: name at least one value")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("write a number, a list of numbers, or a range { min = 0.7, max = 1.3 }")
    if isinstance(value, dict) and value["min"] > value["max"]:
        raise ValueError("the range's min is above its max")
    return numbers


_Number = TypeVar("_Number", int, float)


def _bound(value: _Number | Literal["unbounded"]) -> _Number | None:
    return None if value == "unbounded" else value
