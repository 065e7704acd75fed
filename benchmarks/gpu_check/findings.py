"""What a stage finds, which is notes and comparisons, its result, and the report of all stages."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Skip(Exception):
    """A stage cannot run on this device, or would show nothing. The message is the reason."""


class Findings:
    """Appends the findings of one stage to a file as they come, so that they outlive the process of the stage."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def note(self, name: str, value: Any, kind: str = "note") -> None:
        """Record a measurement, which is not compared with anything, or another `kind`: "skip" or "error"."""
        self._file.write(json.dumps([kind, name, value], default=str) + "\n")

    def check(self, name: str, found: Any, expected: Any, limit: float = 0.0) -> None:
        """Compare a value with one that was computed in another way, or is known: they differ by at most `limit`.

        With a limit of 0 they are equal, whatever their types. NaN differs from everything.
        """
        passed = bool(found == expected or (limit > 0 and abs(found - expected) <= limit))
        self.note(name, {"found": found, "expected": expected, "limit": limit, "passed": passed}, "check")

    def relative(self, name: str, found: float, expected: float, limit: float) -> None:
        """Compare two numbers that may differ by a share of the expected one."""
        self.check(name, found, expected, limit * abs(expected))

    def at_most(self, name: str, found: float, bound: float) -> None:
        """Check that a value is within a bound that was computed in another way."""
        self.note(name, found)
        self.check(f"{name}, beyond {bound:.4g}", max(found - bound, 0.0), 0.0)


@dataclass
class Result:
    """One stage: `result` is passed, `skipped: reason` or `FAILED: reason`; `found` has [kind, name, value]."""

    result: str = "running"
    seconds: float = 0.0
    found: list[list[Any]] = field(default_factory=list)

    @property
    def checks(self) -> list[tuple[str, dict[str, Any]]]:
        """The comparisons, by name."""
        return [(name, value) for kind, name, value in self.found if kind == "check"]

    def read(self, path: Path) -> None:
        """Read the findings. A line that was cut off by the end of its process is left out."""
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        decoder = json.JSONDecoder(parse_float=lambda text: float(f"{float(text):.5g}"), parse_constant=str)
        self.found = [decoder.decode(line) for line in whole.splitlines()]

    def conclude(self, end: int | None) -> None:
        """Set the result, from the findings and the exit code of the process, None if it has reached its time limit.

        A stage that compared nothing has not passed.
        """
        errors = [f"{name}: {value}" for kind, name, value in self.found if kind == "error"]
        skips = [value for kind, _, value in self.found if kind == "skip"]
        if errors or end != 0:
            reason = errors[0] if errors else "time limit" if end is None else f"exit code {end}"
            self.result = f"FAILED: {' '.join(reason.split())[:300]}"
        elif wrong := sum(not check["passed"] for _, check in self.checks):
            self.result = f"FAILED: {wrong} of {len(self.checks)} comparisons"
        elif skips:
            self.result = f"skipped: {skips[0]}"
        else:
            self.result = "passed" if self.checks else "FAILED: nothing compared"


class Report:
    """The results of all stages so far, in a folder: report.md for people, report.json for programs."""

    def __init__(self, folder: Path, about: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").unlink(missing_ok=True)
        self.folder, self.stages = folder, dict[str, Result]()
        self._about = about

    def write(self) -> None:
        """Write both files."""
        stages = {name: asdict(stage) | {"comparisons": len(stage.checks)} for name, stage in self.stages.items()}
        content = json.dumps({"about": self._about, "stages": stages}, indent=1)
        (self.folder / "report.json").write_text(content + "\n", encoding="utf-8")
        lines = [f"# gpu-check: {self._about['card']}", "", "| | |", "|---|---|", *map(_row, self._about.items())]
        lines += ["", "| stage | result | comparisons | seconds |", "|---|---|---|---|"]
        lines += [_row((k, one.result, len(one.checks), round(one.seconds, 1))) for k, one in self.stages.items()]
        for stage, one in self.stages.items():
            lines += ["", f"## {stage}", "", "| comparison | found | expected | within | |", "|---|---|---|---|---|"]
            for name, check in one.checks:
                passed = "" if check["passed"] else "**FAILED**"
                lines.append(_row((name, check["found"], check["expected"], check["limit"], passed)))
            lines += ["", *(f"- {name}: {_text(value)}" for kind, name, value in one.found if kind != "check")]
        (self.folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_text(cell).replace('|', '/') for cell in cells)} |"


def _text(value: Any) -> str:
    return " ".join((value if isinstance(value, str) else json.dumps(value)).split())
