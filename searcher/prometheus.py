"""What a searcher shows to Prometheus: the metrics of its heartbeat, and what it has generated since its start."""

from collections.abc import Mapping

from tba.common.prometheus import Sample

# Name at Prometheus and description of each metric of a heartbeat. Rates are left out: Prometheus computes them.
NAMES = {
    "in_flight": ("requests_in_flight", "Responses that the engine generates or has queued."),
    "max_in_flight": ("max_requests_in_flight", "Responses that the engine generates at a time."),
    "kv_cache_tokens": ("kv_cache_tokens", "Tokens that fit the KV cache."),
    "preemptions": ("preemptions_total", "Responses that vLLM interrupted because the KV cache was full."),
    "unacknowledged_groups": ("unacknowledged_groups", "Groups that the buffer has not acknowledged."),
    "spool_bytes": ("spool_bytes", "Disk space of the groups in the spool that the buffer has not acknowledged."),
    "spool_damaged": ("spool_damaged_files_total", "Files of spools that could not be read."),
    "spool_undeleted": ("spool_undeleted_files", "Acknowledged files of the spool that could not be deleted."),
    "paused": ("paused", "1 if generation pauses because the spool is full or the disk refuses it."),
    "errors": ("failed_responses_total", "Responses with an error."),
    "rewards_waiting": ("rewards_waiting", "Responses that wait for a reward."),
    "reward_seconds": ("reward_seconds", "Time that the last scored response waited for its reward, scoring included."),
    "reward_errors": ("reward_errors_total", "Rewards that failed."),
    "reward_timeouts": ("reward_timeouts_total", "Rewards that took longer than task.reward_seconds."),
    "references_waiting": ("references_waiting", "Responses that wait for a reference log-probability."),
    "reference_errors": ("reference_errors_total", "Reference log-probabilities that failed."),
    "weights_load_seconds": ("weights_load_seconds", "Duration of the last swap of weights."),
    "weights_prepare_seconds": ("weights_prepare_seconds", "Duration of the last preparation of weights."),
    "weights_refusals": ("weights_refusals_total", "Snapshots refused, each attempt counted."),
    "refused_version": ("refused_version", "Version of the snapshot that is refused."),
    "mismatch_max": ("mismatch_max", "Largest difference of a log-probability of the canary from the trainer's."),
    "mismatch_mean": ("mismatch_mean", "Mean difference of a log-probability of the canary from the trainer's."),
    "mismatch_kl": ("mismatch_kl", "Estimated KL divergence from the trainer on the canary."),
    "swap_read_seconds": ("swap_read_seconds", "Last swap: reading the weights, alongside generation."),
    "swap_exchange_seconds": ("swap_exchange_seconds", "Last swap: exchanging the weights."),
    "swap_canary_seconds": ("swap_canary_seconds", "Last swap: scoring the canary."),
    "swap_pause_seconds": ("swap_pause_seconds", "Last swap: pause of generation."),
}


def samples_of(
    metrics: Mapping[str, float],
    *,
    version: int | None,
    is_generating: bool,
    trajectories: int,
    tokens: int,
) -> list[Sample]:
    """Return the samples of a heartbeat's metrics; `trajectories` and `tokens` were generated since the start."""
    samples = [
        Sample("searcher_generating", is_generating, "1 if responses are being generated."),
        Sample("searcher_trajectories_total", trajectories, "Responses generated and scored."),
        Sample("searcher_response_tokens_total", tokens, "Tokens of the responses generated and scored."),
    ]
    if version is not None:
        samples.append(Sample("searcher_weights_version", version, "Version of the weights that are served."))
    for name, value in metrics.items():
        if name in NAMES:
            shown, description = NAMES[name]
            samples.append(Sample(f"searcher_{shown}", value, description))
    return samples
