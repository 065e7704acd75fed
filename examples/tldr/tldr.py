"""TL;DR (Stiennon et al. 2020): summaries of posts, from a jsonl file or a data set of the Hugging Face hub.

Columns are those of vwxyzjn/summarize_from_feedback_tldr_3_filtered: `post`, `title`, `subreddit`, `summary`. The task
itself gives no reward: `[reward_model]` does, and `[gold_model]` compares answers with the human summaries.
"""

from collections.abc import Sequence
from typing import Any

from tba.searcher.tasks.rows import key_of, load_prompts, read_rows, text_in
from tba.searcher.tasks.task import Prompt, Reward

_COLUMNS = ("subreddit", "title", "post", "summary")


class TldrTask:
    """Posts to summarise. `data` is a hub id, or a jsonl file; then `held_out` names another one.

    Raises TaskError if the data is missing or malformed.
    """

    name = "tldr"

    def __init__(self, data: str, held_out: str = "", split: str = "train", held_out_split: str = "validation") -> None:
        self.notes: list[str] = []
        self._prompts = self._load(data, split)
        self._held_out = self._load(held_out or data, held_out_split)

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        return self._held_out

    def score(self, _prompt: Prompt, _response: str, _finished: bool) -> Reward:
        return Reward(0.0, {})

    def _load(self, source: str, split: str) -> list[Prompt]:
        rows = read_rows(self.name, source, split, None)
        return load_prompts(self.name, rows, [(name,) for name in _COLUMNS], _prompt, self.notes)


def _prompt(row: Any, *columns: str) -> Prompt:
    subreddit, title, post, summary = (text_in(row, name) for name in columns)
    text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    return Prompt(key_of(text), text, answer=f" {summary.strip()}")
