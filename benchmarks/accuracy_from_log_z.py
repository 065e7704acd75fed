"""Predict a prompt's next group mean from log Z, and from its newest responses as the curriculum does.

    python -m benchmarks.accuracy_from_log_z RUN/buffer.sqlite ...

Balanced responses of accuracy p have p = beta (log Z + mean log pi / ref) (PACED-RL, arXiv 2602.12642). Predictors use
what was stored when a visit was leased. log Z is the learned one, or else that of VarGrad.
"""

import argparse
import contextlib
import json
import sqlite3
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.harness import print_table

BATCHES, NEWEST = 4, (8, 32)
OF_LOG_Z = "log Z and KL of the newest batch", "its log Z", f"log Z of the newest {BATCHES}, KL of the newest"
PREDICTORS = (*OF_LOG_Z, *(f"mean of the newest {count} responses" for count in NEWEST))
_GROUPS = """
SELECT t.prompt, b.trained_at, AVG(t.reward), AVG(t.reward - c.advantage),
       json_extract(b.metrics, '$.beta') * AVG(c.logprob - r.logprob)
FROM consumption_rows c JOIN batches b ON b.id = c.batch JOIN trajectory_rows t ON t.id = c.trajectory
JOIN reference_logprobs r ON r.trajectory = t.id WHERE NOT c.skipped GROUP BY b.id, t.prompt ORDER BY b.trained_at"""
_RESPONSES = "SELECT prompt, received_at, reward FROM trajectory_rows WHERE error IS NULL ORDER BY id"
_VISITS = """SELECT v.prompt, v.leased_at, AVG(t.reward) FROM visits v JOIN trajectory_rows t ON t.visit = v.id
WHERE t.error IS NULL GROUP BY v.id"""


def read(path: Path) -> tuple[str, np.ndarray]:
    """Return the objective of a run, and for each visit the predictions in the order of PREDICTORS and the mean."""
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        (config,) = database.execute("SELECT config FROM starts ORDER BY id DESC").fetchone()
        groups, responses = (_columns_by_prompt(database, query) for query in (_GROUPS, _RESPONSES))
        visits = database.execute(_VISITS).fetchall()
    objective, found = json.loads(config)["objective"]["name"], []
    for prompt, leased_at, mean in visits:
        trained_at, group_means, from_head, kl = groups.get(prompt, ([], [], [], []))
        received_at, rewards = responses[prompt]
        trained, count = bisect_left(trained_at, leased_at), bisect_left(received_at, leased_at)
        if trained < BATCHES or count < max(NEWEST):
            continue
        accuracies = np.array(from_head if objective == "tb_learned_z" else group_means)[trained - BATCHES : trained]
        log_z, last_kl = accuracies - kl[trained - BATCHES : trained], kl[trained - 1]
        newest = [np.mean(rewards[count - newest : count]) for newest in NEWEST]
        found.append([accuracies[-1], log_z[-1], log_z.mean() + last_kl, *newest, mean])
    return objective, np.array(found)


def _columns_by_prompt(database: sqlite3.Connection, query: str) -> dict[int, list[tuple[float, ...]]]:
    found = defaultdict(list)
    for prompt, *rest in database.execute(query):
        found[prompt].append(rest)
    return {prompt: list(zip(*rows, strict=True)) for prompt, rows in found.items()}


def errors(visits: np.ndarray) -> np.ndarray:
    """Return correlation, bias, mean absolute error and that of a fit; the last row: the last and first predictor."""
    *columns, mean = visits.T
    rows = []
    for fit in [*([column] for column in columns), [columns[-1], columns[0]]]:
        design, off = np.stack([np.ones_like(mean), *fit], axis=1), fit[0] - mean
        fitted = design @ np.linalg.lstsq(design, mean)[0]
        rows.append([np.corrcoef(fitted, mean)[0, 1], off.mean(), abs(off).mean(), abs(fitted - mean).mean()])
    return np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path)
    runs = defaultdict(list)
    for path in parser.parse_args().databases:
        objective, visits = read(path)
        print(objective, len(visits), "visits", flush=True)
        runs[objective].append(errors(visits))
    for objective, tables in runs.items():
        names = [*PREDICTORS, "the last, with the first"]
        numbers = [
            map("{:.3f} ± {:.3f}".format, *row) for row in zip(np.mean(tables, 0), np.std(tables, 0), strict=True)
        ]
        rows = [[name, *row] for name, row in zip(names, numbers, strict=True)]
        print_table(f"{objective}: {len(tables)} runs", ["predictor", "r", "bias", "mean error", "fitted"], rows)


if __name__ == "__main__":
    main()
