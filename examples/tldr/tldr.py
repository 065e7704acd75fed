"""TL;DR (Stiennon et al. 2020): summaries of posts, from a jsonl file or a data set of the Hugging Face hub.

Columns are those of vwxyzjn/summarize_from_feedback_tldr_3_filtered: `post`, `title`, `subreddit`, `summary`. The task
itself gives no reward: `[reward_model]` does, and `[gold_model]` compares answers with the human summaries.
"""

from typing import Any

from tba.searcher.tasks.rows import RowsTask, key_of, text_in
from tba.searcher.tasks.task import Prompt, Reward

_COLUMNS = ("subreddit", "title", "post", "summary")


class TldrTask(RowsTask):
    """Posts to summarise. `data` is a hub id, or a file; then `held_out` names another one.

    Raises TaskError if the data is missing or malformed.
    """

    name = "tldr"

    def __init__(self, data: str, held_out: str = "", split: str = "train", held_out_split: str = "validation") -> None:
        self._load(data, held_out, [(name,) for name in _COLUMNS], splits=(split, held_out_split))

    def score(self, _prompt: Prompt, _response: str, _finished: bool) -> Reward:
        return Reward(0.0, {})

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        subreddit, title, post, summary = (text_in(row, name) for name in columns)
        text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
        return Prompt(key_of(text), text, answer=f" {summary.strip()}")
