-- A buffer database of schema 0005, as tests/data/dump.py made it.
BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'tba','0001_runs','2026-11-21 05:39:20.632898+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'tba','0002_prompts','2026-11-21 05:39:20.633462+00:00');
INSERT INTO "_sqlite_migrations" VALUES(3,'tba','0003_trajectories','2026-11-21 05:39:20.634060+00:00');
INSERT INTO "_sqlite_migrations" VALUES(4,'tba','0004_training','2026-11-21 05:39:20.634800+00:00');
INSERT INTO "_sqlite_migrations" VALUES(5,'tba','0005_names_and_history','2026-11-21 05:39:20.637505+00:00');
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
INSERT INTO "batches" VALUES(1,0,2,3,1000004.5,1000004.5,'{}',NULL);
INSERT INTO "batches" VALUES(1,1,2,3,1000004.5,NULL,NULL,NULL);
CREATE TABLE "consumption_rows" (
   "run" INTEGER,
   "step" INTEGER,
   "slot" INTEGER,
   "trajectory" INTEGER,
   "staleness" INTEGER,
   PRIMARY KEY ("run", "step", "slot")
) STRICT;
INSERT INTO "consumption_rows" VALUES(1,0,0,9,0);
INSERT INTO "consumption_rows" VALUES(1,0,1,8,0);
INSERT INTO "consumption_rows" VALUES(1,0,2,7,0);
INSERT INTO "consumption_rows" VALUES(1,0,3,3,0);
INSERT INTO "consumption_rows" VALUES(1,0,4,1,0);
INSERT INTO "consumption_rows" VALUES(1,0,5,2,0);
INSERT INTO "consumption_rows" VALUES(1,1,0,1,1);
INSERT INTO "consumption_rows" VALUES(1,1,1,10,0);
INSERT INTO "consumption_rows" VALUES(1,1,2,2,1);
INSERT INTO "consumption_rows" VALUES(1,1,3,6,1);
INSERT INTO "consumption_rows" VALUES(1,1,4,5,1);
INSERT INTO "consumption_rows" VALUES(1,1,5,4,1);
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
INSERT INTO "reference_logprobs" VALUES(9,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(8,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(7,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(3,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(1,'initial',-1.5);
INSERT INTO "reference_logprobs" VALUES(2,'initial',-1.5);
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
INSERT INTO "runs" VALUES(1,'60a32eff74e54ef5b67d3f35ce84079c','test',1.79523956063766217238e+09,0,'t','0000000000000000000000000000000000000000000000000000000000000000',3,NULL);
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
   "announced_at" REAL,
   PRIMARY KEY ("run", "version")
) STRICT;
INSERT INTO "snapshots" VALUES(1,0,0,'/v0','0000000000000000000000000000000000000000000000000000000000000000',1,1000000.0);
INSERT INTO "snapshots" VALUES(1,1,1,'/v1','0000000000000000000000000000000000000000000000000000000000000000',1,1000004.5);
CREATE TABLE "starts" (
   "id" INTEGER PRIMARY KEY,
   "run" INTEGER,
   "started_at" REAL,
   "config" TEXT,
   "software" TEXT
) STRICT;
INSERT INTO "starts" VALUES(1,1,1.79523956063766217238e+09,'{}','{}');
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
INSERT INTO "trajectory_rows" VALUES(1,1,3,1,1,0,0,0.0,'{"correct": 1.0}','eos',2,3,5222232459967829838,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000001.5,0.1,'answer 0 0',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(2,1,3,1,1,1,0,0.5,'{"correct": 1.0}','eos',2,3,429351246879452153,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000001.5,0.1,'answer 0 1',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(3,1,3,1,1,2,0,1.0,'{"correct": 1.0}','eos',2,3,-6955270808729897285,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000001.5,0.1,'answer 0 2',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(4,1,1,2,1,3,0,0.0,'{"correct": 1.0}','eos',2,3,8376033021912232094,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000003.0,0.1,'answer 1 0',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(5,1,1,2,1,4,0,0.5,'{"correct": 1.0}','eos',2,3,-4019138231925661537,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000003.0,0.1,'answer 1 1',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(6,1,1,2,1,5,0,1.0,'{"correct": 1.0}','eos',2,3,-5289927656632350782,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000003.0,0.1,'answer 1 2',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(7,1,2,3,1,6,0,0.0,'{"correct": 1.0}','eos',2,3,4549259072735940874,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000004.5,0.1,'answer 2 0',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(8,1,2,3,1,7,0,0.5,'{"correct": 1.0}','eos',2,3,608495105245440332,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000004.5,0.1,'answer 2 1',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(9,1,2,3,1,8,0,1.0,'{"correct": 1.0}','eos',2,3,8165271320314550544,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000004.5,0.1,'answer 2 2',NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(10,1,3,4,1,9,1,1.0,'{"correct": 1.0}','eos',2,2,-3903751320039460579,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000004.5,0.1,NULL,NULL,'{}',NULL,NULL);
INSERT INTO "trajectory_rows" VALUES(11,1,3,4,1,10,1,0.0,'{"correct": 1.0}','error',2,0,-5426141060434712860,'{"temperature": 1.0, "top_p": 1.0}',1000.0,1000004.5,0.1,NULL,'reward: ValueError: no number','{}',NULL,NULL);
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
COMMIT;
