"""Generate `docs/configuration.md` and `docs/cli.md` from the code; with --check, fail if they are out of date."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from tba.common.config import Config
from tba.common.config.layers import fields, value_of

DOCS = Path(__file__).parent


def configuration() -> str:
    """Return docs/configuration.md: one list per section."""
    lines = [
        "# Configuration",
        "",
        "One TOML file configures all roles. A flag overrides an environment variable, which overrides the file, which",
        "overrides the default (in brackets below): `--set train.learning_rate=1e-6`, `TBA_TRAIN__LEARNING_RATE=1e-6`.",
        "Both are written as in TOML, where a text needs no quotes; a secret is taken as it is. `tba config show`",
        "prints every value with its origin. `docs/generate.py` generates this page.",
    ]
    default, section = Config(), ""
    # By name and meaning, the first section with such a key.
    sections: dict[tuple[str, str], str] = {}
    for key, field in fields():
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            about = type(getattr(default, section)).__doc__
            lines += ["", f"## [{section}]", "", _line(about), ""]
        name, meaning = key.split(".")[1], _line(field.description)
        first = sections.setdefault((name, meaning), section)
        meaning = meaning if first == section else f"As in [{first}](#{first})."
        value = str(value_of(default, key))
        lines.append(f"- **`{name}`** ({f'`{value}`' if value else 'empty'}): {meaning}")
    return "\n".join(lines) + "\n"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


# Options that most commands have, or all of a group. Typer repeats them, and a list of commands with cut sentences, in
# every section.
_FILE = "* `FILE <path>`: The same as --config FILE.\n"
_HELP = "* `--help`: Show this message and exit.\n"
_CONFIG = re.compile(r"\* `-c, --config <path>`: .*\n\* `--set <list\[str\]>`: .*\n")
_LIST_OF_COMMANDS = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n")
_BUFFER = re.compile(r"\* `-b, --buffer <path>`: The database file; .*\n")
# The heading, and the arguments in their order, say it already.
_USAGE = re.compile(r"\*\*Usage\*\*:\n\n```console\n\$ .*\n```\n\n?")
_LABELS = re.compile(r"(?:\n*\*\*(?:Arguments|Options)\*\*:\n+)+")


def command_line() -> str:
    """Return docs/cli.md, as typer renders it, with the options of most commands explained once."""
    command = [sys.executable, "-m", "typer", "tba.cli", "utils", "docs", "--name", "tba", "--title", "Command line"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    shared = _CONFIG.search(text)
    if shared is None or _FILE not in text or _HELP not in text:
        raise SystemExit("typer renders the shared options in another form: adapt docs/generate.py")
    sections = re.split(r"\n##+ (?=`)", text)[1:]
    without = [
        part.partition("\n")[0] for part in sections if not _CONFIG.search(part) and "COMMAND [ARGS]" not in part
    ]
    text = _USAGE.sub("", _LIST_OF_COMMANDS.sub("", text))
    # Typer calls a number with bounds a range.
    text = _CONFIG.sub("", text.replace(_FILE, "").replace(_HELP, "")).replace(" range>", ">")
    buffer = _BUFFER.search(text)
    if buffer is None:
        raise SystemExit("typer renders --buffer in another form: adapt docs/generate.py")
    head, rest = _LABELS.sub("\n\n", _BUFFER.sub("", text)).split("\n## ", 1)
    rest = rest.replace("\n### `tba buffer serve`", f"\nAll take\n\n{buffer[0]}\n### `tba buffer serve`", 1)
    others = ", ".join(without)
    file = _FILE.replace("config FILE.", "config FILE, where the command has no argument of its own.")
    about = f"Every command takes `--help`. All but {others} take a configuration:\n\n{file}{shared[0]}"
    return f"{head.rstrip()}\n\n{about}\n## {rest.rstrip()}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, text in (("configuration.md", configuration()), ("cli.md", command_line())):
        page = DOCS / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                page.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(stale)}: run `python docs/generate.py`", file=sys.stderr)  # noqa: T201
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
