"""Budgets of the project: lines and files of each role, words, configuration keys, commands, and shapes of code."""

import ast
import functools
import graphlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest
from typer.main import get_command

from tba.cli import app
from tba.common.config.layers import fields
from tba.tests.helpers.source_files import ROOT, source_files

BUDGETS = tomllib.loads((ROOT / "tests/source/budgets.toml").read_text(encoding="utf-8"))
ROLES = tuple(BUDGETS["files"])
MAX_PARAMETERS, MAX_FILE_LINES, MAX_FUNCTION_LINES = 8, 600, 60


@functools.cache
def python_files(part: str) -> list[Path]:
    """The Python files of a role, a folder or a single file."""
    return [path for path in source_files("*.py") if path.is_relative_to(ROOT / part)]


def sources() -> Iterator[tuple[str, ast.AST]]:
    """The syntax trees of the package itself, with their paths from the root."""
    for part in (*ROLES, "conformance.py"):
        for path in python_files(part):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports() -> grimp.ImportGraph:
    """The imports of the package, those inside functions included."""
    return grimp.build_graph("tba", cache_dir=None)


def modules(role: str) -> set[str]:
    return {f"tba.{role}"} | imports().find_descendants(f"tba.{role}")


@pytest.mark.parametrize("part", BUDGETS["lines"])
def test_lines_are_within_their_budget(part: str):
    assert sum(len(path.read_text().splitlines()) for path in python_files(part)) <= BUDGETS["lines"][part]


@pytest.mark.parametrize("role", ROLES)
def test_files_are_within_their_budget(role: str):
    assert len(python_files(role)) <= BUDGETS["files"][role]


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def commands(command: Any) -> int:
    """The number of commands that do something, without the groups that hold them."""
    return sum(commands(each) for each in command.commands.values()) if hasattr(command, "commands") else 1


def single_importers() -> list[str]:
    """Modules that one other imports and whose name is no concept of the glossary."""
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").lower().replace("-", " ")
    return [
        module
        for role in ROLES
        for module in sorted(modules(role))
        if len(imports().find_modules_that_directly_import(module)) == 1
        and module.rpartition(".")[2].replace("_", " ") not in glossary
    ]


def outside_assignments() -> list[str]:
    """Places that assign to `self.part.attribute`."""
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    ]


def test_words_keys_commands_and_shapes_are_within_their_budgets():
    found = {
        "words_in_docs": words([path for path in source_files("*.md") if path.is_relative_to(ROOT / "docs")]),
        "words_in_readme": words([ROOT / "README.md"]),
        "configuration_keys": sum(1 for _ in fields()),
        "commands": commands(get_command(app)),
        "modules_of_one_importer": len(single_importers()),
        "attributes_set_from_outside": len(outside_assignments()),
    }
    assert {name: count for name, count in found.items() if count > BUDGETS["counts"][name]} == {}


def test_no_constructor_has_more_than_eight_parameters():
    long = {
        f"{path}:{node.lineno}": count
        for path, tree in sources()
        # The options of a task are keys of its users.
        if not path.startswith("searcher/tasks/")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and (count := len(node.args.args) + len(node.args.kwonlyargs) - 1) > MAX_PARAMETERS
    }
    assert long == {}


@pytest.mark.parametrize("role", ROLES)
def test_modules_and_folders_of_a_role_import_each_other_in_no_circle(role: str):
    def folder(name: str) -> str:
        return ".".join(name.split(".")[:3])

    of_modules: dict[str, set[str]] = {}
    of_folders: dict[str, set[str]] = {}
    for name in modules(role):
        below = imports().find_modules_directly_imported_by(name) & modules(role)
        of_modules[name] = below
        of_folders.setdefault(folder(name), set()).update({*map(folder, below)} - {folder(name)})
    # Raises CycleError with the circle.
    for graph in (of_modules, of_folders):
        graphlib.TopologicalSorter(graph).prepare()


def test_no_file_is_longer_than_600_lines_and_no_function_than_60():
    """What a reader can hold in mind."""
    long: dict[str, int] = {}
    for path in source_files("*.py"):
        if path.is_relative_to(ROOT / "tests"):
            continue
        text = path.read_text()
        lengths = {str(path.relative_to(ROOT)): (len(text.splitlines()), MAX_FILE_LINES)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines, MAX_FUNCTION_LINES
        long |= {name: length for name, (length, most) in lengths.items() if length > most}
    assert long == {}
