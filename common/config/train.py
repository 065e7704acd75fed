"""[train], [objective], [lora], [reference] and [metrics]: the trainer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tba.common.config.section import GpuList, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, matching

Decay = Annotated[float, Field(ge=0, lt=1)]
# Their formulas include an anchor, so `objective.kl` has no effect on them.
_ANCHORED = ("tb", "tb_learned_z", "tb_prefix", "flowrl", "online_dpo", "oapl", "distill")
# Their advantage is the reward minus a mean of the group, so it can be raised by that mean.
_CENTRED = ("tb", "tb_stale", "tba_prime", "rloo", "dr_grpo", "ppo_clip", "proximal_rloo")
# Their formulas include pi / mu, of tokens or otherwise.
_RATIO = ("grpo", "dr_grpo", "ppo_clip", "ppo", "cispo", "proximal_rloo", "flowrl", "oapl")
# Their gradient is an advantage times grad log pi, without a ratio.
_UNWEIGHTED = ("tb", "reinforce", "rloo")
# On stale data they explain what an environment did by chance with the actions after it.
_EXPLAINS_LUCK = ("tb", "tb_learned_z", "tb_prefix", "flowrl", "oapl")
# The paper's Eq. 7 with truncated importance weights of tokens.
_WEIGHTED_TOKENS = ("tb_stale", "tba_prime")


class TrainSection(Section):
    """The trainer: devices, batches, the optimiser, snapshots and checkpoints."""

    gpu: GpuList = "0"
    """The trainer's GPU, several (`6,7`, `4-7`, UUIDs, `all`) that train together with FSDP2, or `cpu`."""
    processes: Positive = 1
    """Processes that train together with FSDP2 if gpu is `cpu`, to try out what GPUs do."""
    sharding: Literal["auto", "node", "all", "optimizer"] = "auto"
    """What is sharded over processes. all: weights, gradients and optimiser states; optimizer: these states; node: each
    node has a whole model, sharded over its GPUs (HSDP); auto: what communicates least and fits by the estimate of
    check_memory."""
    steps: Positive = 1000
    """Optimiser steps of the whole run."""
    prompts_per_step: Positive = 7
    """B: prompt groups in a batch."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 20
    """K: trajectories per prompt in a batch, at least 2."""
    micro_batch_tokens: Positive = 16384
    """Maximum tokens per micro-batch, without padding, a prompt for each of its samples. Larger groups are split, for
    one more forward pass."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: a micro-batch is one row without padding; samples share their prompt. padded: rows of similar length.
    auto packs on a CPU, and on a GPU in bfloat16, if the model supports it."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "wsd"
    """Schedule after the warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: NonNegative | Literal["auto"] = "auto"
    """Steps of linear warm-up; the first has rate 0. auto is 50, but at most a tenth of the run."""
    decay_steps: NonNegative | Literal["auto"] = "auto"
    """wsd: steps of decay at the end; auto is 500, but at most half of the run."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay of matrices, not of norms, biases and a learned log Z."""
    adam_betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    learning_rate_by_ess: bool = False
    """Multiply the learning rate by the square root of effective_sample_ratio (VCPO)."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm at which the gradient is clipped."""
    beta: PositiveFloat = 0.012
    """KL coefficient at the first step."""
    beta_final: PositiveFloat = 0.004
    """KL coefficient from step `beta_anneal_steps` on."""
    beta_anneal_steps: NonNegative = 500
    """Steps over which beta is annealed linearly; 0 uses `beta_final` from the start."""
    beta_anneal_stop: NonNegative | Literal["off"] = "off"
    """Step from which beta is `beta_final` in any case."""
    publish_every: Positive = 2
    """k: steps between two snapshots."""
    snapshots_in: Literal["auto", "memory", "disk"] = "auto"
    """memory: only the first snapshot, the last and those of `keep_snapshot_every` go to run.dir; the others stay in
    `search.weights_dir`. disk: all go to run.dir, which other machines may mount. auto: memory if `buffer.address` is
    on this machine or `serve_snapshots` is set, else disk."""
    keep_snapshots: Positive = 4
    """Newest snapshots to keep on disk (`snapshots_in`)."""
    keep_snapshot_every: NonNegative = 0
    """Also keep a snapshot every this many steps, for evaluation; 0: none."""
    min_free_mib: NonNegative = 512
    """Free disk space, in MiB, that a snapshot must leave, or it waits; 0 never waits."""
    serve_snapshots: Annotated[
        str, matching(r"|tcp://\S+:(\d+|\*)|ipc://\S(.*\S)?", "tcp://HOST:PORT or ipc://PATH")
    ] = ""
    """ZeroMQ endpoint (tcp://HOST:PORT) where the trainer serves its snapshots to searchers without access to run.dir;
    HOST `*` is announced as the name of this machine."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints, after the newest of which a resume repeats the batches."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time. Not for models random in training."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: float32 weights, gradients and optimiser states are in host memory. Not with adapters."""
    check_memory: bool = True
    """Refuse to start if the estimated memory (docs/scaling.md) exceeds that of the GPU or of the host."""
    threads: NonNegative = 0
    """CPU threads of torch; 0: its default."""

    def keeps_snapshot(self, step: int) -> bool:
        """Whether the snapshot of a step stays on disk: the last one, and each of `keep_snapshot_every`."""
        every = self.keep_snapshot_every
        return step >= self.steps or bool(every and step % every == 0)


class ObjectiveSection(Section):
    """The loss of the trainer. docs/objectives.md compares the formulas, and says when to use which."""

    name: Literal[
        "tb",
        "tb_stale",
        "tb_learned_z",
        "tb_prefix",
        "flowrl",
        "tba_prime",
        "reinforce",
        "rloo",
        "grpo",
        "dr_grpo",
        "ppo_clip",
        "ppo",
        "proximal_rloo",
        "cispo",
        "online_dpo",
        "oapl",
        "distill",
    ] = "tb"
    """train.beta is its KL coefficient, and the temperature of online_dpo and oapl."""
    imitation: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """lambda, which keeps good responses in stale data: centred advantages grow by lambda x (the mean reward of the
    others in the group - reward_floor). auto is 1 for tb_stale and 0 for the others."""
    reward_floor: float | Literal["group"] = "group"
    """imitation: the reward from which it counts, or group: by the other responses (docs/objectives.md)."""
    taper: Literal["off", "response", "mean"] = "off"
    """tb, rloo, reinforce, and tb_stale and tba_prime with truncation = "off": the weight of a response of negative
    advantage. response: min(1, pi/mu); mean: its geometric mean over the tokens, for long responses; off: 1."""
    kl: Literal["auto", "none", "reference", "ema"] = "auto"
    """Policy gradients (reinforce to cispo, tb_stale, tba_prime): the anchor of the KL term in the reward. reference:
    the reference policy; ema: a moving average of the weights, without a forward pass; none. auto is reference for
    tb_stale and tba_prime, none for the others."""
    clip_high: PositiveFloat = 0.2
    """grpo, dr_grpo, ppo_clip, ppo, proximal_rloo, flowrl: a ratio above 1 + this is clipped, and one below 0.8."""
    truncation: PositiveFloat | Literal["off"] = 8.0
    """tb_stale, tba_prime, distill: the maximum importance weight of a token; off gives every token weight 1."""
    mean_kl: Literal["sampler", "policy"] = "sampler"
    """tb_stale, tba_prime: whose mean KL over the group is subtracted from the KL of each response. sampler holds the
    level of the log-probabilities on stale data; policy is the paper's Eq. 7."""
    log_z: Literal["prompt", "turn"] = "prompt"
    """tb: what has a log Z. prompt: each prompt. turn: each turn's history, which keeps the optimum on stale data of a
    random environment (docs/objectives.md)."""
    value_beta: PositiveFloat | Literal["beta"] = 1.0
    """oapl: the temperature of the value; beta uses train.beta, which was worse on stale data."""

    @property
    def anchor(self) -> str:
        """The anchor of the KL term in the reward: "none", "reference" or "ema"."""
        if self.kl != "auto":
            return self.kl
        return "reference" if self.weights_tokens else "none"

    @property
    def imitation_weight(self) -> float:
        """The lambda of the imitation term."""
        if self.imitation != "auto":
            return self.imitation
        return 1.0 if self.name == "tb_stale" else 0.0

    @property
    def lacks_imitation(self) -> bool:
        """Whether imitation could be turned on."""
        return self.name in _CENTRED and not self.imitation_weight

    @property
    def weights_tokens(self) -> bool:
        """Whether it is Eq. 7 of the paper with importance weights of tokens."""
        return self.name in _WEIGHTED_TOKENS

    @property
    def uses_ratio(self) -> bool:
        """Whether the loss depends on the log-probabilities with which responses were sampled."""
        weighted = self.weights_tokens and (
            self.truncation != "off" or (self.mean_kl == "sampler" and self.anchor != "none")
        )
        weighted = weighted or (self.name == "distill" and self.truncation != "off")
        return self.name in _RATIO or weighted or self.anchor == "ema" or self.taper != "off"

    @property
    def explains_luck(self) -> bool:
        """Whether its optimum is another one on stale data of an environment that is random."""
        return self.name in _EXPLAINS_LUCK and self.log_z == "prompt"

    @property
    def uses_reference(self) -> bool:
        """Whether the objective needs log-probabilities of the reference policy."""
        anchored = self.name in _ANCHORED and self.name != "oapl"
        return anchored or self.anchor == "reference"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kl != "auto" and self.name in _ANCHORED:
            raise ValueError(
                f"objective.kl has no effect for {self.name}, whose formula includes its anchor: remove it"
            )
        if self.log_z == "turn" and (self.name != "tb" or self.imitation_weight or self.taper != "off"):
            raise ValueError(
                f'objective.log_z = "turn" is for tb without imitation and taper: remove it, or set objective.name = '
                f'"tb" ({self.name} has no log Z, or only one of the prompt), imitation = 0 and taper = "off"'
            )
        if self.imitation_weight and self.name not in _CENTRED:
            raise ValueError(
                f"objective.imitation has no meaning for {self.name}, whose advantage is not the reward minus the mean "
                f"of the group: remove it, or use one of {', '.join(_CENTRED)}"
            )
        unweighted = self.name in _UNWEIGHTED or (self.weights_tokens and self.truncation == "off")
        if self.taper != "off" and not unweighted:
            reason = (
                'weights tokens by their ratios: set objective.truncation = "off", or remove it'
                if self.weights_tokens
                else f"has its own treatment of ratios, or no advantage: remove it, or use {', '.join(_UNWEIGHTED)}"
            )
            raise ValueError(f"objective.taper has no meaning for {self.name}, which {reason}")
        return self


class SftSection(Section):
    """Supervised fine-tuning by `tba sft`, which takes everything else from the other sections (docs/sft.md)."""

    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate of AdamW; train.learning_rate would be far too small."""


class LoraSection(Section):
    """Low-rank adapters (PEFT). They are trained instead of the model, which stays frozen and is the reference."""

    rank: NonNegative = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: PositiveFloat = 32.0
    """Scale: an adapter adds alpha / rank x B A to its weight."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | Literal["all"] = "all"
    """Linear layers with an adapter, such as `["q_proj", "v_proj"]`; all: but the output head."""
    publish: Literal["merged", "adapter"] = "merged"
    """merged: weights with the adapters merged in. adapter: the base once, then only the adapters, which vLLM applies
    (docs/scaling.md); the last and kept snapshots are full."""

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if self.publish == "adapter" and not self.rank:
            raise ValueError('lora.publish = "adapter" has no effect without adapters: set lora.rank')
        return self


class ReferenceSection(Section):
    """The reference policy of the objective's KL term."""

    kind: Literal["frozen", "reset", "ema"] = "frozen"
    """frozen: the model that training starts from, or `path`; reset: the policy itself, copied every `every` steps (the
    paper's TBA'); ema: a moving average of the policy's weights, refreshed every `every` steps."""
    path: str = ""
    """frozen: another model as the reference, such as a teacher (docs/objectives.md): a Hugging Face model directory or
    hub id. All tokens of the model must have the same ids in its tokenizer."""
    every: Positive = 50
    """reset, ema: steps between two references."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """ema: the fraction of the old reference in the new one."""


class MetricsSection(Section):
    """Destinations of the trainer's metrics in addition to metrics.jsonl. docs/metrics.md describes each metric."""

    tensorboard: bool = True
    """Write TensorBoard events to run.dir/tensorboard."""
    wandb: str = ""
    """Project on Weights & Biases (extra `wandb`; WANDB_MODE=offline writes only to run.dir)."""
    trackio: str = ""
    """Project on Trackio (extra `trackio`; local without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL)."""
    prometheus: Annotated[str, matching(r"|([^\s:]+:)?[1-9]\d{0,4}", "PORT or HOST:PORT")] = ""
    """PORT or HOST:PORT (127.0.0.1 by default) where the buffer serves all numbers to Prometheus."""
    trace_answers: Annotated[int, Field(ge=0, le=256)] = 0
    """Answers of each step that Weights & Biases and Trackio get as a table."""
    entropy: bool = True
    """Measure the entropy of the policy."""
