"""The message that stores an evaluation."""

from typing import Annotated

from msgspec import Meta

from tba.common.wire.fields import Finite, Id, Name, Seconds, UnixTime
from tba.common.wire.messages import Message

_MAX_METRICS = 1024
MAX_NOT_MEASURED = 4096


class PutEvaluation(Message, frozen=True):
    """Evaluator or `tba eval` -> buffer, when a snapshot is evaluated. Reply: Done.

    (`version`, `prompt_set`, `settings`) identify it: a repeated one replaces the earlier one. `intervals` are the ends
    of the 95 % intervals of some metrics. `not_measured` says why metrics are missing: too many answers have no score.
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
