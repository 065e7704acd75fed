"""A run of real processes on the arithmetic example: its children, and the checks of its history."""

import contextlib
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tba.common.wire.trajectory import LOG_RATIO_DTYPE
from tba.tests.process.conftest import RunConfig, arithmetic, merged

STEPS = 12
SAMPLES = 4
PROMPTS = 96
_ROWS = """
SELECT c.log_ratio, c.mismatch, t.response_tokens, c.token_log_ratios, p.loss_mask
FROM consumption_rows c JOIN batches b ON b.id = c.batch JOIN trajectory_rows t ON t.id = c.trajectory
JOIN payloads p ON p.trajectory = t.id
WHERE b.trained_at IS NOT NULL
"""


def small_sections(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a run of a few steps with one Transformers searcher, with changes."""
    defaults: dict[str, dict[str, Any]] = {
        "buffer": {"recency_window": 8, "lease_seconds": 4.0},
        "launch": {"drain_seconds": 10.0},
        "task": {"limit": PROMPTS},
        "search": {"samples_per_prompt": SAMPLES},
        "train": {"steps": STEPS, "checkpoint_every": 3, "keep_snapshot_every": 6},
    }
    return arithmetic(**merged(defaults, sections))


def children_of(process: subprocess.Popen[bytes], command: str) -> list[psutil.Process]:
    """Return the children of a launcher whose command line contains `command`."""
    found = []
    for child in psutil.Process(process.pid).children():
        # The process may have just ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            if command in " ".join(child.cmdline()):
                found.append(child)
    return found


def log_of(tmp_path: Path) -> str:
    """Return all logs below a directory."""
    return "".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("**/*.log")))


def starts_of(run: RunConfig, role: str) -> int:
    """Return how often processes of a role have started."""
    if role == "buffer serve":
        return int(run.query("SELECT COUNT(*) FROM starts")[0][0])
    name = {"search": "searcher", "train": "trainer"}[role]
    return int(run.query("SELECT COUNT(*) FROM senders WHERE role = ?", name)[0][0])


def check_history(run: RunConfig, steps: int = STEPS, killed: Sequence[int] = (), prompts: int = PROMPTS) -> None:
    """Check that no trajectory, visit or step is missing or duplicated. `killed`: processes that received SIGKILL."""
    assert run.query("PRAGMA integrity_check") == [("ok",)]
    # Each sender numbers its rows from 0, so a gap is a lost row. A killed sender may leave a gap: puts that a crash of
    # the buffer interrupted, and that the sender did not live to repeat.
    numbered = run.query(
        """SELECT s.pid, COUNT(*), MAX(t.sequence) FROM trajectory_rows t JOIN senders s ON s.id = t.sender
           GROUP BY s.id ORDER BY s.id"""
    )
    assert [(pid, rows, last) for pid, rows, last in numbered if rows != last + 1 and pid not in killed] == []
    # A finished visit has S trajectories, an unfinished one has none.
    visits = run.query(
        """SELECT v.epoch, v.prompt, v.done_at IS NOT NULL, COUNT(t.id)
           FROM visits v LEFT JOIN trajectory_rows t ON t.visit = v.id GROUP BY v.id"""
    )
    # The spool of a killed searcher is delivered, even if another searcher has answered its visit since.
    twice = {(1, 2 * SAMPLES)} if killed else set()
    assert {(done, rows) for _, _, done, rows in visits} <= {(1, SAMPLES), (0, 0)} | twice
    # A finished epoch has one answered visit per prompt.
    answered = [(epoch, prompt) for epoch, prompt, done, _ in visits if done]
    assert len(answered) == len(set(answered))
    # The newest two epochs may have unfinished visits when the run ends.
    for epoch in range(max(epoch for epoch, *_ in visits) - 1):
        assert sum(answered_epoch == epoch for answered_epoch, _ in answered) == prompts
    # Every step was trained once and is logged once.
    assert run.query("SELECT step FROM batches WHERE trained_at IS NOT NULL ORDER BY step") == [
        (s,) for s in range(steps)
    ]
    assert [row["step"] for row in run.lines()] == list(range(steps))
    _check_numbers_of_rows(run)


def _check_numbers_of_rows(run: RunConfig) -> None:
    """Check that every trained row has numbers, and that their means are the metrics of the step."""
    sql = """SELECT c.step, COUNT(*), COUNT(c.logprob + log_ratio + advantage + weight + skipped),
             AVG(log_ratio), AVG(c.logprob - r.logprob),
             SUM(mismatch * sampled) / SUM(CASE WHEN mismatch IS NOT NULL THEN sampled END)
             FROM consumption c JOIN (SELECT id, COALESCE((SELECT SUM(tokens) FROM turns WHERE trajectory = t.id),
             response_tokens) AS sampled FROM trajectory_rows t) t ON t.id = c.trajectory
             JOIN reference_logprobs r ON r.trajectory = t.id
             WHERE c.trained_at IS NOT NULL GROUP BY c.step ORDER BY c.step"""
    for (step, rows, complete, *means), metrics in zip(run.query(sql), run.lines(), strict=True):
        assert (step, complete) == (metrics["step"], rows)
        known = [metrics.get(name, math.nan) for name in ("log_ratio_mean", "kl", "mismatch_mean")]
        found = [math.nan if mean is None else mean for mean in means]
        assert found == pytest.approx(known, rel=1e-4, abs=1e-6, nan_ok=True)
    _check_token_log_ratios(run)


def _check_token_log_ratios(run: RunConfig) -> None:
    """Check that every trained row has one log-ratio per token, which agree with the numbers of the row."""
    rows = run.query(_ROWS)
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
