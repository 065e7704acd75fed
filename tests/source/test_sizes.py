"""The size of files and functions: what a reader can hold in mind."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tba.tests.helpers.source_files import ROOT, source_files

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def sources() -> list[Path]:
    """The Python files of the package and its benchmarks."""
    return [path for path in source_files("*.py") if not path.is_relative_to(ROOT / "tests")]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_source_file_is_longer_than_600_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert lengths
    assert {name: count for name, count in lengths.items() if count > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines():
    long = {}
    for path in sources():
        for node in functions(ast.parse(path.read_text())):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert long == {}
