"""The numbers of a step for each row of its batch, as the trainer reports them."""

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from tba.common.wire.fields import Column, Finite

QUANTITIES = ("logprob", "log_ratio", "advantage", "weight", "mismatch")
# Of the log-ratio of a token: an error of 0.05 % from 6e-5 to 65,504 nats, of 3e-8 nats below.
LOG_RATIO_DTYPE = np.dtype("<f2")
# Of the log-ratios of the tokens of all rows, so that a report always fits a message with everything else in it.
MAX_LOG_RATIO_BYTES = 10 << 20
TokenLogRatios = Annotated[bytes, Meta(max_length=MAX_LOG_RATIO_BYTES)]


class RowNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """What a step computed for each row of its batch, in the order of the slots; None where a number is not known.

    All are of the policy before the update. `logprob` is log pi of the response at temperature 1, `log_ratio` its
    log pi - log mu at the temperature of sampling, None if the sampler is unknown; both are sums over the counted
    tokens, in nats. `advantage` and `weight` are those of the objective: the gradient of the loss is a sum of
    -weight * advantage * grad log pi. `mismatch` is the mean of |log pi - log mu| over the counted tokens, in nats, for
    a response of the weights that are trained. A row is `skipped` if it had no part in the update: the step made none,
    or the weight is 0.

    `token_log_ratios` are the terms of `log_ratio`: for each row one LOG_RATIO_DTYPE per response token, 0 where a
    token does not count; None if they are unknown or did not fit MAX_LOG_RATIO_BYTES.
    """

    logprob: Column[Finite | None]
    log_ratio: Column[Finite | None]
    advantage: Column[Finite | None]
    weight: Column[Finite | None]
    mismatch: Column[Finite | None]
    skipped: Column[bool]
    token_log_ratios: Column[TokenLogRatios | None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the columns differ in length, or log-ratios of tokens are too many or not finite."""
        rows, each = len(self.skipped), self.token_log_ratios
        if any(len(getattr(self, name)) != rows for name in QUANTITIES) or (each is not None and len(each) != rows):
            raise ValueError("the columns of numbers of rows differ in length")
        blobs = [blob for blob in each or [] if blob]
        if (size := sum(map(len, blobs))) > MAX_LOG_RATIO_BYTES:
            raise ValueError(f"log-ratios of tokens of {size} bytes, at most {MAX_LOG_RATIO_BYTES} fit a report")
        if any(len(blob) % LOG_RATIO_DTYPE.itemsize for blob in blobs):
            raise ValueError("log-ratios of tokens end within a number")
        if not np.isfinite(np.frombuffer(b"".join(blobs), LOG_RATIO_DTYPE)).all():
            raise ValueError("a log-ratio of a token is not finite")
