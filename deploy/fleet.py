"""The searchers of one machine: one child per engine, and `tba search` over several of them."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from tba.common.config import Config
from tba.common.log import get_logger
from tba.common.run_status import Facts, ask_status, monitor
from tba.common.system.devices import CPU, Gpu, check_free, choose_gpus, group_gpus, label, list_gpus, searcher_gpus
from tba.common.system.process import notify_systemd, openmp_threads, partition_cores
from tba.common.system.watchdog import Watchdog
from tba.common.wire.client import BufferClient
from tba.deploy.child import Child, RestartPolicy, drain_seconds
from tba.deploy.display import fleet_line
from tba.deploy.supervisor import Supervisor

log = get_logger(__name__)

SUMMARY_SECONDS = 10.0


def run_searchers(config: Config, arguments: Sequence[str], stop: Callable[[], bool]) -> None:
    """Run the searchers of this machine until all are done or `stop()`, with a summary line every ten seconds.

    None outlives this. Raises TbaError if all are broken.
    """
    children = searcher_children(config, arguments)
    summary_at, is_ready = time.monotonic() + SUMMARY_SECONDS, False
    # Of this loop. The searchers watch their own.
    watchdog = Watchdog()
    with closing(monitor(config, "fleet")) as client, Supervisor(children, config.launch) as supervisor:
        for _ in supervisor.rounds(lambda: stop() or all(child.ended for child in children)):
            watchdog.beat()
            if (failed := supervisor.failed()) is not None:
                raise failed.failure()
            if not is_ready and any(child.ready for child in children):
                is_ready = True
                notify_systemd("READY=1")
            if time.monotonic() >= summary_at:
                summary_at = time.monotonic() + SUMMARY_SECONDS
                _summarise(children, supervisor, client)
        supervisor.stop(children, drain_seconds=drain_seconds(config))


def _summarise(children: Sequence[Child], supervisor: Supervisor, client: BufferClient) -> None:
    status = ask_status(client)
    if status is not None:
        supervisor.report_troubles(client)
    facts = Facts(status, client.address, client.silent_seconds, failing=supervisor.troubles())
    line = fleet_line(children, facts)
    log.info(line)
    notify_systemd(f"STATUS={line}")


def searcher_groups(
    config: Config, flag: str = "", *, with_trainer: bool = False, present: Sequence[Gpu] | None = None
) -> list[list[str]]:
    """Return the GPUs of each searcher; `flag` as in `choose_gpus`.

    With `with_trainer`, `all` leaves out those of the trainer and the evaluator. `present` are the GPUs to choose from,
    by default those of this machine.

    Raises UsageError for a missing GPU, DeviceBusy for one without enough free memory.
    """
    present = list_gpus() if present is None else present
    wanted = config.search.gpus
    if with_trainer:
        others = ",".join(gpus for gpus in (config.train.gpu, config.eval.gpu) if gpus not in ("", CPU))
        wanted = searcher_gpus(wanted, others or CPU, present)
    chosen = choose_gpus(wanted, present, "search.gpus", flag)
    # vLLM reserves its fraction of the memory at its start.
    if config.search.engine == "vllm":
        check_free(chosen, present, utilization=config.search.gpu_memory_utilization)
    return group_gpus(chosen, config.search.tensor_parallel)


def searcher_children(
    config: Config, arguments: Sequence[str], *, with_trainer: bool = False, present: Sequence[Gpu] | None = None
) -> list[Child]:
    """Return a child for each engine, each on its own cores: one per group of GPUs, or `cpu_searchers` on the CPU.

    `with_trainer`: they belong to a `tba run`, which restarts them always and whose trainer needs cores too.
    """
    restart = RestartPolicy.ALWAYS if with_trainer else RestartPolicy.ON_FAILURE

    def child(name: str, *flags: str, gpus: str = CPU, cores: Sequence[int] | None = None, threads: int = 1) -> Child:
        command, environment = ["search", *arguments, *flags], one_thread_each(config, threads)
        return Child(name, "search", command, None, restart, environment=environment, gpus=gpus, cores=cores)

    if config.search.gpus != CPU:
        groups = searcher_groups(config, with_trainer=with_trainer, present=present)
        names = [(label(group), ",".join(group), str(len(group))) for group in groups]
        return [child(name, "--gpus", gpus, "--tp", count, gpus=gpus) for name, gpus, count in names]
    count = config.search.cpu_searchers
    parts = partition_cores(count + int(with_trainer and config.train.gpu == CPU))
    threads = openmp_threads(parts)
    return [
        child(f"cpu{n}", "--cpu", "1", "--index", str(n), cores=cores, threads=threads)
        for n, cores in enumerate(parts[:count])
    ]


def evaluator_child(config: Config, arguments: Sequence[str], log_file: Path) -> Child:
    """Return the child of a `tba run` that evaluates kept snapshots. The run goes on without it if it fails."""
    on_gpu = ["--gpus", config.eval.gpu, "--tp", str(config.search.tensor_parallel)]
    flags = ["--eval", *(["--cpu", "1"] if config.eval.gpu == CPU else on_gpu)]
    command, environment = ["search", *arguments, *flags], one_thread_each(config)
    gpus = config.eval.gpu
    return Child("evaluator", "evaluator", command, log_file, environment=environment, is_essential=False, gpus=gpus)


def one_thread_each(config: Config, threads: int = 1) -> dict[str, str]:
    """Return the environment that limits OpenMP where children share the cores of a CPU, by default to one thread."""
    uses_cpu = CPU in (config.search.gpus, config.train.gpu)
    return {"OMP_NUM_THREADS": str(threads)} if uses_cpu and "OMP_NUM_THREADS" not in os.environ else {}
