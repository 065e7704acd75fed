"""The names of files and directories in run.dir. `tba sft` uses some of them in OUT.work."""

DATABASE = "buffer.sqlite"
METRICS = "metrics.jsonl"
EVALUATIONS = "eval.jsonl"
SNAPSHOTS = "snapshots"
CHECKPOINTS = "checkpoints"
SPOOL = "spool"
LOGS = "logs"
# Of snapshots that fit into no memory.
WEIGHTS = "weights"
# `tba run` holds the first, the trainer the second.
LAUNCH_LOCK = "launcher.lock"
TRAINER_LOCK = "trainer.lock"
