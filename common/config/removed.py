"""What earlier builds had: sections, keys and commands, each with what is in its place. They are refused with that."""

_GOLD = "the option gold_url of examples/tldr/tldr.py, whose part of the reward is win_rate"
_RESTARTS = "a child is restarted after 1 s, which doubles to 60 s and starts again after ten minutes without a failure"
_RECENCY = "buffer.recency_fraction holds for the whole run"
KEYS = {
    "alarm": "tba_stalled of metrics.prometheus, with Alertmanager, and OnFailure= of systemd (docs/operations.md)",
    "gold_model": _GOLD,
    "buffer.rank_exponent": "ranks are drawn by 1 / rank",
    "buffer.recency_anneal_steps": _RECENCY,
    "buffer.recency_fraction_final": _RECENCY,
    "eval.batch": "search.max_in_flight, of evaluations too",
    "eval.duplicate_distance": "it is 0.2",
    "eval.max_tokens": "search.max_tokens, of evaluations too",
    "eval.pass_at": "with eval.samples, pass@1, 4, 16 and 64 are measured",
    "eval.top_p": "evaluations sample without top-p",
    "launch.restart_delay_max_seconds": _RESTARTS,
    "launch.restart_delay_seconds": _RESTARTS,
    "launch.stable_seconds": _RESTARTS,
    "launch.summary_seconds": "outside a terminal, the state is printed every 10 s",
    "metrics.peak_tflops": "the table of trainer/metrics/flops.py",
    "objective.cispo_cap": "it is 5",
    "objective.clip_low": "it is 0.2",
    "objective.ema_decay": "it is 0.9",
    "objective.log_z_learning_rate": "it is 0.001",
    "objective.second_moment": "nothing: the mask of M2PO helped nowhere that it was measured",
    "reward_model.batch_tokens": "it is 16,384 tokens",
    "reward_model.dtype": "the dtype of the files of the model",
    "reward_model.load_seconds": "it is ten minutes",
    "reward_model.max_length": "the limit of the model itself",
    "search.keep_prefix_cache": "prefixes of older weights are never used again",
    "search.max_unacknowledged": "search.spool_dir keeps what the buffer has not acknowledged",
    "search.reference_logprobs": "the trainer computes them, once for each trajectory",
    "task.load_seconds": "it is ten minutes",
    "train.full_snapshot_every": "every snapshot is full, with a delta for nodes that fetch over the network",
    "train.keep_checkpoints": "the newest two stay",
    "train.max_skipped_steps": "the trainer gives up after five skipped steps in a row",
    "train.prefetch": "the next batch is always fetched ahead, unless buffer.max_staleness = 0",
}
# With an option, only that is refused.
COMMANDS = {
    "buffer compact": "`tba buffer prune --tokens`",
    "buffer migrate": "continue the run with the build that began it, or export there and import into a new run",
    "buffer query --address": "`ssh HOST tba buffer query SQL`",
    "buffer restore": "move the database and its -wal away, and `cp` the backup there (docs/storage.md)",
    "buffer search": "`tba buffer query \"SELECT ... WHERE text LIKE '%WORD%'\"`, or the filter of `tba ui`",
    "buffer serve-queries": "`ssh HOST tba buffer query SQL`",
    "config check": "`tba doctor --only settings --only model --only task`",
    "plot": "`tba report RUN... --out FILE.png` (or .svg, .pdf)",
    "task show": "`tba task check` with --prompts N, --key, --held-out or --response TEXT",
}
