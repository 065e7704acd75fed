"""TL;DR (Stiennon et al. 2020): summaries of posts, from a jsonl file or a data set of the Hugging Face hub.

Columns are those of vwxyzjn/summarize_from_feedback_tldr_3_filtered: `post`, `title`, `subreddit`, `summary`. The task
itself gives no reward: `[reward_model]` does, and `[gold_model]` compares answers with the human summaries.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from tba.common.errors import TaskError
from tba.searcher.tasks.rows import read_rows, without_repeated
from tba.searcher.tasks.task import Prompt, Reward

_COLUMNS = ("subreddit", "title", "post", "summary")


class TldrTask:
    """Posts to summarise. `data` is a hub id, or a jsonl file; then `held_out` names another one.

    Raises TaskError if the data is missing or malformed.
    """

    name = "tldr"

    def __init__(self, data: str, held_out: str = "", split: str = "train", held_out_split: str = "validation") -> None:
        self._prompts = without_repeated(_prompts(read_rows(self.name, data, split, None)))
        self._held_out = without_repeated(_prompts(read_rows(self.name, held_out or data, held_out_split, None)))

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def score(self, _prompt: Prompt, _response: str, _finished: bool) -> Reward:
        return Reward(0.0, {})


def _prompts(rows: Iterable[Any]) -> Iterable[Prompt]:
    for number, row in enumerate(rows, 1):
        if missing := [name for name in _COLUMNS if not isinstance(row.get(name), str)]:
            raise TaskError(f"task tldr: row {number} has no text in the column {missing[0]}")
        text = f"SUBREDDIT: r/{row['subreddit']}\n\nTITLE: {row['title']}\n\nPOST: {row['post']}\n\nTL;DR:"
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        yield Prompt(key, text, answer=f" {row['summary'].strip()}")
