"""What the commands of other packages do with the database of a run, passed to them by `tba.cli`.

Slow imports are in the functions, so that `tba --help` stays fast.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.config.layers import Resolved


def read_results(database: Path) -> list[dict[str, Any]]:
    """As `tba.buffer.tools.stats.read_results`."""
    from tba.buffer.tools import stats

    return stats.read_results(database)


def refuse_other_work(config: "Config") -> None:
    """As `tba.buffer.store.recorded_work.refuse_other_work`, for a start."""
    from tba.buffer.store import recorded_work

    recorded_work.refuse_other_work(config)


def as_recorded(resolved: "Resolved", *, evaluates: bool) -> "Config":
    """Return the configuration of a command on a run that exists.

    Without a file it is what the run was last served with, with what was set here on top. Raises ConfigError if a
    command that `evaluates` has another task or model than the run, UsageError if the file holds several runs and
    none is named.
    """
    from tba.buffer.store import recorded_work, starts

    config = starts.as_recorded(resolved)
    if evaluates:
        recorded_work.refuse_other_work(config, evaluates=True)
    return config


as_evaluated = partial(as_recorded, evaluates=True)


def read_wrong(config: "Config") -> list[dict[str, Any]]:
    """As `tba.buffer.tools.record_evaluation.read_wrong`."""
    from tba.buffer.tools import record_evaluation

    return record_evaluation.read_wrong(config.database, config.run.name)


def store_evaluation(config: "Config", row: dict[str, Any]) -> str:
    """As `tba.buffer.tools.record_evaluation.record_evaluation`."""
    from tba.buffer.tools.record_evaluation import record_evaluation

    return record_evaluation(config, row)
