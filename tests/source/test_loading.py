"""How the source loads models: through one file, which never runs a model's own code."""

import ast

from tba.tests.helpers.source_files import ROOT, source_files

LOADERS = {"from_pretrained", "from_config"}
# Programs for developers, which load what they have made.
APART = ("tests", "benchmarks", "examples")


def test_only_one_file_calls_the_loaders_of_transformers():
    """A call without `trust_remote_code=False` runs a model's code if standard input says "y"."""
    found = {
        str(path.relative_to(ROOT))
        for path in source_files("*.py")
        if path.relative_to(ROOT).parts[0] not in APART
        if "from_" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in LOADERS
    }
    assert found == {"common/weights/pretrained.py"}
