"""`tba train` over several processes of this machine: one for each GPU, all of them or none.

Each is told its place in the way that torchrun does it (RANK, LOCAL_RANK, WORLD_SIZE), so under torchrun the same
command works too. Two things differ: they meet by a file and talk over the loopback device, so nothing listens where
others could reach it, and their end is this supervisor's: exit codes stay what they mean, and SIGTERM saves first.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba.common.config import Config
from tba.common.cores import share_cores, threads_of, usable_cores
from tba.common.devices import CPU
from tba.common.errors import EXIT_LOST, TbaError
from tba.common.process import RENDEZVOUS_VARIABLE, signal_name
from tba.deploy.supervisor import HOPELESS, Child, Supervisor

_TEND_SECONDS = 0.1
# A rank that has lost another may be heard before the one that was lost.
_OTHERS_SECONDS = 10.0


def train_together(config: Config, arguments: Sequence[str], count: int, stop: Callable[[], bool]) -> None:
    """Run `tba` with these arguments as so many ranks, until all are done or `stop()`. None outlives this call.

    Raises TbaError, with the exit code of the rank that failed first, if one does: the others are then ended.
    """
    with tempfile.TemporaryDirectory(prefix="tba-ranks-") as meeting:
        ranks = _children(config, arguments, count, Path(meeting) / "ranks")
        with Supervisor(ranks, config.launch) as supervisor:
            while not (stop() or all(child.ended for child in ranks) or any(child.exit_code for child in ranks)):
                supervisor.tend()
                time.sleep(_TEND_SECONDS)
            if stop():
                supervisor.stop(ranks, drain_seconds=config.launch.drain_seconds)
                if ranks[0].exit_code:
                    raise _failure(ranks[0], count)
            elif (culprit := _culprit(supervisor, ranks)) is not None:
                raise _failure(culprit, count)


def _children(config: Config, arguments: Sequence[str], count: int, meeting: Path) -> list[Child]:
    shares = share_cores(usable_cores(), count)
    children = []
    for rank, share in enumerate(shares):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            RENDEZVOUS_VARIABLE: str(meeting),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        }
        on_cpu = config.train.gpu == CPU
        if on_cpu and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(threads_of(share, shared_by=shares.count(share)))
        name = f"rank{rank}"
        cores = share if on_cpu else None
        # Once: a rank cannot start again by itself, for the others have lost it.
        children.append(Child(name, name, arguments, None, once=True, environment=environment, cores=cores))
    return children


def _culprit(supervisor: Supervisor, ranks: Sequence[Child]) -> Child | None:
    """The rank that failed by itself, or the first that failed; None if none did."""
    deadline = time.monotonic() + _OTHERS_SECONDS
    while True:
        failed = [child for child in ranks if child.exit_code]
        own = [child for child in failed if child.exit_code != EXIT_LOST]
        if own or not failed or time.monotonic() > deadline:
            return next(iter(own or failed), None)
        supervisor.tend()
        time.sleep(_TEND_SECONDS)


def _failure(child: Child, count: int) -> TbaError:
    code = child.exit_code or 0
    said = next((line for line in reversed(child.log_tail().splitlines()) if line.startswith("error: ")), "")
    if code in HOPELESS:
        error = TbaError(said.removeprefix("error: ") or f"{child.name} failed with exit code {code}")
        error.exit_code = code
        return error
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    reason = f": {said.removeprefix('error: ')}" if said else ""
    return TbaError(f"{child.name} of {count} {how}{reason}; the others were ended, go on with --resume")
