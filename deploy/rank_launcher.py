"""`tba train` over several processes of this machine: one rank for each GPU, all of them or none.

Each rank gets its number as torchrun passes it (RANK, LOCAL_RANK, WORLD_SIZE), so that the same command also works
under torchrun. Two things differ. The ranks of one node rendezvous through a file and talk over the loopback device: no
port is open to other machines. And this supervisor ends them: exit codes keep their meaning, and SIGTERM saves first.

Over several nodes (NNODES), each has such a supervisor. They do not talk to each other: ranks notice lost ranks.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba.common.config import Config
from tba.common.errors import EXIT_LOST, TbaError
from tba.common.system.devices import CPU
from tba.common.system.process import RENDEZVOUS_VARIABLE, node_number, notify_systemd, openmp_threads, partition_cores
from tba.common.system.watchdog import Watchdog
from tba.deploy.child import NO_RESTART, Child, RestartPolicy, drain_seconds, ending
from tba.deploy.supervisor import Supervisor

_POLL_SECONDS = 0.1
# A rank that lost its connection to another one may end before the rank that caused it.
_CULPRIT_SECONDS = 10.0


def train_together(config: Config, arguments: Sequence[str], count: int, stop: Callable[[], bool]) -> None:
    """Run `tba` with these arguments as `count` ranks until all are done or `stop()`. None outlives this call.

    If a rank fails, the others are ended. Raises TbaError with the exit code of the rank that failed first.
    """
    node, nodes = node_number()
    watchdog = Watchdog()
    with tempfile.TemporaryDirectory(prefix="tba-ranks-") as rendezvous:
        ranks = _children(config, arguments, count, Path(rendezvous) / "ranks" if nodes == 1 else None)
        with Supervisor(ranks, config.launch) as supervisor:
            while not (stop() or all(child.ended for child in ranks) or any(child.exit_code for child in ranks)):
                supervisor.poll()
                # The training thread of rank 0 is the working loop of all of them.
                for notice in {"READY=1", "WATCHDOG=1"}.intersection(ranks[0].notices):
                    notify_systemd(notice)
                if node:
                    # Ranks there wait for rank 0, whose own watchdog ends all of them.
                    watchdog.beat()
                time.sleep(_POLL_SECONDS)
            if stop():
                supervisor.stop(ranks, drain_seconds=drain_seconds(config, trains=True))
                if ranks[0].exit_code:
                    raise _failure(ranks[0], count * nodes)
            elif (culprit := _culprit(supervisor, ranks)) is not None:
                raise _failure(culprit, count * nodes)


def _children(config: Config, arguments: Sequence[str], count: int, rendezvous: Path | None) -> list[Child]:
    """Return the ranks of this node, which meet through a file, or without one at MASTER_ADDR."""
    node, nodes = node_number()
    parts = partition_cores(count)
    # Offload computes AdamW on the host.
    binds = config.train.gpu == CPU or config.train.offload == "optimizer"
    children = []
    for local, cores in enumerate(parts):
        rank = node * count + local
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(count * nodes),
            "LOCAL_WORLD_SIZE": str(count),
        }
        if rendezvous is not None:
            interfaces = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
            environment |= {RENDEZVOUS_VARIABLE: str(rendezvous), **interfaces}
        # By default each rank would have as many threads as the machine has cores.
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(openmp_threads(parts))
        # A rank cannot be restarted alone: the others have lost their connection to it.
        name, restart = f"rank{rank}", RestartPolicy.NEVER
        child = Child(name, name, arguments, None, restart, environment=environment, cores=cores if binds else None)
        children.append(child)
    return children


def _culprit(supervisor: Supervisor, ranks: Sequence[Child]) -> Child | None:
    """Return the rank that failed by itself, or else the first that failed; None if none did."""
    deadline = time.monotonic() + _CULPRIT_SECONDS
    while True:
        failed = [child for child in ranks if child.exit_code]
        own = [child for child in failed if child.exit_code != EXIT_LOST]
        if own or not failed or time.monotonic() > deadline:
            return next(iter(own or failed), None)
        supervisor.poll()
        time.sleep(_POLL_SECONDS)


def _failure(child: Child, count: int) -> TbaError:
    code, sentence = child.exit_code or 0, child.last_error()
    if code in NO_RESTART:
        error = TbaError(sentence or f"{child.name} failed with exit code {code}")
        error.exit_code = code
        return error
    reason = f": {sentence}" if sentence else ""
    return TbaError(f"{child.name} of {count} {ending(code)}{reason}; the others were ended: continue with --resume")
