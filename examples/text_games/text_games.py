"""TextArena's games for one player as episodes: `task.name = "examples/text_games/text_games.py"`.

Written for textarena 0.7.4. Its games draw from the global generator of the module random, so each game here has a
state of its own, and an episode is a function of its key and its replies.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import textarena

from tba.searcher.tasks.task import CORRECT, PARSE_ERROR, Environment, ListedTask, Prompt, Turn

_SEED_BITS = 31


class TextArenaTask(ListedTask):
    """A game of TextArena by its id, for one player.

    The seed of an episode is a hash of its prompt's key. The reward is the game's, once at its end; `correct` is 1 for
    a reward of 1, that of a game that was won. Two invalid moves in a row end a game, as `parse_error`. Other options
    are arguments of `textarena.make`.
    """

    name = "textarena"

    def __init__(self, id: str, prompts: int = 1000, held_out: int = 100, **options: Any) -> None:
        self._id, self._options = id, options
        self._prompts = [self._prompt(str(key)) for key in range(prompts)]
        self._held_out = [self._prompt(str(key)) for key in range(prompts, prompts + held_out)]

    def environment(self, prompt: Prompt) -> "Game":
        return Game(self._id, self._options, prompt.key)

    def _prompt(self, key: str) -> Prompt:
        text = Game(self._id, self._options, key).text
        return Prompt(key, text, messages=[("user", text)])


class Game(Environment):
    """One game, whose `text` is what the player was told last."""

    def __init__(self, id: str, options: dict[str, Any], key: str) -> None:
        # Without a wrapper an observation is what is new, and not the whole game so far.
        self._game: Any = textarena.make(f"{id}-raw", **options)
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()) >> (256 - _SEED_BITS)
        self._random = random.Random(seed).getstate()
        self._in_own_state(lambda: self._game.reset(num_players=1, seed=seed))
        self.text = self._observed()

    def step(self, reply: str, finished: bool) -> Turn:
        done, _ = self._in_own_state(lambda: self._game.step(reply))
        if not done:
            self.text = self._observed()
            return Turn([("user", self.text)], parts={CORRECT: 0.0})
        rewards, info = self._game.close()
        reward = float(rewards[0])
        return Turn((), reward, True, {CORRECT: float(reward == 1.0), PARSE_ERROR: float(info[0]["invalid_move"])})

    def _observed(self) -> str:
        _, messages = self._game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender == textarena.GAME_ID)

    def _in_own_state(self, call: Callable[[], Any]) -> Any:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            return call()
        finally:
            self._random = random.getstate()
            random.setstate(outside)
