-- The tables, indexes and views of a database that only migration 0001 has made, as SQLite stores them.
CREATE TABLE runs (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
    seed INTEGER NOT NULL, task TEXT, fingerprint TEXT, prompts INTEGER, finished_step INTEGER) STRICT;
CREATE UNIQUE INDEX idx_runs_name ON runs (name);
CREATE TABLE starts (id INTEGER PRIMARY KEY, run INTEGER, started_at REAL, config TEXT, software TEXT) STRICT;
CREATE TABLE senders (id INTEGER PRIMARY KEY, run INTEGER, sender TEXT, role TEXT, host TEXT, pid INTEGER);
CREATE UNIQUE INDEX idx_senders_sender ON senders (sender);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, run INTEGER, position INTEGER, key TEXT) STRICT;
CREATE UNIQUE INDEX idx_prompts_run_key ON prompts (run, key);
CREATE UNIQUE INDEX idx_prompts_run_position ON prompts (run, position);
CREATE TABLE visits (id INTEGER PRIMARY KEY, run INTEGER, epoch INTEGER, place INTEGER, prompt INTEGER, sender TEXT,
    leased_at REAL, done_at REAL) STRICT;
CREATE UNIQUE INDEX idx_visits_run_epoch_place ON visits (run, epoch, place);
CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL;
CREATE TABLE trajectory_rows (id INTEGER PRIMARY KEY, run INTEGER NOT NULL, prompt INTEGER NOT NULL, visit INTEGER,
    sender INTEGER NOT NULL, sequence INTEGER NOT NULL, policy_version INTEGER NOT NULL, reward REAL NOT NULL,
    reward_parts TEXT, stop_reason TEXT, prompt_tokens INTEGER, response_tokens INTEGER, dedup_hash INTEGER,
    sampling TEXT, created_at REAL, received_at REAL NOT NULL, generation_seconds REAL, text TEXT, error TEXT,
    metadata TEXT, payload_bytes INTEGER, compacted_at REAL) STRICT;
CREATE INDEX idx_trajectories_run_reward ON trajectory_rows (run, reward);
CREATE INDEX idx_trajectories_run_received_at ON trajectory_rows (run, received_at);
CREATE INDEX idx_trajectories_prompt_policy_version ON trajectory_rows (prompt, policy_version);
CREATE UNIQUE INDEX idx_trajectories_sender_sequence ON trajectory_rows (sender, sequence);
CREATE TABLE payloads (trajectory INTEGER PRIMARY KEY, prompt_ids BLOB, response_ids BLOB, logprobs BLOB,
    version_runs BLOB, loss_mask BLOB) STRICT;
CREATE TABLE snapshots (run INTEGER, version INTEGER, step INTEGER, path TEXT, manifest_sha256 TEXT, bytes INTEGER,
    announced_at REAL, address TEXT, PRIMARY KEY (run, version)) STRICT;
CREATE TABLE batches (run INTEGER, step INTEGER, prompts INTEGER, samples INTEGER, handed_out_at REAL, trained_at REAL,
    metrics TEXT, newest_trajectory INTEGER, recency_window INTEGER NOT NULL DEFAULT 0,
    recency_groups INTEGER NOT NULL DEFAULT 0, recency_missed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run, step)) STRICT;
CREATE TABLE consumption_rows (run INTEGER, step INTEGER, slot INTEGER, trajectory INTEGER, staleness INTEGER,
    PRIMARY KEY (run, step, slot)) STRICT;
CREATE INDEX idx_consumption_trajectory ON consumption_rows (trajectory);
CREATE TABLE reference_logprobs (trajectory INTEGER, reference TEXT, logprob REAL,
    PRIMARY KEY (trajectory, reference)) STRICT;
CREATE VIEW trajectories AS
SELECT t.id, r.name AS run, p.key AS prompt, v.epoch AS epoch, s.sender AS searcher, s.host AS host,
       t.policy_version, n.step AS policy_step,
       t.reward, t.reward_parts, t.stop_reason, t.prompt_tokens, t.response_tokens,
       json_extract(t.sampling, '$.temperature') AS temperature,
       json_extract(t.sampling, '$.top_p') AS top_p,
       t.created_at, t.received_at, strftime('%Y-%m-%dT%H:%M:%SZ', t.received_at, 'unixepoch') AS received_at_text,
       t.generation_seconds, t.text, t.error, t.metadata, t.compacted_at,
       (SELECT COUNT(*) FROM consumption_rows c JOIN batches b ON b.run = c.run AND b.step = c.step
        WHERE c.trajectory = t.id AND b.trained_at IS NOT NULL) AS times_trained,
       (SELECT MIN(c.step) FROM consumption_rows c JOIN batches b ON b.run = c.run AND b.step = c.step
        WHERE c.trajectory = t.id AND b.trained_at IS NOT NULL) AS first_step,
       (SELECT MAX(c.step) FROM consumption_rows c JOIN batches b ON b.run = c.run AND b.step = c.step
        WHERE c.trajectory = t.id AND b.trained_at IS NOT NULL) AS last_step
FROM trajectory_rows t
LEFT JOIN runs r ON r.id = t.run
LEFT JOIN prompts p ON p.id = t.prompt
LEFT JOIN visits v ON v.id = t.visit
LEFT JOIN senders s ON s.id = t.sender
LEFT JOIN snapshots n ON n.run = t.run AND n.version = t.policy_version;
CREATE VIEW groups AS
SELECT r.name AS run, p.key AS prompt, v.epoch AS epoch, v.id AS visit, v.leased_at AS leased_at, v.done_at AS done_at,
       (SELECT COUNT(*) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id) AS trajectories,
       (SELECT COUNT(t.error) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id) AS errors,
       (SELECT AVG(t.reward) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id AND t.error IS NULL) AS mean_reward,
       (SELECT MIN(t.reward) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id AND t.error IS NULL) AS min_reward,
       (SELECT MAX(t.reward) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id AND t.error IS NULL) AS max_reward,
       (SELECT MAX(0.0, AVG(t.reward * t.reward) - AVG(t.reward) * AVG(t.reward)) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id AND t.error IS NULL) AS reward_variance,
       (SELECT GROUP_CONCAT(DISTINCT t.policy_version) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id) AS policy_versions,
       (SELECT SUM(t.response_tokens) FROM trajectory_rows t WHERE t.prompt = v.prompt AND t.visit = v.id) AS response_tokens
FROM visits v
LEFT JOIN prompts p ON p.id = v.prompt
LEFT JOIN runs r ON r.id = v.run
UNION ALL
SELECT r.name AS run, p.key AS prompt, NULL AS epoch, 0 AS visit, NULL AS leased_at, NULL AS done_at,
       (SELECT COUNT(*) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0) AS trajectories,
       (SELECT COUNT(t.error) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0) AS errors,
       (SELECT AVG(t.reward) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0 AND t.error IS NULL) AS mean_reward,
       (SELECT MIN(t.reward) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0 AND t.error IS NULL) AS min_reward,
       (SELECT MAX(t.reward) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0 AND t.error IS NULL) AS max_reward,
       (SELECT MAX(0.0, AVG(t.reward * t.reward) - AVG(t.reward) * AVG(t.reward)) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0 AND t.error IS NULL) AS reward_variance,
       (SELECT GROUP_CONCAT(DISTINCT t.policy_version) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0) AS policy_versions,
       (SELECT SUM(t.response_tokens) FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0) AS response_tokens
FROM prompts p
LEFT JOIN runs r ON r.id = p.run
WHERE EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = p.id AND t.visit = 0);
CREATE VIEW consumption AS
SELECT r.name AS run, c.step, c.slot, c.trajectory, p.key AS prompt, t.reward, t.policy_version, c.staleness,
       b.handed_out_at AS handed_out_at, b.trained_at AS trained_at,
       strftime('%Y-%m-%dT%H:%M:%SZ', b.trained_at, 'unixepoch') AS trained_at_text
FROM consumption_rows c
LEFT JOIN batches b ON b.run = c.run AND b.step = c.step
LEFT JOIN trajectory_rows t ON t.id = c.trajectory
LEFT JOIN prompts p ON p.id = t.prompt
LEFT JOIN runs r ON r.id = c.run;
CREATE VIEW staleness AS
SELECT r.name AS run, b.step, b.prompts * b.samples AS slots,
       (SELECT COUNT(DISTINCT c.trajectory) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS trajectories,
       (SELECT MIN(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS min_staleness,
       (SELECT AVG(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS mean_staleness,
       (SELECT MAX(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS max_staleness,
       (SELECT AVG(b.handed_out_at - t.received_at) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS mean_age_seconds,
       (SELECT MAX(b.handed_out_at - t.received_at) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS max_age_seconds,
       (SELECT AVG(t.reward) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS mean_reward,
       b.recency_window, b.recency_groups, b.recency_missed,
       b.handed_out_at, b.trained_at
FROM batches b
LEFT JOIN runs r ON r.id = b.run;
CREATE VIEW clients AS
SELECT s.id, r.name AS run, s.sender, s.role, s.host, s.pid,
       (SELECT COUNT(*) FROM trajectory_rows t WHERE t.sender = s.id) AS trajectories,
       (SELECT COUNT(t.error) FROM trajectory_rows t WHERE t.sender = s.id) AS errors,
       (SELECT SUM(t.response_tokens) FROM trajectory_rows t WHERE t.sender = s.id) AS response_tokens,
       (SELECT AVG(t.reward) FROM trajectory_rows t WHERE t.sender = s.id AND t.error IS NULL) AS mean_reward,
       (SELECT t.received_at FROM trajectory_rows t WHERE t.sender = s.id ORDER BY t.sequence LIMIT 1)
           AS first_received_at,
       (SELECT t.received_at FROM trajectory_rows t WHERE t.sender = s.id ORDER BY t.sequence DESC LIMIT 1)
           AS last_received_at
FROM senders s
LEFT JOIN runs r ON r.id = s.run;
