"""A custom task: `task.name = "examples/own_task.py"`."""

from collections.abc import Sequence

from tba.searcher.tasks.task import CORRECT, Prompt, Reward

_WORDS = ("stone", "river", "cloud", "maple", "ember", "quartz")


class ReverseTask:
    """Spell a word backwards; the last word is held out."""

    name = "reverse"

    def prompts(self) -> Sequence[Prompt]:
        return [_prompt(word) for word in _WORDS[:-1]]

    def held_out(self) -> Sequence[Prompt]:
        return [_prompt(_WORDS[-1])]

    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Return 1 for the right word in a response that ended by itself, else 0."""
        correct = float(finished and response.strip() == prompt.answer)
        return Reward(correct, {CORRECT: correct})


def _prompt(word: str) -> Prompt:
    return Prompt(key=word, text=f"{word} backwards is ", answer=word[::-1])
