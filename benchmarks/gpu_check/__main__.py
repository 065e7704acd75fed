"""The command: `python -m benchmarks.gpu_check`. It loads no CUDA itself, since forks could not use it then."""

import argparse
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import STAGES, Stage
from benchmarks.gpu_check.findings import Findings, Report, Result, Skip

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options. Exits with 2 if one is wrong."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check on one GPU what the documentation says.")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="the folder of the report")
    parser.add_argument("--seconds", type=float, default=525.0, help="for all stages together")
    parser.add_argument("--only", type=_stages, default=STAGES, metavar="A,B", help="run these stages")
    parser.add_argument("--tiny", action="store_true", help="tiny models: tries the command, and measures nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", help="of a checkout without git")
    # Forks save the imports.
    return argparse.Namespace(**vars(parser.parse_args(arguments)), method="fork")


def _stages(text: str) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    if unknown := set(text.split(",")) - known.keys():
        raise argparse.ArgumentTypeError(f"no stage is called {min(unknown)}; the stages are {', '.join(known)}")
    return [stage for stage in STAGES if stage.name in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. Returns 1 if one has failed."""
    options, started = parse(arguments), time.monotonic()
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TBA_LOG": "json", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="tba-gpu-check-", ignore_cleanup_errors=True) as folder:
        options.work = Path(folder)
        make_importable(options.work)
        from tba.common.system.devices import list_gpus

        if options.device == "cuda" and not list_gpus():
            print("gpu-check: this machine shows no GPU; to try the command: --tiny --device cpu", file=sys.stderr)
            return 2
        report = Report(options.out, about(options))
        for stage in options.only:
            # A stage whose import fails says so itself.
            with contextlib.suppress(ImportError):
                importlib.import_module(f"benchmarks.gpu_check.{stage.module}")
        for stage in options.only:
            run(stage, options, report, started + options.seconds)
    failed = [name for name, one in report.stages.items() if one.result.startswith("FAILED")]
    print(f"{options.out / 'report.md'}: {len(failed)} of {len(options.only)} stages failed")
    return 1 if failed else 0


def make_importable(folder: Path) -> None:
    """Make `import tba` find this checkout, here and in commands, also where it is not installed."""
    spec = importlib.util.find_spec("tba")
    if spec is None or not spec.origin or Path(spec.origin).resolve().parent != ROOT:
        (folder / "tba").symlink_to(ROOT)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def about(options: argparse.Namespace) -> dict[str, str]:
    """Return what a report says about itself: commit, date, card, driver and versions."""
    from tba.common.system.devices import ask_nvidia_smi
    from tba.common.system.process import software

    versions, asked = software(), ("--query-gpu=name,driver_version", "--format=csv,noheader")
    rows = (options.device == "cuda" and ask_nvidia_smi(*asked)) or "none, none"
    card, driver = rows.partition("\n")[0].rsplit(", ", 1)
    commit, date = versions.pop("git", "unknown"), f"{datetime.now(UTC):%Y-%m-%d %H:%M UTC}"
    found = {"commit": options.commit or commit, "card": card, "driver": driver, "date": date}
    return found | {"models": "tiny" if options.tiny else "full"} | versions


def run(stage: Stage, options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Run one stage until the deadline at most, and write the report as its findings come."""
    result = report.stages[stage.name] = Result()
    results, log = options.work / f"{stage.name}.jsonl", options.work / f"{stage.name}.log"
    results.unlink(missing_ok=True)
    started = time.monotonic()
    # A CPU that other programs use too may take much longer.
    options.limit = min(stage.limit * (10 if options.tiny else 1), deadline - started)

    def update() -> None:
        result.read(results)
        result.seconds = time.monotonic() - started
        report.write()

    if options.limit < stage.least:
        result.result = "skipped: no time left"
        return update()
    end = in_process(stage, options, (results, log), update)
    result.read(results)
    result.conclude(end)
    update()
    with (report.folder / "log.txt").open("a") as file:
        file.write(f"\n==== {stage.name}: {result.result}\n{log.read_text(errors='replace')[-15000:]}")
    print(f"{stage.name}: {result.result}, {len(result.checks)} comparisons, {result.seconds:.1f} s", flush=True)
    # What CUDA says in a fork of a process that has used it.
    if options.method == "fork" and any(text in result.result for text in ("forked", "initialization error")):
        options.method = "spawn"
        run(stage, options, report, deadline)
    return None


def in_process(stage: Stage, options: Any, files: tuple[Path, Path], update: Callable[[], None]) -> int | None:
    """Run a stage in a process. Returns its exit code, or None if it was ended after `options.limit` seconds."""
    from tba.common.system.process import descendants

    context: Any = multiprocessing.get_context(options.method)
    process = context.Process(target=_child, args=(stage, options, *files))
    process.start()
    deadline = time.monotonic() + options.limit
    try:
        while process.is_alive() and time.monotonic() < deadline:
            process.join(min(1.0, options.limit))
            update()
        return process.exitcode
    finally:
        # By process id: it may be that of another process once this one is waited for.
        for pid in [process.pid, *descendants(process.pid)] if process.is_alive() else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.join()


def _child(stage: Stage, options: Any, results: Path, log: Path) -> None:
    os.setsid()
    # If memory runs out, the kernel ends this process and not the command.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    findings = Findings(results)
    try:
        getattr(importlib.import_module(f"benchmarks.gpu_check.{stage.module}"), stage.name)(findings, options)
    except Skip as skip:
        findings.note("reason", str(skip), "skip")
    except Exception as error:
        findings.note(type(error).__name__, str(error)[:1500], "error")
        raise


if __name__ == "__main__":
    sys.exit(main())
