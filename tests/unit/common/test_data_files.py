"""Data files in the formats in which people have them, JSON lines included: the same rows, and errors with a place."""

import gzip
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.common.config import TaskSection
from tba.common.config.paths import check_data, hub_data
from tba.common.data_files import is_data_file, json_lines, read
from tba.common.errors import MissingExtra, TaskError

ROWS = [{"question": 'What is\n1, "2"?', "answer": "é"}, {"question": "q2", "answer": "2"}]
LINES = "\n".join(map(json.dumps, ROWS))
CSV = '\ufeffquestion,answer\n"What is\n1, ""2""?",é\n\nq2,2\n'


def files(folder):
    """Each of the formats, with the same rows."""
    contents = {
        "a.jsonl": LINES.encode(),
        "a.jsonl.gz": gzip.compress(LINES.encode(), mtime=0),
        "blob-without-suffix": gzip.compress(LINES.encode(), mtime=0),
        "a.json": b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode(),
        "a.json.gz": gzip.compress(json.dumps(ROWS).encode(), mtime=0),
        "a.csv": CSV.encode(),
        "a.tsv": CSV.replace(",", "\t").replace("1\t", "1,").encode(),
        "a.csv.gz": gzip.compress(CSV.encode(), mtime=0),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "parquet-without-suffix")
    return sorted(folder.iterdir())


def test_every_format_gives_the_same_rows(tmp_path):
    found = {path.name: [row for _, row in read(path)] for path in files(tmp_path)}
    assert found == dict.fromkeys(found, ROWS)
    assert len(found) == 10


def test_the_place_of_a_row_is_its_line_or_its_number(tmp_path):
    files(tmp_path)
    places = {name: [place for place, _ in read(tmp_path / name)] for name in ("a.jsonl", "a.csv", "a.parquet")}
    assert [place.rpartition("/")[2] for found in places.values() for place in found] == [
        "a.jsonl:1", "a.jsonl:2", "a.csv:3", "a.csv:5", "a.parquet row 1", "a.parquet row 2",
    ]  # fmt: skip


def test_a_field_that_only_other_rows_of_parquet_have_is_absent_and_a_null_column_is_null(tmp_path):
    said = [[{"role": "user", "content": "a"}], [{"role": "assistant", "tool_calls": [{"name": "f"}]}]]
    pq.write_table(pa.Table.from_pylist([{"m": said[0], "x": 1}, {"m": said[1], "x": None}]), tmp_path / "a.parquet")
    assert [row for _, row in read(tmp_path / "a.parquet")] == [{"m": said[0], "x": 1}, {"m": said[1], "x": None}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"a": 1}\nhello', r"a.jsonl:2: the line is not JSON: .* it begins 'hello'"),
        ("a.json", b'[{"a": 1},]', r"a.json begins as a JSON array, and is none \(.*: line 1 column 1"),
        (
            "a.jsonl.gz",
            gzip.compress(LINES.encode(), mtime=0)[:-9],
            r"a.jsonl.gz cannot be read: Compressed file ended",
        ),
        ("a.csv", b"a,b\n1,2\n1\n", r"a.csv:3: the row is not CSV: it has more or fewer cells"),
        ("a.csv", b"a,b\n1,2,3\n", r"a.csv:2: the row is not CSV: it has more or fewer cells"),
        ("a.csv", b'a,b\n1,"2\n', r"a.csv:.*the row is not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n\xff,2\n", r"a.csv:.*the row is not CSV: 'utf-8' codec"),
        ("a.parquet", b"PAR1 and no more", r"a.parquet is not a readable parquet file"),
        ("missing.jsonl", None, r"missing.jsonl cannot be read: No such file"),
        ("folder/train.parquet", b"", r"folder is a directory: name one data file in it; it has \['train.parquet'\]"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskError, match=words):
        list(read(path.parent if "/" in name else path))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    files(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install '.\[parquet\]'"):
        list(read(tmp_path / "a.parquet"))


def test_names_of_files_are_told_from_those_of_the_hub(tmp_path):
    assert all(map(is_data_file, ("a.jsonl", "a.jsonl.gz", "a.csv", "data/a.parquet", str(tmp_path))))
    assert not is_data_file("openai/gsm8k")
    section = TaskSection(name="gsm8k", train="openai/gsm8k", test="a/b.parquet")
    assert hub_data(section) == ["openai/gsm8k"]
    with pytest.raises(Exception, match="task.test a/b.parquet does not exist"):
        check_data(section)


def test_values_come_with_line_numbers_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[2]\r\n3')
    assert list(json_lines(path, malformed=ValueError)) == [(1, {"a": 1}), (3, [2]), (4, 3)]


def test_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('"one\u2028line\x85"\n', encoding="utf-8")
    assert list(json_lines(path, malformed=ValueError)) == [(1, "one\u2028line\x85")]


@pytest.mark.parametrize("line", [b"{", b'"\xff"', b"[" * 100_000])
def test_a_malformed_line_is_an_error_that_names_it_or_is_skipped_on_request(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n" + line + b"\n2\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the line is not JSON"):
        list(json_lines(path, malformed=ValueError))
    assert list(json_lines(path, malformed=None)) == [(1, 1), (3, 2)]
