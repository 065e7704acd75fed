"""The curriculum: which prompts an epoch skips or postpones, by the pass rates of their newest answers, and how much of
a demonstration guided responses begin with.

The pass rates are a function of the stored answers, oldest first, so a restart rebuilds them. What they decided for an
epoch is stored when the epoch begins, and does not change while it lasts.
"""

from collections.abc import Iterable, Sequence

from tba.buffer.store.tables.prompts import Decision
from tba.common.config import CurriculumSection
from tba.common.wire.fields import NO_POLICY


class Curriculum:
    """The newest answers of each prompt, and what they mean for an epoch. Without settings it does nothing.

    `guided` says whether there are guided responses. They count by themselves: their answer was given in part.
    """

    def __init__(self, settings: CurriculumSection, *, guided: bool = False) -> None:
        self._settings = settings
        self.is_on = settings.is_on or guided
        self._mask = (1 << settings.answers) - 1
        # By prompt: the newest answers as bits, 1 for one that passed, the newest lowest; and how many there are.
        self._answers: dict[int, tuple[int, int]] = {}
        self._guided: dict[int, tuple[int, int]] = {}

    def note(self, prompt: int, versions: Iterable[int], rewards: Iterable[float], *, guided: bool = False) -> None:
        """Take new answers to a prompt, oldest first. Those that no policy of the run gave do not count."""
        settings = self._settings
        if not self.is_on:
            return
        answers = self._guided if guided else self._answers
        bits, count = answers.get(prompt, (0, 0))
        for version, reward in zip(versions, rewards, strict=True):
            if version != NO_POLICY:
                # 0.7 + 0.2 + 0.1 is less than 1.
                bits, count = bits << 1 | (reward > settings.pass_reward - 1e-9), count + 1
        answers[prompt] = bits & self._mask, min(count, settings.answers)

    def guide(self, prompt: int) -> float:
        """Return the largest fraction of the demonstration that guided responses to a prompt begin with.

        It is the share of the newest guided answers that did not pass; those that are missing count as such.
        """
        passed = self._guided.get(prompt, (0, 0))[0].bit_count()
        return 1.0 - passed / self._settings.answers

    def decide(self, epoch: int, order: Sequence[int], least: int) -> list[Decision]:
        """Return the decisions for an epoch with this order of prompts. `least` are kept, the hardest first."""
        settings = self._settings
        solved, unsolved = [], []
        for prompt in order if settings.is_on else ():
            bits, count = self._answers.get(prompt, (0, 0))
            if count < settings.answers:
                continue
            passed = bits.bit_count()
            if settings.solved != "off" and passed / count >= settings.solved:
                # Prompts are revisited in different epochs, not all in the same one.
                if (epoch + prompt) % settings.revisit_every:
                    solved.append(Decision(prompt, "skipped", passed, count))
            elif settings.unsolved_last and not passed:
                unsolved.append(Decision(prompt, "postponed", passed, count))
        solved.sort(key=lambda decision: -decision.passed)
        return solved[: max(0, len(order) - least)] + unsolved
