-- A buffer database of schema 0007, as tests/data/dump.py made it.
BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'tba','0001_runs','2026-11-21 08:44:43.418756+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'tba','0002_prompts','2026-11-21 08:44:43.419239+00:00');
INSERT INTO "_sqlite_migrations" VALUES(3,'tba','0003_trajectories','2026-11-21 08:44:43.419727+00:00');
INSERT INTO "_sqlite_migrations" VALUES(4,'tba','0004_training','2026-11-21 08:44:43.420325+00:00');
INSERT INTO "_sqlite_migrations" VALUES(5,'tba','0005_names_and_history','2026-11-21 08:44:43.421947+00:00');
INSERT INTO "_sqlite_migrations" VALUES(6,'tba','0006_views','2026-11-21 08:44:43.422792+00:00');
INSERT INTO "_sqlite_migrations" VALUES(7,'tba','0007_snapshot_address','2026-11-21 08:44:43.423415+00:00');
CREATE TABLE "batches" (
   "run" INTEGER,
   "step" INTEGER,
   "prompts" INTEGER,
   "samples" INTEGER,
   "handed_out_at" REAL,
   "trained_at" REAL,
   "metrics" TEXT, "newest_trajectory" INTEGER,
   PRIMARY KEY ("run", "step")
) STRICT;
INSERT INTO "batches" VALUES(1,0,2,3,1000004.5,1000004.5,'{}',9);
INSERT INTO "batches" VALUES(1,1,2,3,1000004.5,NULL,NULL,11);
CREATE TABLE "consumption_rows" (
   "run" INTEGER,
   "step" INTEGER,
   "slot" INTEGER,
   "trajectory" INTEGER,
   "staleness" INTEGER,
   PRIMARY KEY ("run", "step", "slot")
) STRICT;
INSERT INTO "consumption_rows" VALUES(1,0,0,3,0);
INSERT INTO "consumption_rows" VALUES(1,0,1,1,0);
INSERT INTO "consumption_rows" VALUES(1,0,2,2,0);
INSERT INTO "consumption_rows" VALUES(1,0,3,5,0);
INSERT INTO "consumption_rows" VALUES(1,0,4,4,0);
INSERT INTO "consumption_rows" VALUES(1,0,5,6,0);
INSERT INTO "consumption_rows" VALUES(1,1,0,7,1);
INSERT INTO "consumption_rows" VALUES(1,1,1,8,1);
INSERT INTO "consumption_rows" VALUES(1,1,2,9,1);
INSERT INTO "consumption_rows" VALUES(1,1,3,1,1);
INSERT INTO "consumption_rows" VALUES(1,1,4,10,0);
INSERT INTO "consumption_rows" VALUES(1,1,5,3,1);
CREATE TABLE "payloads" (
   "trajectory" INTEGER PRIMARY KEY,
   "prompt_ids" BLOB,
   "response_ids" BLOB,
   "logprobs" BLOB,
   "version_runs" BLOB,
   "loss_mask" BLOB
) STRICT;
INSERT INTO "payloads" VALUES(1,X'0100000002000000',X'000000000000000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(2,X'0100000002000000',X'000000000100000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(3,X'0100000002000000',X'000000000200000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(4,X'0100000002000000',X'010000000000000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(5,X'0100000002000000',X'010000000100000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(6,X'0100000002000000',X'010000000200000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(7,X'0100000002000000',X'020000000000000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(8,X'0100000002000000',X'020000000100000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(9,X'0100000002000000',X'020000000200000009000000',X'000000BF000000BF000000BF',X'0000000003000000',X'');
INSERT INTO "payloads" VALUES(10,X'0100000002000000',X'0700000007000000',X'000000BF000000BF',X'0100000002000000',X'');
INSERT INTO "payloads" VALUES(11,X'0100000002000000',X'',X'',X'0100000000000000',X'');
CREATE TABLE "prompts" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER,
   "position" INTEGER,
   "key" TEXT
) STRICT;
INSERT INTO "prompts" VALUES(1,1,0,'p0');
INSERT INTO "prompts" VALUES(2,1,1,'p1');
INSERT INTO "prompts" VALUES(3,1,2,'p2');
CREATE TABLE "reference_logprobs" (
   "trajectory" INTEGER,
   "reference" TEXT,
   "logprob" REAL,
   PRIMARY KEY ("trajectory", "reference")
) STRICT;
INSERT INTO "reference_logprobs" VALUES(3,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(1,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(2,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(5,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(4,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(6,'initial',-1.5);
CREATE TABLE "runs" (
   "id" INTEGER PRIMARY KEY,
   "uuid" TEXT NOT NULL,
   "name" TEXT NOT NULL,
   "created_at" REAL NOT NULL,
   "seed" INTEGER NOT NULL,
   "task" TEXT,
   "fingerprint" TEXT,
   "prompts" INTEGER,
   "finished_step" INTEGER
) STRICT;
INSERT INTO "runs" VALUES(1,'c3459f06b1874f02bb2671971cd2abac','test',1.79525068342363166816e+09,0,'t','0000000000000000000000000000000000000000000000000000000000000000',3,NULL);
CREATE TABLE "senders" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER,
   "sender" TEXT,
   "role" TEXT,
   "host" TEXT,
   "pid" INTEGER
);
INSERT INTO "senders" VALUES(1,1,'s.1','searcher',NULL,NULL);
CREATE TABLE "snapshots" (
   "run" INTEGER,
   "version" INTEGER,
   "step" INTEGER,
   "path" TEXT,
   "manifest_sha256" TEXT,
   "bytes" INTEGER,
   "announced_at" REAL, "address" TEXT,
   PRIMARY KEY ("run", "version")
) STRICT;
INSERT INTO "snapshots" VALUES(1,0,0,'/v0','0000000000000000000000000000000000000000000000000000000000000000',1,1000000.0,NULL);
INSERT INTO "snapshots" VALUES(1,1,1,'/v1','0000000000000000000000000000000000000000000000000000000000000000',1,1000004.5,NULL);
CREATE TABLE "starts" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER,
   "started_at" REAL,
   "config" TEXT,
   "software" TEXT
) STRICT;
INSERT INTO "starts" VALUES(1,1,1.79525068342363166816e+09,'{}','{}');
CREATE TABLE "trajectory_rows" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER NOT NULL,
   "prompt" INTEGER NOT NULL,
   "visit" INTEGER,
   "sender" INTEGER NOT NULL,
   "sequence" INTEGER NOT NULL,
   "policy_version" INTEGER NOT NULL,
   "reward" REAL NOT NULL,
   "reward_parts" TEXT,
   "stop_reason" TEXT,
   "prompt_tokens" INTEGER,
   "response_tokens" INTEGER,
   "dedup_hash" INTEGER,
   "sampling" TEXT,
   "created_at" REAL,
   "received_at" REAL NOT NULL,
   "generation_seconds" REAL,
   "text" TEXT,
   "error" TEXT,
   "metadata" TEXT
, "payload_bytes" INTEGER, "compacted_at" REAL) STRICT;
INSERT INTO "trajectory_rows" VALUES(1,1,3,1,1,0,0,0.0,'{"correct":1.0}','eos',2,3,-5348404166570171303,'{"temperature":1.0,"top_p":1.0}',1000.0,1000001.5,0.1,'answer 0 0',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(2,1,3,1,1,1,0,0.5,'{"correct":1.0}','eos',2,3,2896554592816810991,'{"temperature":1.0,"top_p":1.0}',1000.0,1000001.5,0.1,'answer 0 1',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(3,1,3,1,1,2,0,1.0,'{"correct":1.0}','eos',2,3,1334470231697316394,'{"temperature":1.0,"top_p":1.0}',1000.0,1000001.5,0.1,'answer 0 2',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(4,1,1,2,1,3,0,0.0,'{"correct":1.0}','eos',2,3,6318000830998874689,'{"temperature":1.0,"top_p":1.0}',1000.0,1000003.0,0.1,'answer 1 0',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(5,1,1,2,1,4,0,0.5,'{"correct":1.0}','eos',2,3,-432574555326730336,'{"temperature":1.0,"top_p":1.0}',1000.0,1000003.0,0.1,'answer 1 1',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(6,1,1,2,1,5,0,1.0,'{"correct":1.0}','eos',2,3,-4311802327798027428,'{"temperature":1.0,"top_p":1.0}',1000.0,1000003.0,0.1,'answer 1 2',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(7,1,2,3,1,6,0,0.0,'{"correct":1.0}','eos',2,3,-4265653887955007026,'{"temperature":1.0,"top_p":1.0}',1000.0,1000004.5,0.1,'answer 2 0',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(8,1,2,3,1,7,0,0.5,'{"correct":1.0}','eos',2,3,-918038351435477319,'{"temperature":1.0,"top_p":1.0}',1000.0,1000004.5,0.1,'answer 2 1',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(9,1,2,3,1,8,0,1.0,'{"correct":1.0}','eos',2,3,149708910319166404,'{"temperature":1.0,"top_p":1.0}',1000.0,1000004.5,0.1,'answer 2 2',NULL,'{}',40,NULL);
INSERT INTO "trajectory_rows" VALUES(10,1,3,4,1,9,1,1.0,'{"correct":1.0}','eos',2,2,1181169607956133590,'{"temperature":1.0,"top_p":1.0}',1000.0,1000004.5,0.1,NULL,NULL,'{}',32,NULL);
INSERT INTO "trajectory_rows" VALUES(11,1,3,4,1,10,1,0.0,'{"correct":1.0}','error',2,0,-4425680296234449363,'{"temperature":1.0,"top_p":1.0}',1000.0,1000004.5,0.1,NULL,'reward: ValueError: no number','{}',16,NULL);
CREATE TABLE "visits" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER,
   "epoch" INTEGER,
   "place" INTEGER,
   "prompt" INTEGER,
   "sender" TEXT,
   "leased_at" REAL,
   "done_at" REAL
) STRICT;
INSERT INTO "visits" VALUES(1,1,0,0,3,'s.1',1000000.0,1000001.5);
INSERT INTO "visits" VALUES(2,1,0,1,1,'s.1',1000000.0,1000003.0);
INSERT INTO "visits" VALUES(3,1,0,2,2,'s.1',1000000.0,1000004.5);
INSERT INTO "visits" VALUES(4,1,1,0,3,'s.1',1000004.5,1000004.5);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE UNIQUE INDEX "idx_runs_name"
    ON "runs" ("name");
CREATE UNIQUE INDEX "idx_senders_sender"
    ON "senders" ("sender");
CREATE UNIQUE INDEX "idx_prompts_run_key"
    ON "prompts" ("run", "key");
CREATE UNIQUE INDEX "idx_prompts_run_position"
    ON "prompts" ("run", "position");
CREATE UNIQUE INDEX "idx_visits_run_epoch_place"
    ON "visits" ("run", "epoch", "place");
CREATE INDEX visits_open ON visits (run) WHERE done_at IS NULL;
CREATE UNIQUE INDEX "idx_trajectories_sender_sequence"
    ON "trajectory_rows" ("sender", "sequence");
CREATE INDEX "idx_trajectories_run_reward"
    ON "trajectory_rows" ("run", "reward");
CREATE INDEX "idx_trajectories_run_received_at"
    ON "trajectory_rows" ("run", "received_at");
CREATE INDEX "idx_trajectories_prompt_policy_version"
    ON "trajectory_rows" ("prompt", "policy_version");
CREATE INDEX "idx_consumption_trajectory"
    ON "consumption_rows" ("trajectory");
CREATE VIEW trajectories AS
SELECT t.id,
       r.name AS run,
       p.key AS prompt,
       v.epoch AS epoch,
       s.sender AS searcher,
       s.host AS host,
       t.policy_version,
       n.step AS policy_step,
       t.reward,
       t.reward_parts,
       t.stop_reason,
       t.prompt_tokens,
       t.response_tokens,
       json_extract(t.sampling, '$.temperature') AS temperature,
       json_extract(t.sampling, '$.top_p') AS top_p,
       t.created_at,
       t.received_at,
       strftime('%Y-%m-%dT%H:%M:%SZ', t.received_at, 'unixepoch') AS received_at_text,
       t.generation_seconds,
       t.text,
       t.error,
       t.metadata,
       t.compacted_at,
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
SELECT r.name AS run,
       p.key AS prompt,
       v.epoch AS epoch,
       v.id AS visit,
       v.leased_at AS leased_at,
       v.done_at AS done_at,
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
SELECT r.name AS run,
       p.key AS prompt,
       NULL AS epoch,
       0 AS visit,
       NULL AS leased_at,
       NULL AS done_at,
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
SELECT r.name AS run,
       c.step,
       c.slot,
       c.trajectory,
       p.key AS prompt,
       t.reward,
       t.policy_version,
       c.staleness,
       b.handed_out_at AS handed_out_at,
       b.trained_at AS trained_at,
       strftime('%Y-%m-%dT%H:%M:%SZ', b.trained_at, 'unixepoch') AS trained_at_text
FROM consumption_rows c
LEFT JOIN batches b ON b.run = c.run AND b.step = c.step
LEFT JOIN trajectory_rows t ON t.id = c.trajectory
LEFT JOIN prompts p ON p.id = t.prompt
LEFT JOIN runs r ON r.id = c.run;
CREATE VIEW staleness AS
SELECT r.name AS run,
       b.step,
       b.prompts * b.samples AS slots,
       (SELECT COUNT(DISTINCT c.trajectory) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS trajectories,
       (SELECT MIN(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS min_staleness,
       (SELECT AVG(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS mean_staleness,
       (SELECT MAX(c.staleness) FROM consumption_rows c WHERE c.run = b.run AND c.step = b.step) AS max_staleness,
       (SELECT AVG(b.handed_out_at - t.received_at) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS mean_age_seconds,
       (SELECT MAX(b.handed_out_at - t.received_at) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS max_age_seconds,
       (SELECT AVG(t.reward) FROM consumption_rows c JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = b.run AND c.step = b.step) AS mean_reward,
       b.handed_out_at,
       b.trained_at
FROM batches b
LEFT JOIN runs r ON r.id = b.run;
CREATE VIEW clients AS
SELECT s.id,
       r.name AS run,
       s.sender,
       s.role,
       s.host,
       s.pid,
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
COMMIT;
