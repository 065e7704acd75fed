"""What the trainer shows to Prometheus: the metrics of the last step, and totals since its start."""

import re
from collections import defaultdict
from collections.abc import Sequence

from tba.common.prometheus import MetricsEndpoint, Sample
from tba.trainer.metrics.answers import Answer

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
# Metrics with a varying part in their names: that part is a label.
_FAMILIES = (
    ("reward_part_", "reward_part", "part", "Mean of a part of the reward over the last batch."),
    ("staleness_share_", "staleness_share_ratio", "steps", "Share of the last batch with a staleness in this bin."),
)
_PHASE = "seconds_"


class PrometheusSink:
    """Serves the last step (`tba_trainer_NAME`; a metric that it does not have is absent) and totals (`..._total`).

    Raises OSError if the port is taken.
    """

    def __init__(self, host: str, port: int, run: str) -> None:
        self._endpoint = MetricsEndpoint(host, port, run)
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._tokens = self._skipped = 0.0

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self._endpoint.port

    def record(self, step: int, time: float, numbers: dict[str, float], _: Sequence[Answer] = ()) -> None:
        """Replace the samples; a scrape sees those of one step."""
        self._tokens += numbers.get("tokens", 0.0)
        self._skipped += numbers.get("skipped", 0.0)
        for name, value in numbers.items():
            if name.startswith(_PHASE) and name != "seconds_step":
                self._phases[name.removeprefix(_PHASE)] += value
        totals = [
            Sample("trainer_steps_total", step + 1, "Steps of the run, skipped ones included."),
            Sample("trainer_skipped_steps_total", self._skipped, "Steps without an update since the trainer's start."),
            Sample("trainer_tokens_total", self._tokens, "Tokens of all batches since the trainer's start."),
            Sample("trainer_last_step_timestamp_seconds", time, "When the last step ended."),
        ]
        phases = [
            Sample(
                "trainer_phase_seconds_total", seconds, "Time in a phase since the trainer's start.", {"phase": phase}
            )
            for phase, seconds in self._phases.items()
        ]
        self._endpoint.show([*totals, *phases, *_gauges(numbers)])

    def close(self) -> None:
        """Stop serving."""
        self._endpoint.close()


def _gauges(numbers: dict[str, float]) -> list[Sample]:
    """Return the samples of a step, without what the totals have."""
    samples = []
    for name, value in sorted(numbers.items()):
        if name == "seconds_step":
            samples.append(Sample("trainer_step_seconds", value, "Duration of the last step."))
        elif not name.startswith(_PHASE) and name not in ("tokens", "skipped"):
            samples.append(_gauge(name, value))
    return samples


def _gauge(name: str, value: float) -> Sample:
    for prefix, family, label, description in _FAMILIES:
        if name.startswith(prefix):
            return Sample(f"trainer_{family}", value, description, {label: name.removeprefix(prefix)})
    return Sample(f"trainer_{_NOT_IN_NAMES.sub('_', name)}", value, f"{name} of the last step (docs/metrics.md).")
