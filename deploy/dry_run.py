"""`tba run --dry-run`: what a run would start, what it needs, and what would stop it. It starts and writes nothing."""

import shlex
from collections.abc import Callable, Sequence

import typer

from tba.common.config import Config
from tba.common.errors import ConfigError, TbaError
from tba.common.system.devices import CPU, Gpu, assumed_gpus, list_gpus, nominal_gpus
from tba.common.terminal import own_command, print_table
from tba.deploy.child import Child
from tba.deploy.doctor import FAIL, NEEDED_BY_A_RUN, Checks, examine
from tba.deploy.launcher import check_start, children_of
from tba.deploy.run_list import ReadResults


def describe(
    config: Config,
    arguments: Sequence[str],
    checks: Checks,
    read_results: ReadResults,
    refuse_other_work: Callable[[Config], None],
    *,
    resume: bool,
    assume: str | None,
) -> None:
    """Print the processes of a run and what `tba doctor` and the start of a run find.

    `read_results` and `refuse_other_work` as in `check_start`. `assume` are the GPUs of a node that is not this
    one, such as `8x80`. Raises ConfigError if the run would not start.
    """
    node = assumed_gpus(assume) if assume else None
    findings = examine(config, checks, node)
    for finding in findings:
        # All roles of this run start here, unlike those of a node that `tba doctor` may be asked about.
        if finding["check"] in NEEDED_BY_A_RUN and finding["result"] == "warn":
            finding["result"] = FAIL
    problem, processes = "", []
    try:
        processes = _processes(config, arguments, resume=resume, assumed=node)
        check_start(config, read_results, refuse_other_work, resume=resume, present=node)
    except TbaError as error:
        problem = str(error)
    if problem and not any(problem in finding["detail"] for finding in findings):
        findings.append({"check": "start", "result": FAIL, "detail": problem})
    print_table(["process", "device", "command"], processes)
    print_table(["check", "result", "detail"], findings)
    failed = [finding["check"] for finding in findings if finding["result"] == FAIL]
    if failed:
        elsewhere = "; --assume 8x80 describes the run on another node" if "gpus" in failed and not assume else ""
        raise ConfigError(f"this run would not start: {', '.join(failed)} (nothing was started{elsewhere})")
    unchecked = [finding["check"] for finding in findings if finding["result"] == "unchecked"]
    typer.echo("this run would start" + (f"; not checked: {', '.join(unchecked)}" if unchecked else ""))


def _processes(
    config: Config, arguments: Sequence[str], *, resume: bool, assumed: Sequence[Gpu] | None
) -> list[dict[str, str]]:
    """Return the processes with their devices and commands, also those of GPUs that do not exist.

    Raises UsageError for a malformed list of GPUs.
    """
    named = nominal_gpus(config.search.gpus, config.train.gpu, config.eval.gpu)
    # Of GPUs only the names count here: what they hold now is a matter of the checks.
    present = [Gpu(gpu.index, gpu.uuid) for gpu in assumed or list_gpus()] or named
    roles = children_of(config, arguments, resume=resume, present=present)
    share = f", {config.search.gpu_memory_utilization:.0%} of its memory" if config.search.engine == "vllm" else ""
    engines = [(child, _device(child, share)) for child in [*roles.searchers, *roles.evaluators]]
    rows = [(roles.buffer, "CPU"), *engines, (roles.trainer, _device(roles.trainer))]
    program = own_command()
    return [
        {"process": child.name, "device": device, "command": shlex.join([*program, *child.arguments])}
        for child, device in rows
    ]


def _device(child: Child, share: str = "") -> str:
    if child.gpus != CPU:
        behind = ", ".join(engine.name for engine in child.behind)
        return f"GPU {child.gpus}{share}{f', when {behind} is ready' if behind else ''}"
    return f"CPU, cores {','.join(map(str, child.cores))}" if child.cores else "CPU"
