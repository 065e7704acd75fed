"""A check of the log-ratios of tokens that a run has stored."""

from pathlib import Path

import numpy as np
import pytest

from tba.common.wire.trajectory import LOG_RATIO_DTYPE
from tba.tests.helpers.buffer import ask

_ROWS = """
SELECT c.log_ratio, c.mismatch, t.response_tokens, c.token_log_ratios, p.loss_mask
FROM consumption_rows c JOIN batches b ON b.id = c.batch JOIN trajectory_rows t ON t.id = c.trajectory
JOIN payloads p ON p.trajectory = t.id
WHERE b.trained_at IS NOT NULL
"""


def check_token_log_ratios(database: Path) -> None:
    """Check that every trained row has one log-ratio per token, which agree with the numbers of the row."""
    rows = ask(database, _ROWS)
    assert rows
    for log_ratio, mismatch, tokens, blob, mask in rows:
        ratio_R = np.frombuffer(blob, LOG_RATIO_DTYPE).astype(float)
        counted_R = np.frombuffer(mask, bool) if mask else np.ones(tokens, bool)
        assert len(ratio_R) == tokens
        assert not ratio_R[~counted_R].any()
        # Rounding to float16 changes each by at most 2^-11 of it, and large ones of both signs may cancel.
        assert ratio_R.sum() == pytest.approx(log_ratio, rel=1e-6, abs=1e-5 + np.abs(ratio_R).sum() / 2**10)
        if mismatch is not None:
            assert np.abs(ratio_R[counted_R]).mean() == pytest.approx(mismatch, rel=1e-3, abs=1e-7)
