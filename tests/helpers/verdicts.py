"""Tables of answers with the verdicts that tests/data states."""

import re
import unicodedata
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


def read_table(name: str) -> list[tuple[str, str]]:
    """The lines of a table as the two sides of `::`. `\\N{NAME}` is a character and `\\n` after `::>` a line break."""
    lines = (DATA / name).read_text().splitlines()
    rows = [line.partition(" ::") for line in lines if line and not line.startswith("# ")]
    return [(_characters(left), _characters(right)) for left, _, right in rows]


def read_verdicts(name: str) -> list[tuple[str, str, bool]]:
    """(gold answer, response, whether it is right)."""
    return [
        (
            left[2:],
            right[2:].replace("\\n", "\n") if right.startswith("> ") else rf"so $\boxed{{{right[1:]}}}$.",
            left[0] == "+",
        )
        for left, right in read_table(name)
    ]


def _characters(text: str) -> str:
    return re.sub(r"\\N\{([^}]*)\}", lambda found: unicodedata.lookup(found.group(1)), text)
