"""[curriculum]: which prompts an epoch skips or postpones."""

from typing import Annotated, Literal

from pydantic import Field

from tba.common.config.section import Section


class CurriculumSection(Section):
    """Prompts that an epoch skips or postpones, by the pass rate of their newest answers (docs/tasks.md)."""

    solved: Annotated[float, Field(gt=0, le=1)] | Literal["off"] = "off"
    """Pass rate, such as 0.95, from which on a prompt is solved: epochs skip it. off skips none."""
    unsolved_last: bool = False
    """Whether prompts of which none of the newest answers passed come at the end of an epoch."""
    answers: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Number of newest answers that the pass rate of a prompt is taken over. One with fewer is neither skipped nor
    postponed."""
    pass_reward: float = 1.0
    """Reward from which on an answer passes."""
    revisit_every: Annotated[int, Field(ge=2)] = 4
    """A solved prompt is still visited in every such epoch, so that forgetting is noticed: in a different one for
    different prompts."""

    @property
    def is_on(self) -> bool:
        """Whether an epoch may skip or postpone prompts."""
        return self.solved != "off" or self.unsolved_last
