"""The views of the database, for people who query it. `docs/database.md` describes them column by column.

A view must stay usable on a million rows. Therefore no join multiplies rows, and each count or average is a correlated
subquery over an index: `LIMIT 10` computes it for ten rows, a filter by id for one row, and an unselected column costs
nothing. `lengths`, which counts over a whole run, takes a sample. Times are Unix seconds; `..._text` columns are the
same times in UTC.
"""

from tba.common.rewards import ROUNDING

_TRAINED = """FROM consumption_rows c JOIN batches b ON b.id = c.batch
        WHERE c.trajectory = t.id AND b.trained_at IS NOT NULL"""

# Whether an explorer, which names its policy, sampled a row. The policy of an import is one of another run.
EXPLORED = """(t.policy_version < 0 AND json_type(t.metadata, '$.policy') IS 'text'
        AND json_type(t.metadata, '$.imported_version') IS NULL)"""
_SLOTS = "FROM consumption_rows c CROSS JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.batch = b.id"
# Trajectories of a run that `lengths` looks at, evenly spread over its ids: a view must not read a million rows.
LENGTHS_SAMPLE = 10_000
_CLASSES = "\n            ".join(
    f"WHEN t.response_tokens >= {1 << power} THEN {1 << power}" for power in range(20, -1, -1)
)


def _of_group(prompt: str, visit: str) -> str:
    """Return the aggregate columns over one visit's rows: `prompt` is an SQL expression, `visit` a condition.

    The condition on `prompt` is redundant, but only `prompt` has an index.
    """
    rows = f"FROM trajectory_rows t WHERE t.prompt = {prompt} AND t.visit {visit}"
    good = f"{rows} AND t.error IS NULL"
    return f"""(SELECT COUNT(*) {rows}) AS trajectories,
       (SELECT COUNT(t.error) {rows}) AS errors,
       (SELECT AVG(t.reward) {good}) AS mean_reward,
       (SELECT MIN(t.reward) {good}) AS min_reward,
       (SELECT MAX(t.reward) {good}) AS max_reward,
       (SELECT MAX(0.0, AVG(t.reward * t.reward) - AVG(t.reward) * AVG(t.reward)) {good}) AS reward_variance,
       (SELECT MAX(json_extract(t.sampling, '$.guided')) {rows}) AS guided,
       (SELECT GROUP_CONCAT(DISTINCT t.policy_version) {rows}) AS policy_versions,
       (SELECT SUM(t.response_tokens) {rows}) AS response_tokens"""


VIEWS = (
    f"""
CREATE VIEW trajectories AS
SELECT t.id, r.name AS run, p.key AS prompt, p.text AS prompt_text, p.answer, v.epoch AS epoch,
       s.sender AS searcher, s.host AS host,
       t.policy_version, n.step AS policy_step,
       t.reward, t.reward_parts, t.stop_reason, t.prompt_tokens, t.response_tokens,
       json_extract(t.sampling, '$.temperature') AS temperature,
       json_extract(t.sampling, '$.top_p') AS top_p,
       json_extract(t.sampling, '$.guided') AS guided,
       t.created_at, t.received_at, strftime('%Y-%m-%dT%H:%M:%SZ', t.received_at, 'unixepoch') AS received_at_text,
       t.generation_seconds, t.text, t.error, t.error_kind, json_array_length(t.turns) AS turns, t.metadata,
       CASE WHEN {EXPLORED} THEN json_extract(t.metadata, '$.policy') END AS policy,
       t.compacted_at, a.url AS archive,
       (SELECT COUNT(*) {_TRAINED}) AS times_trained,
       (SELECT MIN(b.step) {_TRAINED}) AS first_step,
       (SELECT MAX(b.step) {_TRAINED}) AS last_step
FROM trajectory_rows t
LEFT JOIN runs r ON r.id = t.run
LEFT JOIN prompts p ON p.id = t.prompt
LEFT JOIN visits v ON v.id = t.visit
LEFT JOIN senders s ON s.id = t.sender
LEFT JOIN snapshots n ON n.run = t.run AND n.version = t.policy_version
LEFT JOIN archives a ON a.id = t.archive
""",
    # Only rows with turns: an index has them, so that the first ten of a million rows without any are found at once.
    """
CREATE VIEW turns AS
SELECT t.id AS trajectory, r.name AS run, p.key AS prompt, j.key AS turn,
       json_extract(j.value, '$.start') AS start, json_extract(j.value, '$.tokens') AS tokens,
       json_extract(j.value, '$.seconds') AS seconds,
       json_extract(j.value, '$.environment_seconds') AS environment_seconds,
       json_extract(j.value, '$.reward') AS reward, json_extract(j.value, '$.parts') AS parts,
       json_extract(j.value, '$.messages') AS messages
FROM trajectory_rows t CROSS JOIN json_each(t.turns) j
LEFT JOIN runs r ON r.id = t.run
LEFT JOIN prompts p ON p.id = t.prompt
WHERE t.turns != '[]'
""",
    # The variance instead of the standard deviation: not every build of SQLite has sqrt().
    f"""
CREATE VIEW groups AS
SELECT r.name AS run, p.key AS prompt, v.epoch AS epoch, v.id AS visit, v.leased_at AS leased_at, v.done_at AS done_at,
       {_of_group("v.prompt", "= v.id")}
FROM visits v
LEFT JOIN prompts p ON p.id = v.prompt
LEFT JOIN runs r ON r.id = v.run
UNION ALL
SELECT r.name AS run, p.key AS prompt, NULL AS epoch, NULL AS visit, NULL AS leased_at, NULL AS done_at,
       {_of_group("p.id", "IS NULL")}
FROM prompts p
LEFT JOIN runs r ON r.id = p.run
WHERE EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit IS NULL)
""",
    """
CREATE VIEW consumption AS
SELECT r.name AS run, b.step, c.slot, c.trajectory, p.key AS prompt, t.reward, t.policy_version, c.staleness,
       c.logprob, c.log_ratio, c.advantage, c.weight, c.mismatch, c.skipped,
       b.handed_out_at AS handed_out_at, b.trained_at AS trained_at,
       strftime('%Y-%m-%dT%H:%M:%SZ', b.trained_at, 'unixepoch') AS trained_at_text
FROM consumption_rows c
LEFT JOIN batches b ON b.id = c.batch
LEFT JOIN trajectory_rows t ON t.id = c.trajectory
LEFT JOIN prompts p ON p.id = t.prompt
LEFT JOIN runs r ON r.id = b.run
""",
    """
CREATE VIEW staleness AS
SELECT r.name AS run, b.step, b.prompts * b.samples AS slots, b.trajectories,
       b.min_staleness, b.mean_staleness, b.max_staleness, b.mean_age_seconds, b.max_age_seconds, b.mean_reward,
       b.recency_window, b.recency_groups, b.recency_missed,
       b.handed_out_at, b.trained_at
FROM batches b
LEFT JOIN runs r ON r.id = b.run
""",
    """
CREATE VIEW clients AS
SELECT s.id, r.name AS run, s.sender, s.role, s.host, s.pid, s.trajectories, s.errors, s.response_tokens,
       s.reward_sum / NULLIF(s.trajectories - s.errors, 0) AS mean_reward, s.first_received_at, s.last_received_at
FROM senders s
LEFT JOIN runs r ON r.id = s.run
""",
    """
CREATE VIEW evaluations AS
SELECT r.name AS run, e.version, e.step, e.prompts AS held_out_prompts,
       json_extract(e.metrics, '$.accuracy') AS accuracy,
       json_extract(e.intervals, '$.accuracy[0]') AS accuracy_low,
       json_extract(e.intervals, '$.accuracy[1]') AS accuracy_high,
       json_extract(e.metrics, '$.reward') AS reward,
       json_extract(e.metrics, '$.sampled_reward') AS sampled_reward,
       json_extract(e.metrics, '$.kl') AS kl,
       e.not_measured, e.metrics, e.intervals, e.prompt_set, e.settings, e.seconds, e.evaluated_at,
       strftime('%Y-%m-%dT%H:%M:%SZ', e.evaluated_at, 'unixepoch') AS evaluated_at_text
FROM evaluation_rows e
LEFT JOIN runs r ON r.id = e.run
""",
    """
CREATE VIEW held_out AS
SELECT r.name AS run, e.version, e.step, h.prompt, h.prompt_text, h.answer, h.response, h.reward,
       COALESCE(json_extract(h.reward_parts, '$.correct') > 1 - 1e-9, h.reward > 1e-9) AS passed,
       h.reward_parts, h.error, h.evaluation, e.evaluated_at
FROM held_out_rows h
JOIN evaluation_rows e ON e.id = h.evaluation
LEFT JOIN runs r ON r.id = h.run
""",
    f"""
CREATE VIEW lengths AS
WITH RECURSIVE ends (run, first, last) AS (
    SELECT id, (SELECT t.id FROM trajectory_rows t WHERE t.run = runs.id ORDER BY t.received_at, t.id LIMIT 1),
        (SELECT t.id FROM trajectory_rows t WHERE t.run = runs.id ORDER BY t.received_at DESC, t.id DESC LIMIT 1)
    FROM runs
), spread (run, id, last, stride) AS (
    SELECT run, first, last, 1 + (last - first) / {LENGTHS_SAMPLE} FROM ends WHERE first IS NOT NULL
    UNION ALL SELECT run, id + stride, last, stride FROM spread WHERE id + stride <= last
), sampled AS (
    SELECT t.run, t.error, t.reward, t.response_tokens, t.created_at,
        CASE {_CLASSES} ELSE 0 END AS least_tokens,
        (SELECT COUNT(*) {_TRAINED}) AS times,
        (SELECT MIN(b.trained_at) {_TRAINED}) AS first_trained_at
    FROM spread s CROSS JOIN trajectory_rows t ON t.id = s.id AND t.run = s.run
    WHERE json_extract(t.sampling, '$.guided') IS NULL
)
SELECT r.name AS run, s.least_tokens, COUNT(*) AS trajectories, COUNT(s.error) AS errors,
       SUM(s.times = 0) AS never_trained, SUM(s.response_tokens) AS response_tokens,
       SUM(s.response_tokens * (s.times > 0)) AS used_tokens, SUM(s.response_tokens * s.times) AS trained_tokens,
       AVG(CASE WHEN s.error IS NULL THEN s.reward END) AS mean_reward,
       AVG(s.first_trained_at - s.created_at) AS mean_seconds_to_training
FROM sampled s JOIN runs r ON r.id = s.run
GROUP BY s.run, s.least_tokens
""",
    f"""
CREATE VIEW waste AS
SELECT r.name AS run, b.step, b.prompts AS groups,
       (SELECT COUNT(*) FROM (SELECT 1 {_SLOTS} GROUP BY t.prompt, json_extract(t.sampling, '$.guided')
           HAVING MAX(t.reward) - MIN(t.reward) <=
               {ROUNDING} * MAX(1, ABS(MAX(t.reward)), ABS(MIN(t.reward))))) AS flat_groups,
       (SELECT SUM(t.response_tokens) {_SLOTS}) AS response_tokens,
       (SELECT AVG(b.trained_at - t.created_at) {_SLOTS}) AS mean_seconds_to_training,
       b.trained_at
FROM batches b
LEFT JOIN runs r ON r.id = b.run
""",
    """
CREATE VIEW curriculum AS
SELECT r.name AS run, c.epoch, p.key AS prompt, c.decision, 1.0 * c.passed / c.answers AS pass_rate, c.answers
FROM curriculum_rows c
LEFT JOIN prompts p ON p.id = c.prompt
LEFT JOIN runs r ON r.id = c.run
""",
)
