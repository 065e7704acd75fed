"""The file of results: one JSON object per run, with the setting and the measurements. Runs in it are not repeated."""

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.off_policy.setting import Setting
from benchmarks.off_policy.tasks import load_task
from benchmarks.off_policy.training import run

SETTING_FIELDS = tuple(field.name for field in dataclasses.fields(Setting))


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements before the first step and after each eighth of a run (`training.run`)."""

    reward: list[float]
    greedy: list[float]
    pass_at_8: list[float]
    drift: list[float]
    age: list[float]
    cpu_seconds: float

    @property
    def gain(self) -> float:
        """Expected reward at the end minus that at the start."""
        return self.reward[-1] - self.reward[0]


Results = dict[Setting, Result]


def load(path: Path) -> Results:
    """Return the results of a file, none if it does not exist. A field that a setting lacks has its default."""
    if not path.exists():
        return {}
    return dict(map(_parse, path.read_text(encoding="utf-8").splitlines()))


def _parse(line: str) -> tuple[Setting, Result]:
    row = json.loads(line)
    setting = Setting(**{name: row.pop(name) for name in SETTING_FIELDS if name in row})
    return setting, Result(**row)


def complete(path: Path, settings: Iterable[Setting], *, workers: int, deadline: float) -> Results:
    """Run the settings that are not in the file, in their order, and return all results.

    No run starts after `deadline`, on the clock of time.monotonic(); those under way are finished.
    """
    done = load(path)
    missing = [setting for setting in dict.fromkeys(settings) if setting not in done]
    for task in {setting.task for setting in missing}:
        # Makes a model that is missing, before several workers would at once.
        load_task(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool, path.open("a") as file:
        running: set[Future[dict[str, object]]] = set()
        for number, setting in enumerate(missing, start=1):
            if len(running) == workers:
                running = _write_finished(running, file)
            if time.monotonic() > deadline:
                print(f"out of time before run {number} of {len(missing)}", flush=True)
                break
            running.add(pool.submit(run, setting))
        while running:
            running = _write_finished(running, file)
    return load(path)


def _write_finished(running: set[Future[dict[str, object]]], file: TextIO) -> set[Future[dict[str, object]]]:
    """Wait for a run to finish and write the results that are there. Returns the runs that are still under way."""
    finished, still = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        line = json.dumps(future.result())
        print(line, flush=True)
        file.write(line + "\n")
        file.flush()
    return still
