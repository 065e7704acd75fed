"""Config: all sections, the values derived from them, and the checks across sections."""

import math
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import model_validator

from tba.common import run_files
from tba.common.config.batches import check_batches
from tba.common.config.buffer import BufferSection
from tba.common.config.curriculum import CurriculumSection
from tba.common.config.run import EvalSection, LaunchSection, ModelSection, RunSection
from tba.common.config.search import SearchSection
from tba.common.config.section import Section
from tba.common.config.security import SecuritySection
from tba.common.config.task import GoldModelSection, RewardModelSection, TaskSection
from tba.common.config.train import (
    LoraSection,
    MetricsSection,
    ObjectiveSection,
    ReferenceSection,
    SftSection,
    TrainSection,
)
from tba.common.wire.socket_files import socket_of

# Of a token id, and of a log-probability, in a message.
_TOKEN_BYTES = 4


class Config(Section):
    """The whole configuration."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    reward_model: RewardModelSection = RewardModelSection()
    gold_model: GoldModelSection = GoldModelSection()
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
        """The SQLite file of the buffer."""
        return self.buffer.database or self.run.dir / run_files.DATABASE

    @property
    def snapshots(self) -> Path:
        """Directory of the published snapshots."""
        return self.run.dir / run_files.SNAPSHOTS

    @property
    def checkpoints(self) -> Path:
        """Directory of the trainer's checkpoints."""
        return self.run.dir / run_files.CHECKPOINTS

    @property
    def spool(self) -> Path:
        """Directory of the searchers' spools."""
        return self.search.spool_dir or self.run.dir / run_files.SPOOL

    @property
    def max_staleness(self) -> int | None:
        """The staleness limit in optimiser steps, None if unbounded."""
        return _bound(self.buffer.max_staleness)

    @property
    def samples_per_insert(self) -> float | None:
        """How often a trajectory is trained on, on average; None if unbounded."""
        return _bound(self.buffer.samples_per_insert)

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

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        _check(self)
        return self


_Number = TypeVar("_Number", int, float)


def _bound(value: _Number | Literal["unbounded"]) -> _Number | None:
    return None if value == "unbounded" else value


def _check(config: Config) -> None:
    """Raise ValueError with a sentence that names the keys."""
    _check_task(config)
    _check_staleness(config)
    _check_reference(config)
    _check_ratios(config)
    _check_batches(config)
    _check_offload(config)
    _check_rates(config)
    _check_eval(config)


def _check_task(config: Config) -> None:
    for source in config.task.sources:
        if source.reads_files and not source.train:
            raise ValueError(f"task.train is not set, and {source.name} needs it: name a data file or a hub id")


def _check_staleness(config: Config) -> None:
    if config.max_staleness is not None and config.max_staleness < config.train.publish_every - 1:
        raise ValueError(
            f"buffer.max_staleness = {config.max_staleness} needs train.publish_every <= "
            f"{config.max_staleness + 1}: with weights published every {config.train.publish_every} steps "
            "no trajectory could be fresh enough"
        )


def _check_reference(config: Config) -> None:
    kind = config.reference.kind
    if kind == "frozen":
        return
    if config.search.reference_logprobs:
        raise ValueError(
            f'reference.kind = "{kind}" changes in the trainer, so searchers cannot compute its log-probabilities: '
            "set search.reference_logprobs = false"
        )
    if config.lora.rank:
        raise ValueError(f'reference.kind = "{kind}" has no effect with lora.rank: the base model is the reference')
    if not config.objective.uses_reference:
        raise ValueError(
            f'reference.kind = "{kind}" has no effect: objective.name = "{config.objective.name}" with objective.kl = '
            f'"{config.objective.kl}" uses no reference'
        )


def _check_ratios(config: Config) -> None:
    if config.objective.uses_ratio and not config.search.has_ratios:
        raise ValueError(
            f"objective.name = {config.objective.name} with these settings needs ratios of the policy to its sampler, "
            "which do not exist for greedy decoding or a nucleus: set search.top_p = 1 and search.temperature above 0, "
            "or objective.name = tb"
        )
    without = "greedy decoding or a nucleus, which have no ratios"
    remedy = "search.top_p = 1 and search.temperature above 0"
    if config.train.learning_rate_by_ess and not config.search.has_ratios:
        raise ValueError(f"train.learning_rate_by_ess has no effect for {without}: remove it, or set {remedy}")
    if config.objective.imitation_weight and not config.search.may_have_ratios:
        raise ValueError(f"imitation has no effect for {without}: set objective.imitation = 0, or {remedy}")
    if config.objective.name in ("reinforce", "rloo") and config.search.has_tempered_nucleus:
        raise ValueError(
            f"objective.name = {config.objective.name} trains the policy at the temperature of sampling, which is not "
            "known of responses of a nucleus: set search.top_p = 1, or search.temperature = 1"
        )


def _check_batches(config: Config) -> None:
    """Refuse settings under which no batch is possible, so that the trainer would wait forever."""
    _check_group(config)
    check_batches(config)


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


def _check_eval(config: Config) -> None:
    for key in ("kl", "embedder"):
        if getattr(config.eval, key) and not config.eval.samples:
            raise ValueError(f"eval.{key} measures sampled responses, and eval.samples is 0: set it, such as to 16")


def _check_offload(config: Config) -> None:
    if config.train.offload == "optimizer" and config.lora.rank:
        raise ValueError(
            'train.offload = "optimizer" has no effect with lora.rank: adapters have small states, remove it'
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
