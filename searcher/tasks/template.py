"""A task of your own, written by `tba task new`: change it, and try it with `tba task check`.

The prompts ask for the double of a number, in a form that the model of examples/arithmetic can spell.
"""

from collections.abc import Sequence

from tba.searcher.tasks.task import CORRECT, Prompt, Reward


class Template:
    """Double a number. `task.options` in the configuration are the arguments of `__init__`."""

    name = "template"
    # The lowest total that `score` returns.
    least_reward = 0.0

    def __init__(self, smallest: int = 10, largest: int = 99) -> None:
        numbers = range(smallest, largest + 1)
        # Held-out prompts are never trained on. Every process must come to the same prompts in the same order, so
        # there is no random number here, nothing that depends on the time, and no set.
        self._held_out = [_prompt(number) for number in numbers if number % 10 == 7]
        self._prompts = [_prompt(number) for number in numbers if number % 10 != 7]

    def prompts(self) -> Sequence[Prompt]:
        """Return the training prompts."""
        return self._prompts

    def held_out(self) -> Sequence[Prompt]:
        """Return the prompts that `tba eval` uses."""
        return self._held_out

    # With `async def`, a worker scores several responses at a time, for example by requests to another server.
    def score(self, prompt: Prompt, response: str, finished: bool) -> Reward:
        """Score a response. `finished` is False if it was cut off by its length.

        `total` is what is trained on. The parts are stored and reported; the mean of `correct` is the accuracy.
        """
        correct = float(finished and response.strip() == prompt.answer)
        is_number = float(response.strip().isdecimal())
        return Reward(total=correct, parts={CORRECT: correct, "is_number": is_number})


def _prompt(number: int) -> Prompt:
    # The key is unique in the task. A chat model gets `messages=[("user", ...)]` instead of, or besides, `text`.
    return Prompt(key=str(number), text=f"{number}+{number}=", answer=str(2 * number))
