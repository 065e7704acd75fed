"""What training does not use: the views `waste` and `lengths`."""

import re

import pytest

from tba.tests.helpers.browser import select
from tba.tests.helpers.buffer import change


def test_lengths_count_what_was_generated_and_what_was_trained_on(filled):
    # One response is in a second slot, and one in none.
    change(
        filled,
        "UPDATE consumption_rows SET trajectory = 1 WHERE trajectory = 2",
        "UPDATE trajectory_rows SET response_tokens = 700, created_at = 5 WHERE id = 1",
        "UPDATE batches SET trained_at = 12",
    )
    failed, short, long = select(filled, "SELECT * FROM lengths ORDER BY least_tokens")
    assert (failed["least_tokens"], failed["errors"], failed["never_trained"], failed["mean_reward"]) == (0, 1, 1, None)
    assert (short["least_tokens"], short["trajectories"], short["never_trained"]) == (2, 5, 1)
    assert (short["response_tokens"], short["used_tokens"], short["trained_tokens"]) == (15, 12, 12)
    assert (long["least_tokens"], long["used_tokens"], long["trained_tokens"]) == (512, 700, 1400)
    assert long["mean_seconds_to_training"] == 7


def test_waste_counts_groups_with_equal_rewards(filled):
    change(filled, "UPDATE trajectory_rows SET reward = 1 WHERE prompt = 2")
    (step,) = select(filled, "SELECT * FROM waste")
    names = ("run", "step", "groups", "flat_groups", "response_tokens")
    assert [step[name] for name in names] == ["test", 0, 2, 1, 18]


def test_lengths_of_a_long_run_are_those_of_an_even_sample(filled):
    change(
        filled,
        """INSERT INTO trajectory_rows (run, prompt, sender, sequence, policy_version, reward, reward_parts,
           stop_reason, prompt_tokens, response_tokens, dedup_hash, sampling, created_at, received_at,
           generation_seconds, payload_bytes, turns, metadata)
           WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 39999)
           SELECT 1, 1, 1, 1000 + i, 0, 0.5, '{}',
           'eos', 1, 4 + 60 * (i / 20000), 0, '{}', i, 1e10 + i, 0, 0, '[]', '{}' FROM n""",
    )
    counts = [row["trajectories"] for row in select(filled, "SELECT trajectories FROM lengths WHERE least_tokens > 3")]
    assert len(counts) == 2
    assert 8000 <= sum(counts) <= 10_001
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


@pytest.mark.parametrize(("trained", "expected"), [("no", ["7"]), ("yes", ["6", "5", "4", "3", "2", "1"])])
def test_trajectories_are_filtered_by_whether_a_step_has_them(browser, trained, expected):
    page = browser.get(f"/r/test/trajectories?trained={trained}")
    assert re.findall(r'href="/r/test/trajectories/(\d+)"', page.text) == expected
