"""TL;DR (Stiennon et al. 2020): summaries of posts, from a jsonl file or a data set of the Hugging Face hub.

Columns are those of vwxyzjn/summarize_from_feedback_tldr_3_filtered: `post`, `title`, `subreddit`, `summary`. The task
itself gives no reward: `[reward_model]` does. A second, larger classifier, the gold model, compares held-out answers
with the human summaries.
"""

import asyncio
import os
from typing import Any

from tba.common.config import RewardModelSection
from tba.searcher.scoring.http_model import HttpModel
from tba.searcher.tasks.rows import RowsTask, key_of, text_in
from tba.searcher.tasks.task import Prompt, Reward

_COLUMNS = ("subreddit", "title", "post", "summary")


class TldrTask(RowsTask):
    """Posts to summarise. `data` is a hub id, or a file; then `held_out` names another one.

    With `gold_url`, a server as that of `[reward_model]`, held-out answers have the parts `win_rate` (1 if the gold
    model scores the answer higher than the human summary, 0.5 if it scores both alike or they are one text, else 0),
    `gold_reward` and `gold_reward_of_references`. GOLD_API_KEY is its key. Raises TaskError if the data is missing or
    malformed.
    """

    name = "tldr"

    def __init__(
        self,
        data: str,
        held_out: str = "",
        split: str = "train",
        held_out_split: str = "validation",
        gold_url: str = "",
        gold_seconds: float = 60.0,
    ) -> None:
        self._load(data, held_out, [(name,) for name in _COLUMNS], splits=(split, held_out_split))
        self._judged = {prompt.key for prompt in self._held_out} if gold_url else set()
        self._url, self._seconds = gold_url, gold_seconds
        self._model: HttpModel | None = None
        self._references: dict[str, float] = {}

    async def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        if prompt.key not in self._judged:
            return Reward(0.0, {})
        theirs = self._references.get(prompt.key)
        asked = [response] if theirs is not None else [response, prompt.answer]
        mine, *others = await asyncio.gather(*(self._gold(prompt, text) for text in asked))
        theirs = self._references[prompt.key] = others[0] if others else self._references[prompt.key]
        # Scores of the same text differ by rounding if their batches differ.
        won = 0.5 if response == prompt.answer or mine == theirs else float(mine > theirs)
        return Reward(0.0, {"win_rate": won, "gold_reward": mine, "gold_reward_of_references": theirs})

    async def _gold(self, prompt: Prompt, text: str) -> float:
        # Made in the event loop that it belongs to: that of the worker.
        if self._model is None:
            self._model = HttpModel(RewardModelSection(url=self._url), os.environ.get("GOLD_API_KEY", ""))
        return await self._model.score(prompt, text, seconds=self._seconds)

    def _prompt(self, row: Any, *columns: str) -> Prompt:
        subreddit, title, post, summary = (text_in(row, name) for name in columns)
        text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
        return Prompt(key_of(text), text, answer=f" {summary.strip()}")
