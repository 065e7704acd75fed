"""[train], [objective], [lora], [reference] and [metrics]: the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.common.config.section import GpuList, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
_POLICY_GRADIENTS = ("reinforce", "rloo", "tba_prime", "grpo", "dr_grpo", "ppo_clip", "proximal_rloo", "cispo")


class TrainSection(Section):
    """The optimiser, the objective, and when to publish and save."""

    gpu: GpuList = "0"
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
    """Tokens (padding not counted) whose activations are held at once; a single trajectory is the least. A group of
    more tokens is computed in pieces, for a forward pass more."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: a micro-batch is one row of all its sequences, without padding, and attention stays within each. padded:
    passes over rows of like length. auto packs on a GPU in bfloat16 where the model allows it, and pads on a CPU."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "wsd"
    """Learning-rate schedule after the warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: NonNegative | Literal["auto"] = "auto"
    """Steps of linear warm-up; the first has a rate of 0. auto is 50, and at most a tenth of the run."""
    decay_steps: NonNegative | Literal["auto"] = "auto"
    """wsd: steps of decay at the end; auto is 500, and at most half of the run."""
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
