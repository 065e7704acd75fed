"""The numbers of a step for each row of its batch, as the trainer reports them."""

from msgspec import Struct

from tba.common.wire.fields import Column, Finite

QUANTITIES = ("logprob", "log_ratio", "advantage", "weight", "mismatch")


class RowNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """What a step computed for each row of its batch, in the order of the slots; None where a number is not known.

    All are of the policy before the update. `logprob` is log pi of the response at temperature 1, `log_ratio` its
    log pi - log mu at the temperature of sampling, None if the sampler is unknown; both are sums over the counted
    tokens, in nats. `advantage` and `weight` are those of the objective: the gradient of the loss is a sum of
    -weight * advantage * grad log pi. `mismatch` is the mean of |log pi - log mu| over the counted tokens, in nats, for
    a response of the weights that are trained. A row is `skipped` if it had no part in the update: the step made none,
    or the weight is 0.
    """

    logprob: Column[Finite | None]
    log_ratio: Column[Finite | None]
    advantage: Column[Finite | None]
    weight: Column[Finite | None]
    mismatch: Column[Finite | None]
    skipped: Column[bool]

    def __post_init__(self) -> None:
        """Raise ValueError if the columns differ in length."""
        if any(len(getattr(self, name)) != len(self.skipped) for name in QUANTITIES):
            raise ValueError("the columns of numbers of rows differ in length")
