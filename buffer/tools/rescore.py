"""Log-probabilities of stored responses under snapshots that their run has kept: the table `rescored_logprobs`."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tba.buffer.store.reader import open_reader, read_maps
from tba.buffer.store.store import Store
from tba.buffer.tools.export import OnProgress, open_records
from tba.common import run_files
from tba.common.config import Config
from tba.common.errors import UsageError
from tba.common.token_batches import cut_by_tokens
from tba.common.weights.snapshot import MANIFEST, check_manifest, directory_name
from tba.common.wire.trajectory import Float32

# Computes log-probabilities of the response tokens of records, which have a `temperature`, 0 if it is unknown.
Score = Callable[[Sequence[dict[str, Any]]], list[Float32]]
_COLUMNS = ("trajectory", "version", "logprob", "sampled_logprob", "max_difference", "logprobs")
_ANNOUNCED = "SELECT n.version, n.manifest_sha256 FROM snapshots n JOIN runs r ON r.id = n.run WHERE r.name = ?"
_DONE = """SELECT x.version, COUNT(*) AS trajectories, MAX(x.max_difference) AS max_difference
    FROM rescored_logprobs x JOIN trajectories t ON t.id = x.trajectory WHERE t.run = ? GROUP BY x.version"""
_MOST_ROWS = 256


def rescore(
    config: Config, at: int | None, where: str, load: Callable[[Path], Score], on_progress: OnProgress
) -> dict[str, Any]:
    """Score the trajectories of a run for which `where` is true at the version `at`, except those that were.

    `at` None is each version that sampled a token of them. `load` gives the scorer of a snapshot. Raises LockTaken if a
    server has the database open, UsageError if there is none or `where` is wrong, SnapshotError if a snapshot is not
    the announced one. Returns what is scored at each version, and how many were left out for which reason.
    """
    path = config.database
    if not path.exists():
        raise UsageError(f"{path} does not exist: nothing to score")
    folder = config.snapshots if config.snapshots.is_dir() else path.resolve().parent / run_files.SNAPSHOTS
    with closing(Store(path, durability=config.buffer.durability)) as store:
        announced = dict(store.database.all(_ANNOUNCED, config.run.name))
        scored = set(store.database.all("SELECT trajectory, version FROM rescored_logprobs"))
        wanted, left_out = _wanted(config, at, where, scored)
        for version, tokens in sorted(wanted.items()):
            snapshot, ids = folder / directory_name(version), list(tokens)
            if version not in announced or not (snapshot / MANIFEST).is_file():
                left_out[f"the run has no snapshot v{version}"] = len(ids)
                continue
            check_manifest(snapshot, announced[version])
            score, limit = load(snapshot), config.train.micro_batch_tokens
            for part in cut_by_tokens(list(tokens.values()), limit, in_order=True, max_rows=_MOST_ROWS):
                on_progress(f"scoring at v{version}", part[0], len(ids))
                named = json.dumps([ids[n] for n in part])
                with open_records(path, f"id IN (SELECT value FROM json_each('{named}'))") as (records, _):  # noqa: S608
                    read = list(map(_with_temperature, records))
                rows = [_row(record, version, own) for record, own in zip(read, score(read), strict=True)]
                with store.transaction():
                    store.database.insert("rescored_logprobs", _COLUMNS, list(zip(*rows, strict=True)))
            # Before the next model is loaded.
            del score
    with open_reader(path) as connection:
        return {"run": config.run.name, "versions": read_maps(connection, _DONE, config.run.name), "left_out": left_out}


def _wanted(
    config: Config, at: int | None, where: str, scored: set[tuple[int, int]]
) -> tuple[dict[int, dict[int, int]], Counter[str]]:
    """Return the tokens of each trajectory to score, by version and id, and how many are left out for which reason."""
    wanted, left_out, read = defaultdict[int, dict[int, int]](dict), Counter[str](), 0
    with open_records(config.database, where) as (records, matching):
        for read, record in enumerate(records, 1):  # noqa: B007
            versions = {version for version, _ in record["version_runs"]} if at is None else {at}
            for version in versions if record["run_name"] == config.run.name else ():
                if version < 0 or (at is None and record["policy_version"] < 0):
                    left_out["no version of this run sampled them"] += 1
                elif not record["prompt_tokens"] or not record["response_tokens"]:
                    left_out["they have no prompt or no response"] += 1
                elif (record["id"], version) in scored:
                    left_out["scored already"] += 1
                else:
                    wanted[version][record["id"]] = record["prompt_tokens"] + record["response_tokens"]
        left_out["their tokens were dropped"] = matching() - read
    return wanted, +left_out


def _with_temperature(record: dict[str, Any]) -> dict[str, Any]:
    sampling = record["sampling"]
    known = record["kept"] or (sampling.get("top_p") == 1 and not {"top_k", "min_p"} & sampling.keys())
    return record | {"temperature": float(sampling.get("temperature", 0)) if known else 0.0}


def _row(record: dict[str, Any], version: int, own: Float32) -> tuple[Any, ...]:
    """Return the values of `_COLUMNS`; those that compare with the engine are None where it is unknown."""
    counted = np.array(record["loss_mask"] or [1] * len(own), bool)
    sampled, scored = np.array(record["logprobs"], float)[counted], own[counted].astype(float)
    is_known = record["temperature"] and len(sampled)
    compared = (sampled.sum(), np.abs(scored - sampled).max()) if is_known else (None, None)
    return record["id"], version, scored.sum(), *compared, own.astype("<f4").tobytes()
