"""What a handler of requests returns."""

from dataclasses import dataclass, field

from tba.common import wire


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply with its array frames. None instead of an Answer: nothing to say yet."""

    message: wire.Message
    frames: list[bytes] = field(default_factory=list)
