"""The message that stores an evaluation."""

from typing import Annotated

from msgspec import Meta, Struct, field

from tba.common.wire.fields import Finite, Id, Name, RewardParts, Seconds, UnixTime
from tba.common.wire.messages import Message

_MAX_METRICS = 1024
MAX_NOT_MEASURED = 4096
MAX_RESPONSES = 10_000
MAX_STORED_TEXT = 4000
StoredText = Annotated[str, Meta(max_length=MAX_STORED_TEXT)]


class HeldOutResponse(Struct, frozen=True, forbid_unknown_fields=True):
    """The greedy response to a held-out prompt, with the reference `answer` and its score. Texts may be cut."""

    prompt: Name
    prompt_text: StoredText
    answer: StoredText
    response: StoredText
    reward: Finite
    reward_parts: RewardParts
    error: StoredText | None = None


class PutEvaluation(Message, frozen=True):
    """Evaluator or `tba eval` -> buffer, when a snapshot is evaluated. Reply: Done.

    (`version`, `prompt_set`, `settings`) identify it: a repeated one replaces the earlier one. `intervals` are the
    ends of the 95 % intervals of some metrics, `responses` those to the first prompts. `not_measured` says why
    metrics are missing: too many answers have no score.
    """

    TYPE = "put_evaluation"
    version: Id
    step: Id
    prompts: Id
    prompt_set: Name
    settings: Name
    evaluated_at: UnixTime
    seconds: Seconds
    metrics: Annotated[dict[Name, Finite], Meta(max_length=_MAX_METRICS)]
    intervals: Annotated[dict[Name, tuple[Finite, Finite]], Meta(max_length=_MAX_METRICS)]
    not_measured: Annotated[str, Meta(max_length=MAX_NOT_MEASURED)] = ""
    responses: Annotated[list[HeldOutResponse], Meta(max_length=MAX_RESPONSES)] = field(default_factory=list)
