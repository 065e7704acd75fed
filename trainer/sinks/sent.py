"""What a tracker has already: a resumed trainer repeats steps, and none should be there twice."""

import json
import secrets
from pathlib import Path

from tba.common.durable import write_text


class Sent:
    """A file with the tracker's `id` of this run, over all its starts, and the `next` step to send.

    What was sent stays, since a repeated step has the same numbers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.id = str(state.get("id") or secrets.token_hex(8))
        self.next = int(state.get("next_step", 0))

    def note(self, step: int) -> None:
        """A step was sent."""
        self.next = step + 1
        write_text(self._path, json.dumps({"id": self.id, "next_step": self.next}))
