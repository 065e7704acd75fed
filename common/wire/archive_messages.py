"""The conversation of `tba buffer archive` with the buffer, as the messages of `messages`."""

from typing import Annotated

from msgspec import Meta, field

from tba.common.wire.fields import Id, Sentence
from tba.common.wire.messages import Reply, Request

# A file of `tba buffer archive` at any place. URLs with `::` chain file systems, of which some run code.
FILE_URL = r"(?!.*::)(?!.*/\.\.?/)[a-z][a-z0-9+.-]*://.+/\d{12}-[0-9a-f]{8}\.parquet"
# The trajectories of a message: their tokens are dropped in one transaction, which others wait for.
MAX_ARCHIVED = 1 << 10
_Ids = Annotated[list[Id], Meta(max_length=MAX_ARCHIVED)]


class Archive(Request, frozen=True):
    """`tba buffer archive` -> buffer, while it looks for old trajectories, and when a file is complete. Reply: Movable.

    Old are those that have left sampling and are in no batch that is not trained yet, nor in one from `since_step` on.
    Without a `url`, asks for those after the id `after`. With it, drops the tokens of the old ones of `trajectories`,
    which this file has, and records that in the same transaction. `complete`: the rest of the file was dropped before.
    """

    TYPE = "archive"
    since_step: Id
    after: Id = 0
    url: Annotated[Sentence, Meta(pattern=rf"^(|{FILE_URL})\Z")] = ""
    trajectories: _Ids = field(default_factory=list)
    complete: bool = False


class Movable(Reply, frozen=True):
    """Reply to Archive: those asked for, and the id to ask `after` for more, None at the end; or those dropped."""

    TYPE = "movable"
    trajectories: _Ids
    after: Id | None = None
