"""A file as the first argument: every command understands it, or refuses it with a sentence that names it."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from tba.cli import app


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    if not hasattr(group, "commands"):
        yield path, group
        return
    for name, command in group.commands.items():
        yield from commands(command, *path, name)


ALL = [pytest.param(*found, id=" ".join(found[0])) for found in commands(typer.main.get_command(app))]


def required(command: Any) -> list[str]:
    """Return values for what a command requires besides its first argument."""
    arguments = [one for one in command.params if one.required and one.param_type_name == "argument"]
    options = [one for one in command.params if one.required and one.param_type_name == "option"]
    what = ["--run", "other", "--yes"] if command.name == "prune" else []
    return [*what, *("other" for _ in arguments[1:]), *(part for one in options for part in (one.opts[0], "other"))]


@pytest.mark.parametrize(("path", "command"), ALL)
def test_a_configuration_is_understood_or_refused(tba_here, tmp_path, path, command):
    # A command that reads it stops at the unknown key.
    (tmp_path / "run.toml").write_text('[run]\nnam = "x"\n')
    found = tba_here(*path, "run.toml", *required(command))
    assert found.exit_code != 0, found.output
    # An argument that is a number is refused by typer, in a box.
    assert "run.toml" in found.message or "Invalid value" in found.message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.toml"]
    names = {one.name for one in command.params if not one.required}
    if {"file", "config"} <= names:
        assert "run.nam" in found.message


def test_a_database_in_the_place_of_a_text_is_refused(tba_here, filled):
    assert f"pass it as --buffer {filled}" in tba_here("buffer", "query", filled).message
