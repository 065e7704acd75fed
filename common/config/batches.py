"""Whether a batch can ever be sampled: the arithmetic of prompts, visits and the limits of the buffer.

A visit gives S = search.samples_per_prompt trajectories of one prompt, which arrive together. Of these, the newest that
buffer.prompt_cap allows stay sampleable, and the newest of all that buffer.max_trajectories allows. A batch needs B =
train.prompts_per_step prompts, each with one trajectory, or with a whole group if `buffer.replacement` is "never".
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tba.common.config.root import Config

# Of a trajectory: one token of the prompt, one of the response with its log-probability, and one version.
_LEAST_BYTES = 20
# Bytes per token of a response, and those of a prompt, that a limit which is recommended has room for.
_TOKEN_BYTES = 9
_PROMPT_BYTES = 4096


def check_batches(config: "Config", prompts: int | None = None) -> None:
    """Raise ValueError, with the keys and a value that works, for settings under which no batch can ever be sampled.

    `prompts` is the number of prompts of the task, if it is known here. Imported trajectories are not considered.
    """
    buffer, asked = config.buffer, config.train.prompts_per_step
    if prompts is not None and prompts < asked:
        has = "1 prompt" if prompts == 1 else f"{prompts} prompts"
        raise ValueError(f"the task has {has} and a batch needs {asked} different ones: lower train.prompts_per_step")
    least = max(buffer.min_fill, _rows_of_batch(config, prompts or asked))
    most = buffer.max_trajectories
    if most != "unbounded" and most < least:
        raise ValueError(
            f"buffer.max_trajectories = {most} is less than the {least} that a batch needs, as the "
            f"{config.search.samples_per_prompt} of a visit (search.samples_per_prompt) arrive together: set at least "
            f"{least}"
        )
    if buffer.max_payload_bytes != "unbounded" and buffer.max_payload_bytes < least * _LEAST_BYTES:
        roomy = least * (_TOKEN_BYTES * config.search.max_tokens + _PROMPT_BYTES)
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


def _repeats(config: "Config") -> bool:
    """Whether all responses of a policy to a prompt are equal, and one of them is kept."""
    return config.buffer.dedup and config.search.is_greedy


def _rows_of_batch(config: "Config", prompts: int) -> int:
    """Return how many trajectories must be sampleable together, so that a batch is certain. Raises as `check_batches`.

    The newest visits count whole, and of the one before them what is left. A group of several visits needs the epochs
    between them.
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
    if config.max_staleness is not None and need > samples:
        raise ValueError(
            f'buffer.replacement = "never" with a bounded buffer.max_staleness needs search.samples_per_prompt >= '
            f"train.samples_per_prompt = {need}: one visit must give a whole group"
        )
    kept = 1 if _repeats(config) else min(samples, buffer.prompt_cap)
    visits, asked = -(-need // kept), config.train.prompts_per_step
    return (asked - 1) * kept + need if visits == 1 else kept * ((visits - 1) * prompts + asked)
