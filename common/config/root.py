"""Config: all sections, the values derived from them, and the checks across sections."""

import math
from pathlib import Path
from typing import Self

from pydantic import model_validator

from tba.common import run_files
from tba.common.config.buffer import BufferSection, CurriculumSection
from tba.common.config.run import EvalSection, LaunchSection, ModelSection, RunSection, SecuritySection
from tba.common.config.search import SearchSection
from tba.common.config.section import Section
from tba.common.config.task import MODEL_PART, RewardModelSection, TaskSection
from tba.common.config.train import (
    LoraSection,
    MetricsSection,
    ObjectiveSection,
    ReferenceSection,
    SftSection,
    TrainSection,
)
from tba.common.errors import quantity
from tba.common.wire.socket_files import socket_of

# Of a token id, and of a log-probability, in a message.
_TOKEN_BYTES = 4


class Config(Section):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    reward_model: RewardModelSection = RewardModelSection()
    buffer: BufferSection = BufferSection()
    curriculum: CurriculumSection = CurriculumSection()
    search: SearchSection = SearchSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    objective: ObjectiveSection = ObjectiveSection()
    lora: LoraSection = LoraSection()
    reference: ReferenceSection = ReferenceSection()
    metrics: MetricsSection = MetricsSection()
    eval: EvalSection = EvalSection()
    launch: LaunchSection = LaunchSection()
    security: SecuritySection = SecuritySection()

    @property
    def address(self) -> str:
        """The ZeroMQ endpoint of the buffer."""
        return f"ipc://{socket_of(self.run.dir)}" if self.buffer.address == "auto" else self.buffer.address

    @property
    def database(self) -> Path:
        return self.buffer.database or self.run.dir / run_files.DATABASE

    @property
    def snapshots(self) -> Path:
        return self.run.dir / run_files.SNAPSHOTS

    @property
    def checkpoints(self) -> Path:
        return self.run.dir / run_files.CHECKPOINTS

    @property
    def spool(self) -> Path:
        return self.search.spool_dir or self.run.dir / run_files.SPOOL

    @property
    def max_staleness(self) -> int | None:
        """The staleness limit in optimiser steps, None if unbounded."""
        limit = self.buffer.max_staleness
        return None if limit == "unbounded" else limit

    @property
    def samples_per_insert(self) -> float | None:
        """How often a trajectory is trained on, on average; None if unbounded."""
        limit = self.buffer.samples_per_insert
        return None if limit == "unbounded" else limit

    @property
    def least_slack(self) -> int:
        """The smallest valid `samples_per_insert_slack`: one batch plus one visit. With less, both sides could wait."""
        ratio = self.samples_per_insert or math.inf
        batch = self.train.prompts_per_step * self.train.samples_per_prompt
        return math.floor(batch / ratio) + 1 + self.search.samples_per_prompt

    @property
    def samples_per_insert_slack(self) -> int:
        """How many trajectories searchers may be ahead of the trainer."""
        slack = self.buffer.samples_per_insert_slack
        return 2 * self.least_slack if slack == "auto" else slack

    @property
    def canary_tolerance(self) -> float:
        """The tolerance of the canary; the default depends on the dtype of the weights."""
        return self.search.canary_tolerance or (1e-3 if self.model.dtype == "float32" else 0.5)

    @property
    def needs_kept(self) -> bool:
        """Whether the trainer needs to know which tokens top-p, top-k and min-p left to sample from."""
        objective, rate = self.objective, self.train.learning_rate_by_ess
        trains_sampler = objective.name in ("reinforce", "rloo")
        return self.search.cuts and bool(objective.uses_ratio or objective.imitation_weight or trains_sampler or rate)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        _check(self)
        return self


def _check(config: Config) -> None:
    """Raise ValueError with a sentence that names the keys."""
    for source in config.task.sources:
        if source.reads_files and not source.train:
            raise ValueError(f"task.train is not set, and {source.name} needs it: name a data file or a hub id")
    if config.max_staleness is not None and config.max_staleness < config.train.publish_every - 1:
        raise ValueError(
            f"buffer.max_staleness = {config.max_staleness} needs train.publish_every <= "
            f"{config.max_staleness + 1}: with weights published every {config.train.publish_every} steps "
            "no trajectory could be fresh enough"
        )
    if config.train.offload == "optimizer" and config.lora.rank:
        raise ValueError(
            'train.offload = "optimizer" has no effect with lora.rank: adapters have small states, remove it'
        )
    if config.search.put == "sample" and config.buffer.replacement != "never":
        raise ValueError(
            f'search.put = "sample" with buffer.replacement = "{config.buffer.replacement}" would train on the first '
            'response to a prompt again and again, before the others are there: set buffer.replacement = "never"'
        )
    if config.search.put == "sample" and config.search.samples_per_prompt > config.train.samples_per_prompt:
        raise ValueError(
            f'search.put = "sample" with search.samples_per_prompt = {config.search.samples_per_prompt} would train on '
            f"the first {config.train.samples_per_prompt} responses, the shortest: set it to at most "
            f"train.samples_per_prompt = {config.train.samples_per_prompt}"
        )
    for key in ("kl", "embedder"):
        if getattr(config.eval, key) and not config.eval.samples:
            raise ValueError(f"eval.{key} measures sampled responses, and eval.samples is 0: set it, such as to 16")
    if config.search.guided and config.objective.name in ("tb_learned_z", "flowrl"):
        raise ValueError(
            "search.guided has responses that begin with a part of a demonstration, and objective.name = "
            f"{config.objective.name} learns log Z of the prompt alone: set objective.name = tb, or search.guided = 0"
        )
    judged = any(MODEL_PART in phase.weights for phase in config.task.phases)
    if judged and not config.reward_model.configured:
        raise ValueError(
            f"task.phases has a weight for {MODEL_PART}, and there is none: set reward_model.path, or remove it"
        )
    _check_reference(config)
    _check_ratios(config)
    _check_group(config)
    # Settings under which no batch is possible would make the trainer wait forever.
    check_batches(config)
    _check_rates(config)


def _check_reference(config: Config) -> None:
    kind, teacher = config.reference.kind, config.reference.path
    if config.objective.name == "distill" and not teacher:
        raise ValueError('objective.name = "distill" needs a teacher: set reference.path to a model')
    if teacher and kind != "frozen":
        raise ValueError(f'reference.path is frozen, and reference.kind = "{kind}" is updated: remove one of them')
    if kind == "frozen" and not teacher:
        return
    if config.lora.rank and not teacher:
        raise ValueError(f'reference.kind = "{kind}" has no effect with lora.rank: the base model is the reference')
    if not config.objective.uses_reference:
        named = "reference.path" if teacher else f'reference.kind = "{kind}"'
        raise ValueError(
            f'{named} has no effect: objective.name = "{config.objective.name}" with objective.kl = '
            f'"{config.objective.kl}" uses no reference'
        )


def _check_ratios(config: Config) -> None:
    if config.objective.uses_ratio and not config.search.has_ratios:
        raise ValueError(
            f"objective.name = {config.objective.name} with these settings needs ratios of the policy to its sampler, "
            "which do not exist for greedy decoding: set search.temperature above 0, or objective.name = tb"
        )
    without, remedy = "greedy decoding, which has no ratios", "search.temperature above 0"
    if config.train.learning_rate_by_ess and not config.search.has_ratios:
        raise ValueError(f"train.learning_rate_by_ess has no effect for {without}: remove it, or set {remedy}")
    if config.objective.imitation_weight and config.search.is_greedy:
        raise ValueError(
            f"imitation has no effect for {without}: set objective.imitation = 0, or "
            "sample from several tokens (search.temperature, top_k, top_p, min_p)"
        )
    if config.search.engine == "vllm" and config.needs_kept and (not config.search.top_k or config.search.serve):
        raise ValueError(
            f"objective.name = {config.objective.name} needs ratios of the policy to its sampler, so vLLM must tell "
            "which tokens search.top_p or search.min_p left to sample from, which it does only if every request has a "
            "limit of them: set search.top_k, such as 1000, without search.serve; or set search.top_p = 1 and min_p = 0"
        )


def _check_group(config: Config) -> None:
    """Refuse batches and groups that fit no message: trainer and searchers would end at their first one."""
    # Imports NumPy, which most commands do not need before their configuration is read.
    from tba.common.wire.codec import MAX_REQUEST_FRAME_BYTES
    from tba.common.wire.fields import MAX_PUT_ROWS, MAX_ROWS

    search, train = config.search, config.train
    if train.prompts_per_step * train.samples_per_prompt > MAX_ROWS:
        raise ValueError(
            f"train.prompts_per_step = {train.prompts_per_step} prompts of train.samples_per_prompt = "
            f"{train.samples_per_prompt} trajectories: a batch has at most {MAX_ROWS}"
        )
    if search.samples_per_prompt > MAX_PUT_ROWS:
        raise ValueError(
            f"search.samples_per_prompt = {search.samples_per_prompt}: at most {MAX_PUT_ROWS} are possible"
        )
    tokens, most = search.samples_per_prompt * search.max_tokens, MAX_REQUEST_FRAME_BYTES // _TOKEN_BYTES
    if tokens > most:
        raise ValueError(
            f"search.samples_per_prompt = {search.samples_per_prompt} responses of search.max_tokens = "
            f"{search.max_tokens} are {tokens} tokens, and a message has room for {most}: lower one of them"
        )


def _check_rates(config: Config) -> None:
    """Refuse settings under which the rate limiter could make both sides wait (`tba.buffer.sampling.rate_limiter`)."""
    if config.samples_per_insert is None:
        return
    if config.samples_per_insert_slack < config.least_slack:
        raise ValueError(
            f"buffer.samples_per_insert_slack = {config.samples_per_insert_slack} must be at least "
            f"{config.least_slack}: one batch and one visit, or both sides could wait"
        )
    samples, responses = config.train.samples_per_prompt, config.search.samples_per_prompt
    if config.max_staleness is not None and config.samples_per_insert * responses < samples:
        raise ValueError(
            f"buffer.samples_per_insert = {config.samples_per_insert:g} with a bounded buffer.max_staleness must be "
            f"at least train.samples_per_prompt / search.samples_per_prompt = {samples / responses:g}: fresh data "
            "is limited to what the batches need"
        )


# Of a trajectory: one token of the prompt, one of the response with its log-probability, and one version.
_LEAST_BYTES = 20
# Bytes per token of a response, and those of a prompt, that a limit which is recommended has room for.
_BYTES_PER_TOKEN = 9
_PROMPT_BYTES = 4096


def check_batches(config: Config, prompts: int | None = None) -> None:
    """Raise ValueError, with the keys and a value that works, for settings under which no batch can ever be sampled.

    `prompts` is the number of prompts of the task, if it is known here. Imported trajectories are not considered.
    """
    buffer, asked = config.buffer, config.train.prompts_per_step
    if prompts is not None and prompts < asked:
        has = quantity(prompts, "prompt")
        raise ValueError(f"the task has {has} and a batch needs {asked} different ones: lower train.prompts_per_step")
    least = max(buffer.min_fill, _rows_of_batch(config, prompts or asked))
    most = buffer.max_trajectories
    if most != "unbounded" and most < least:
        together = f"the {config.search.samples_per_prompt} of a visit (search.samples_per_prompt) arrive together"
        why = {
            "newest": f"as {together}",
            "reservoir": f"as a sample may hold the buffer.prompt_cap = {buffer.prompt_cap} of each prompt",
            "both": f"as {together}, and half of the room is theirs",
        }[buffer.keep]
        raise ValueError(
            f"buffer.max_trajectories = {most} is less than the {least} that a batch needs, {why}: set at least {least}"
        )
    if buffer.max_payload_bytes != "unbounded" and buffer.max_payload_bytes < least * _LEAST_BYTES:
        roomy = least * (_BYTES_PER_TOKEN * config.search.max_tokens + _PROMPT_BYTES)
        raise ValueError(
            f"buffer.max_payload_bytes = {buffer.max_payload_bytes} has no room for the {least} trajectories that a "
            f"batch needs: with prompts of up to 1,000 tokens, {roomy} has"
        )
    each = 1 if _repeats(config) else buffer.prompt_cap
    if prompts is not None and buffer.min_fill > prompts * each:
        why = "greedy responses, of which buffer.dedup keeps one" if _repeats(config) else f"buffer.prompt_cap = {each}"
        raise ValueError(
            f"buffer.min_fill = {buffer.min_fill} is never reached: {prompts} prompts with {why} have at most "
            f"{prompts * each} sampleable trajectories: set at most that"
        )


def _repeats(config: Config) -> bool:
    """Whether all responses of a policy to a prompt are equal, and one of them is kept."""
    return config.buffer.dedup and config.search.is_greedy


def _rows_of_batch(config: Config, prompts: int) -> int:
    """Return how many trajectories must be sampleable for a certain batch. Raises as `check_batches`.

    The newest visits count whole, the one before in part. A group of several visits needs the epochs between.
    """
    buffer, samples = config.buffer, config.search.samples_per_prompt
    need = config.train.samples_per_prompt if buffer.replacement == "never" else 1
    if need > buffer.prompt_cap:
        raise ValueError(f'buffer.replacement = "never" needs buffer.prompt_cap >= train.samples_per_prompt = {need}')
    if need > 1 and _repeats(config):
        raise ValueError(
            f'buffer.replacement = "never" needs {need} different responses to a prompt, and greedy ones are equal: '
            "set search.temperature above 0, or buffer.dedup = false"
        )
    # Data of one staleness or of one beginning may end with a visit.
    part = "a bounded buffer.max_staleness" if config.max_staleness is not None else "search.guided"
    if need > samples and (config.max_staleness is not None or config.search.guided):
        raise ValueError(
            f'buffer.replacement = "never" with {part} needs search.samples_per_prompt >= '
            f"train.samples_per_prompt = {need}: one visit must give a whole group"
        )
    kept = 1 if _repeats(config) else min(samples, buffer.prompt_cap)
    visits, asked = -(-need // kept), config.train.prompts_per_step
    if buffer.keep == "reservoir":
        # At worst the others have one trajectory too few each, and are all in the sample.
        return (asked - 1) * buffer.prompt_cap + (prompts - asked + 1) * (need - 1) + 1
    newest = (asked - 1) * kept + need if visits == 1 else kept * ((visits - 1) * prompts + asked)
    return 2 * newest if buffer.keep == "both" else newest
