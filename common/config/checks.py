"""What the sections of a configuration must agree on: a run that cannot go on is refused before it starts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba.common.config import Config


def check(config: "Config") -> None:
    """Raises ValueError with a sentence that names the keys."""
    _the_task_has_data(config)
    _fresh_data_can_be_had(config)
    _a_moving_reference_is_used(config)
    _batches_can_be_had(config)
    _rates_agree(config)


def _the_task_has_data(config: "Config") -> None:
    if config.task.reads_files and not config.task.train:
        raise ValueError(f"task.train is needed for {config.task.name}: a jsonl file or a hub id")


def _fresh_data_can_be_had(config: "Config") -> None:
    if config.max_staleness is not None and config.max_staleness < config.train.publish_every - 1:
        raise ValueError(
            f"buffer.max_staleness = {config.max_staleness} needs train.publish_every <= "
            f"{config.max_staleness + 1}: with weights published every {config.train.publish_every} steps "
            "no data could be fresh enough"
        )


def _a_moving_reference_is_used(config: "Config") -> None:
    kind = config.reference.kind
    if kind == "frozen":
        return
    if config.search.reference_logprobs:
        raise ValueError(
            f'reference.kind = "{kind}" moves in the trainer: searchers cannot compute its log-probabilities, set '
            "search.reference_logprobs = false"
        )
    if config.lora.rank:
        raise ValueError(f'reference.kind = "{kind}" has no meaning with adapters: their base is the reference')
    if not config.objective.uses_reference:
        raise ValueError(f'reference.kind = "{kind}" has no meaning for {config.objective.name} without a reference')


def _batches_can_be_had(config: "Config") -> None:
    """A batch that the remover or the replacement rule makes impossible would be waited for without end."""
    buffer, group = config.buffer, config.train.samples_per_prompt if config.buffer.replacement == "never" else 1
    if group > buffer.prompt_cap:
        raise ValueError(f'buffer.replacement = "never" needs buffer.prompt_cap >= train.samples_per_prompt = {group}')
    if config.max_staleness is not None and group > config.search.samples_per_prompt:
        raise ValueError(
            f'buffer.replacement = "never" with a bounded buffer.max_staleness needs search.samples_per_prompt >= '
            f"train.samples_per_prompt = {group}: one visit must give a whole group"
        )
    least = max(buffer.min_fill, group * config.train.prompts_per_step)
    if config.max_trajectories is not None and config.max_trajectories < least:
        raise ValueError(f"buffer.max_trajectories = {config.max_trajectories} is less than the {least} of a batch")


def _rates_agree(config: "Config") -> None:
    """The rate limiter must never hold back both sides at once; `tba.buffer.rate_limiter` has the reasons."""
    if config.samples_per_insert is None:
        return
    if config.samples_per_insert_slack < config.least_slack:
        raise ValueError(
            f"buffer.samples_per_insert_slack = {config.samples_per_insert_slack} must be at least "
            f"{config.least_slack}: what a batch uses up and one visit of a prompt, or both sides would wait"
        )
    samples, responses = config.train.samples_per_prompt, config.search.samples_per_prompt
    if config.max_staleness is not None and config.samples_per_insert * responses < samples:
        raise ValueError(
            f"buffer.samples_per_insert = {config.samples_per_insert:g} with a bounded buffer.max_staleness must be "
            f"at least train.samples_per_prompt / search.samples_per_prompt = {samples / responses:g}: fresh data "
            "is limited to what the batches need"
        )
