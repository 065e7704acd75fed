"""Tiny real models, batches, a real buffer server in a thread and a fake searcher, for tests of the trainer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tba.common.config import Config, LoraSection, ObjectiveSection, ReferenceSection, TrainSection
from tba.common.config.layers import resolve
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.trajectory import Trajectory
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.checks import PATIENCE_SECONDS, not_none, wait_until
from tba.tests.helpers.puts import make_trajectory, put_message
from tba.trainer.batch.batch import Row, TrainBatch
from tba.trainer.distributed import ALONE, Ranks
from tba.trainer.model.adapters import add_adapters
from tba.trainer.model.packing import packs
from tba.trainer.model.reference import Reference
from tba.trainer.model.scorer import enable_gradient_checkpointing, to_bfloat16
from tba.trainer.objectives.from_config import Objective, make_objective
from tba.trainer.step.build import make_scorer
from tba.trainer.step.host_optimizer import take_masters
from tba.trainer.step.learner import Learner

# Settings of [train] with which every step has the same learning rate and beta.
FLAT = {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0, "beta": 0.3, "beta_final": 0.3}
VOCABULARY = 8
LONGEST_RESPONSE = 10
Ids = Sequence[int] | np.ndarray


def objective(name: Any = "tb", **keys: Any) -> Objective:
    """Return an objective with the defaults of the configuration."""
    return make_objective(ObjectiveSection(name=name, **keys), longest_response=LONGEST_RESPONSE)


def tiny_model(
    *, vocabulary: int = VOCABULARY, hidden: int = 16, seed: int = 0, tie: bool = False, layers: int = 1
) -> Any:
    """Return a random Llama of a few thousand parameters."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(shape).eval()


def in_float64(model: Any) -> Any:
    """Convert a Llama to float64, its norms too, which transformers computes in float32 whatever the model's type."""
    for module in model.double().modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(_norm, module)
    return model


def _norm(module: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * normed


def save_tiny_model(directory: Path, **settings: Any) -> Path:
    """Save `tiny_model` as a Hugging Face model directory."""
    tiny_model(**settings).save_pretrained(directory)
    return directory


def make_row(id_: int, prompt: Ids, response: Ids, **fields: Any) -> Row:
    """Return a trajectory. By default all of its tokens count and it is off-policy."""
    values = {
        "sampling_logprobs": np.zeros(len(response), np.float32),
        "loss_mask": np.ones(len(response), np.uint8),
        "on_policy": False,
    }
    return Row(
        id=id_,
        prompt_ids=np.asarray(prompt, np.int32),
        response_ids=np.asarray(response, np.int32),
        **{**values, **fields},
    )


def make_batch(rows: Sequence[Row], rewards: Any, *, step: int = 0, reference: Any = None) -> TrainBatch:
    """Return a batch with the shape of `rewards`, [B][K]."""
    reward_BK = torch.tensor(np.asarray(rewards), dtype=torch.float64)
    missing_BK = torch.full_like(reward_BK, float("nan"))
    return TrainBatch(
        step=step,
        rows=list(rows),
        reward_BK=reward_BK,
        reference_BK=missing_BK if reference is None else torch.tensor(reference, dtype=torch.float64),
        staleness_BK=torch.zeros_like(reward_BK),
    )


def random_batch(seed: int, *, prompts: int = 3, samples: int = 4, step: int = 0) -> TrainBatch:
    """Return a batch of prompts and responses of different lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for b in range(prompts):
        prompt = rng.integers(0, VOCABULARY, size=rng.integers(1, 5))
        for k in range(samples):
            response = rng.integers(0, VOCABULARY, size=rng.integers(1, 9))
            rows.append(make_row(100 * seed + b * samples + k, prompt, response))
    return make_batch(rows, rng.random((prompts, samples)), step=step)


def learner_of(
    policy: Any,
    reference: Any,
    train: TrainSection,
    objective_: Objective,
    *,
    ranks: Ranks = ALONE,
    autocast: bool = False,
    packed: bool = False,
    reference_config: ReferenceSection | None = None,
    **keys: Any,
) -> Learner:
    """Return a learner of two models; other arguments are those of `Learner`."""
    scorer_of = partial(make_scorer, ranks=ranks, autocast=autocast, packed=packed)
    if train.gradient_checkpointing:
        enable_gradient_checkpointing(policy, autocast=autocast)
    scorer = scorer_of(policy)
    other = scorer_of(reference.requires_grad_(False)) if reference else scorer
    settings = reference_config or ReferenceSection()
    return Learner(scorer, Reference(other, settings, "lineage"), train, objective_, ranks=ranks, **keys)


def make_learner(
    ranks: Ranks = ALONE,
    *,
    name: Any = "tb",
    keys: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    initial: int = 1,
    double: bool = False,
    autocast: bool = False,
    lora: LoraSection | None = None,
    trained_adapters: bool = False,
    transpose: bool = False,
    reference: Any = None,
    own: dict[str, Any] | None = None,
    **train: Any,
) -> Learner:
    """Return a learner of a tiny model with settings of `tiny_model`, by default in float32 with FLAT settings.

    Its reference is the random model of the seed `initial`, so that the KL is not zero, or the policy without its
    adapters, which change nothing unless they are `trained_adapters`. `keys` and `reference` are those of the sections,
    `own` arguments of `Learner`; `transpose` stores some weights as after a conversion of their files.
    """
    settings = {"seed": 0} | (model or {})
    policy, other = tiny_model(**settings), None if lora else tiny_model(**settings | {"seed": initial})
    if lora is not None:
        add_adapters(policy, lora)
    with torch.no_grad():
        for key, parameter in policy.named_parameters():
            if trained_adapters and "lora_B" in key:
                parameter.normal_(std=0.1)
    if transpose:
        for layer in policy.model.layers:
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.T.contiguous().T
    if double:
        policy, other = in_float64(policy), other and in_float64(other)
    config, masters = TrainSection.model_validate(FLAT | {"packing": "padded"} | train), None
    packed = packs(config.packing, policy, "cpu", half=autocast)
    if config.offload == "optimizer":
        masters = take_masters(policy, torch.device("cpu"), half=autocast)
    if autocast:
        to_bfloat16(policy if other is None else other.requires_grad_(False))
    return learner_of(
        policy,
        other,
        config,
        objective(name, **(keys or {})),
        ranks=ranks,
        autocast=autocast,
        packed=packed,
        taken=masters,
        reference_config=reference,
        adapter=lora and {"rank": lora.rank},
        **(own or {}),
    )


def run_with_buffer(root: Path, **sections: dict[str, Any]) -> tuple[Config, BufferThread]:
    """Return the configuration of a run of a tiny model, and its buffer. Keyword arguments are sections."""
    train = {
        "prompts_per_step": 2,
        "samples_per_prompt": 3,
        "learning_rate": 0.01,
        "warmup_steps": 0,
        "decay_steps": 2,
        "publish_every": 2,
        "checkpoint_every": 3,
    }
    fixed = sections | {
        "run": {"dir": str(root / "run"), "name": "test"},
        "model": {"path": str(save_tiny_model(root / "model")), "dtype": "float32"},
        "train": train | sections.get("train", {}),
    }
    buffer = BufferThread(Config.model_validate(fixed))
    address = {"buffer": sections.get("buffer", {}) | {"address": buffer.address}}
    return Config.model_validate(fixed | address), buffer


class TrainRun:
    """A run of a tiny model whose buffer is a thread, for processes of `tba train`. Keywords are keys of [train]."""

    def __init__(
        self,
        root: Path,
        make_config_in: Any,
        start_tba: Any,
        *,
        lora: dict[str, Any] | None = None,
        buffer: dict[str, Any] | None = None,
        **train: Any,
    ) -> None:
        root.mkdir(exist_ok=True)
        defaults = {"prompts_per_step": 2, "samples_per_prompt": 3, "warmup_steps": 0, "decay_steps": 2}
        model = {"path": str(save_tiny_model(root / "model", layers=2)), "dtype": "float32"}
        made = make_config_in(root, model=model, train=defaults | train, lora=lora or {}, buffer=buffer or {})
        self.file, self.lines, self.query = made.file, made.lines, made.query
        self.config = resolve(Path(made.file), environment={}).config
        self._start = start_tba
        self.buffer = BufferThread(self.config, address=made.address)

    def start(self, *arguments: str, **options: Any) -> Any:
        """Start `tba train`."""
        return self._start("train", "--cpu", "--config", self.file, *arguments, **options)

    def feed(self) -> None:
        """Put trajectories for all steps once weights are announced."""
        searcher = FakeSearcher(self.buffer.address, prompts=4)
        searcher.wait_for_weights(PATIENCE_SECONDS)
        searcher.put_groups(8)
        searcher.close()


class FakeSearcher:
    """Puts random trajectories through the real client, as a searcher would."""

    def __init__(self, address: str, prompts: int) -> None:
        self.client = BufferClient(address, role="searcher", name="search0")
        self.keys = [f"p{n}" for n in range(prompts)]
        self._sequence = 0
        self.client.call(
            messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=prompts, offset=0, keys=self.keys),
            messages.Registered,
            deadline_seconds=60,
        )

    def wait_for_weights(self, seconds: float = 60.0) -> messages.WeightsRef:
        """Wait for the first snapshot, and return the newest one."""
        heartbeat = messages.Heartbeat(activity="waiting", reason="", weights_version=None, metrics={})

        def newest() -> messages.WeightsRef | None:
            self.client.call(heartbeat, messages.Done, deadline_seconds=120)
            return not_none(self.client.state).weights

        wait_until(newest, seconds, "a snapshot is announced")
        return not_none(not_none(self.client.state).weights)

    def put_groups(self, samples: int, *, version: int = 0, seed: int = 0, broken: Sequence[str] = ()) -> None:
        """Put a group of random responses for every prompt; those of `broken` prompts have rewards up to 1e9."""
        rng = np.random.default_rng(seed)
        group = [self._response(key, n, version, rng) for n, key in enumerate(self.keys) for _ in range(samples)]
        group = [replace(one, reward=1e9 * one.reward) if one.prompt_key in broken else one for one in group]
        self.put(group)

    def put(self, rows: Sequence[Trajectory]) -> None:
        """Put trajectories, and wait for the reply."""
        message, frames = put_message(rows, self._sequence)
        self._sequence += len(rows)
        posted = self.client.post(message, frames)
        while not any(reply.header.id == posted for reply in self.client.poll(1.0)):
            pass

    def _response(self, key: str, n: int, version: int, rng: np.random.Generator) -> Trajectory:
        tokens = rng.integers(0, VOCABULARY, size=int(rng.integers(1, 9))).astype(np.int32)
        return make_trajectory(
            key,
            lease=0,
            version=version,
            tokens=tokens,
            prompt_ids=np.array([1, n % VOCABULARY], np.int32),
            logprobs=np.full(len(tokens), -2.0, np.float32),
            reward=float(rng.random()),
            reward_parts={},
        )

    def close(self) -> None:
        """Close the connection."""
        self.client.close()
