"""What stays away from the source: retired words and remedies, comments behind code, unsafe loaders and SQL."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tba.tests.helpers.source_files import ROOT, source_files

# Words that no reader searches for, each with what to write instead. docs/glossary.md has the project's own terms.
RETIRED = {
    r"anew": "again, from scratch",
    r"whoever|whosoever": "name the process or the caller",
    r"nobody|somebody|anybody": "no one; better: name the process or the caller",
    r"for ever": "indefinitely, forever",
    r"so many (?!\w+ (that|as))": "give the number",
    r"beside(?!s)": "next to, alongside",
    r"sign of life|signs of life": "heartbeat",
    r"in vain": "without success",
    r"estates?": "the spool of a dead searcher",
    r"lottery|lotteries": "draw",
    r"ladder": "hot reload",
    r"hence|thereby|therein|wherein|whereof|lest": "so, in it, where",
    r"batch cache": "KV cache",
    r"bring(s)? up to date|brought up to date": "refresh",
    r"what is made ready": "what is prepared",
}
RETIRED_WORD = re.compile("|".join(rf"\b(?:{word})\b" for word in RETIRED), re.IGNORECASE)
# A comment after code is allowed for tools, and for the unit or shape of a value: a few words.
TOOL_COMMENT = re.compile(r"#\s*(noqa|type:|fmt:|pragma|mypy)")
SHORT_COMMENT_WORDS = 4


def files(*patterns: str) -> list[Path]:
    return [path for path in source_files(*patterns) if path != Path(__file__)]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file that people read: all of a page; docstrings, strings, comments and names of a module.

    Nothing of a module without a retired word: Python's tokenizer takes seconds for all modules.
    """
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    if not RETIRED_WORD.search(text.replace("_", " ")):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in {tokenize.STRING, tokenize.COMMENT}:
            yield token.start[0], token.string
        elif token.type == tokenize.NAME:
            yield token.start[0], token.string.replace("_", " ")


def test_retired_words_do_not_come_back():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in files("*.py", "*.md", "*.toml", "Makefile", "deploy/systemd/*")
        for line, text in prose(path)
        for match in RETIRED_WORD.finditer(text)
    ]
    assert not found, "\n".join(found)


def files_with(pattern: str, *names: str) -> set[str]:
    found = re.compile(pattern)
    return {str(path.relative_to(ROOT)) for path in files(*names) if found.search(path.read_text())}


def test_no_remedy_is_an_option_of_torchs_allocator():
    """A release of torch raises at the options of another: 2.11 at `pinned_max_cached_size_mb` of 2.13."""
    assert not files_with(r"PYTORCH_(CUDA_)?ALLOC_CONF|pinned_\w+_mb", "*.py", "*.md", "*.toml", "deploy/*")


def test_no_statement_has_numbered_placeholders():
    """Python 3.12.0 to 3.12.3 warns of `?1` with a sequence of values, and tests treat a warning as an error."""
    assert not files_with(r"[=(,\s]\?\d", "*.py"), "write `?` once for each value, or `:name` with a dictionary"


def test_every_connection_is_closed():
    """`with sqlite3.connect(...)` commits and does not close; Python 3.13 warns when such a connection is collected."""
    opened = r"sqlite3\.connect\((?:[^()]|\([^()]*\))*\) as "
    assert not files_with(opened, "*.py"), "write `with closing(sqlite3.connect(...)) as connection, connection:`"


def test_only_one_file_calls_the_loaders_of_transformers():
    """A call without `trust_remote_code=False` runs a model's code if standard input says "y"."""
    # The others are programs for developers, which load what they have made.
    found = {
        name
        for name in files_with("from_", "*.py")
        if not name.startswith(("tests/", "benchmarks/", "examples/"))
        for node in ast.walk(ast.parse((ROOT / name).read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
    }
    assert found == {"common/weights/pretrained.py"}


def may_trail(line: str) -> bool:
    """Whether a line may have code and, after it, a comment of more than a few words."""
    code, _, rest = line.partition("#")
    return bool(code.strip()) and len(rest.split()) > SHORT_COMMENT_WORDS


def test_comments_stand_on_lines_of_their_own():
    trailing = []
    for path in files("*.py"):
        text = path.read_text()
        lines = text.splitlines()
        # Python's tokenizer takes seconds for all files, and tells a comment from a # in a string.
        if not any(may_trail(line) for line in lines):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            row, column = token.start
            if token.type != tokenize.COMMENT or not lines[row - 1][:column].strip():
                continue
            if not TOOL_COMMENT.match(token.string) and len(token.string.split()) > SHORT_COMMENT_WORDS + 1:
                trailing.append(f"{path.relative_to(ROOT)}:{row}")
    assert not trailing, "\n".join(trailing)
