"""One run at the pace of a node: real processes, and what they reached when."""

import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from benchmarks.harness import first_reached, tba
from benchmarks.serving import free_address
from benchmarks.wall_clock.pace import Pace, PacedEngine, paced_trainer
from tba.common.config import Config
from tba.common.config.layers import resolve
from tba.common.system.process import StopSignal
from tba.searcher import loop as searcher_loop
from tba.searcher.build import make_engine
from tba.trainer import loop

_DEMO = Path("examples/arithmetic/demo.toml")
# Processes share the memory of what they import, so that 63 searchers need 4 GiB instead of 19.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload([__name__, "transformers.models.llama.modeling_llama"])
_STOP_SECONDS = 120.0
_START_SECONDS = 600.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `accuracies` are pairs of Unix time and held-out accuracy, `late` counts steps slower than the pace."""

    started: float
    first_ended: float
    ended: float
    steps: int
    staleness: float
    busy: float
    late: int
    accuracies: list[tuple[float, float]]

    @property
    def seconds_step(self) -> float:
        """Seconds from the end of a step to the end of the next one."""
        return (self.ended - self.first_ended) / (self.steps - 1)

    def seconds_to(self, accuracy: float) -> float:
        """Seconds from the first batch until an accuracy is reached; NaN if it is not."""
        times, values = zip(*self.accuracies, strict=True)
        return first_reached(accuracy, values, times) - self.started


def run(settings: list[str], searchers: int, pace: Pace) -> Outcome:
    """Train once with real processes."""
    with tempfile.TemporaryDirectory(prefix="tba-wall-clock-") as folder:
        settings = [*settings, f"run.dir={folder}/run", f"buffer.address={free_address()}"]
        config = resolve(_DEMO, environment={}, assignments=settings).config
        notes = Path(folder) / "steps.jsonl"
        command = tba("buffer", "serve", "--config", str(_DEMO), settings=settings)
        buffer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        # Generation starts in all searchers at once: starting dozens of processes takes longer than a step.
        ready = _FORKSERVER.Barrier(searchers)
        children = [_child(_search, config, pace, number, ready) for number in range(searchers)]
        trainer = _child(_train, config, pace, notes)
        try:
            while trainer.is_alive():
                time.sleep(_POLL_SECONDS)
                if buffer.poll() is not None or any(child.exitcode for child in (trainer, *children)):
                    raise RuntimeError("a process of the run has failed: its log lines are above")
        finally:
            for child in (*children, trainer):
                child.terminate()
            for child in (*children, trainer):
                child.join(_STOP_SECONDS)
            buffer.terminate()
            buffer.wait(_STOP_SECONDS)
        return _outcome(config, settings, pace, notes)


def _child(target: Callable[..., None], *arguments: object) -> BaseProcess:
    child = _FORKSERVER.Process(target=target, args=arguments)
    child.start()
    return child


def _search(config: Config, pace: Pace, number: int, ready: Barrier) -> None:
    def paced(*arguments: object, **named: object) -> PacedEngine:
        engine = make_engine(*arguments, **named)  # type: ignore[arg-type]
        ready.wait(_START_SECONDS)
        return PacedEngine(engine, pace, [config.run.seed, number])

    searcher_loop.build.make_engine = paced  # type: ignore[attr-defined]
    searcher_loop.search(config, device="cpu", label=f"cpu{number}", stop=StopSignal())


def _train(config: Config, pace: Pace, notes: Path) -> None:
    with notes.open("a", buffering=1) as file:
        note = lambda ended, computed: print(json.dumps([ended, computed]), file=file)  # noqa: E731
        loop.Trainer = paced_trainer(pace, note)  # type: ignore[misc]
        loop.train(config, resume=False, device="cpu", stop=StopSignal())


def _outcome(config: Config, settings: list[str], pace: Pace, notes: Path) -> Outcome:
    ended, computed = np.array([json.loads(line) for line in notes.read_text().splitlines()]).T
    started = ended[0] - max(pace.step, computed[0])
    metrics = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    times = [started, *ended]
    command = tba("eval", "--config", str(_DEMO), "--all", "--json", settings=settings)
    evaluated = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))
    return Outcome(
        started=started,
        first_ended=float(ended[0]),
        ended=float(ended[-1]),
        steps=len(ended),
        staleness=statistics.mean(one["staleness_mean"] for one in metrics if "staleness_mean" in one),
        busy=float(np.maximum(computed, pace.step).sum() / (ended[-1] - started)),
        late=int((computed > pace.step).sum()),
        accuracies=[(times[one["step"]], one["accuracy"]) for one in evaluated],
    )
