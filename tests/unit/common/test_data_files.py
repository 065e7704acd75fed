"""Data files in the formats in which people have them, JSON lines included: the same rows, and errors with a place."""

import bz2
import gzip
import json
import lzma
import pickle
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.common.config import TaskSection
from tba.common.config.paths import check_data, hub_data
from tba.common.data_files import as_text, is_data_file, json_lines, read
from tba.common.errors import MissingExtra, TaskError
from tba.searcher.tasks.answers_task import AnswersTask

ROWS = [{"question": 'What is\n1, "2"?', "answer": "é"}, {"question": "q2", "answer": "2"}]
LINES = "\n".join(map(json.dumps, ROWS))
ZIPPED = gzip.compress(LINES.encode(), mtime=0)
CSV = '\ufeffquestion,answer\n"What is\n1, ""2""?",é\n\nq2,2\n'


def files(folder):
    """Each of the formats, with the same rows."""
    contents = {
        "a.jsonl": LINES.encode(),
        "a.jsonl.gz": ZIPPED,
        "blob-without-suffix": ZIPPED,
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


def test_every_format_gives_the_same_rows_with_their_lines_or_numbers(tmp_path):
    found = {path.name: [row for _, row in read(path)] for path in files(tmp_path)}
    assert found == dict.fromkeys(found, ROWS)
    assert len(found) == 10
    places = [place for name in ("a.jsonl", "a.csv", "a.parquet") for place, _ in read(tmp_path / name)]
    assert [place.rpartition("/")[2] for place in places] == [
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
        ("a.jsonl.gz", ZIPPED[:-9], r"a.jsonl.gz cannot be read: Compressed file ended"),
        ("a.csv", b"a,b\n1,2\n1\n", r"a.csv:3: the row is not CSV: it has more or fewer cells"),
        ("a.csv", b"a,b\n1,2,3\n", r"a.csv:2: the row is not CSV: it has more or fewer cells"),
        ("a.csv", b'a,b\n1,"2\n', r"a.csv:.*the row is not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n\xff,2\n", r"a.csv:.*the row is not CSV: 'utf-8' codec"),
        ("a.parquet", b"PAR1 and no more", r"a.parquet is not a readable parquet file"),
        ("missing.jsonl", None, r"missing.jsonl cannot be read: No such file"),
        ("a.jsonl.bz2", bz2.compress(LINES.encode()), r"a.jsonl.bz2 is compressed by bzip2, xz or zstd: decompress it"),
        ("a.jsonl", lzma.compress(LINES.encode()), r"a.jsonl is compressed by bzip2, xz or zstd"),
        ("a.csv", b"\x28\xb5\x2f\xfd\x04", r"a.csv is compressed by bzip2, xz or zstd"),
        ("a.xlsx", b"PK\x03\x04\x14", r"a.xlsx is a zip archive or a workbook: unpack it, or export CSV"),
        ("a.csv", CSV.encode("utf-16"), r"a.csv is text in UTF-16: save it as UTF-8"),
        ("a.json", b"<!DOCTYPE html><html>", r"a.json is a page in HTML, such as that of a failed download"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", r"a pointer of Git LFS: `git lfs pull` brings"),
        ("a.parquet.gz", gzip.compress(b"PAR1...."), r"is parquet that is compressed as a whole: decompress it"),
        ("a.pkl", pickle.dumps(ROWS), r"a.pkl is a pickle: write it as JSON lines"),
        ("a.csv", LINES.encode(), r"a.csv is named as CSV, and has JSON: name it .jsonl"),
        ("a.csv", b"question;answer\nq;1\n", r"a.csv:1: .* one column, and {';'} in it: separate columns by ','"),
        ("a.csv", b"question\tanswer\nq\t1\n", r"the header has one column, and {'\\t'} in it"),
        ("a.tsv", CSV.encode(), r"the header has one column, and {','} in it: separate columns by '\\t'"),
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18, "18"), (18.0, "18"), (-0.0, "0"), (1e-7, "0.0000001"), (-2.5e-8, "-0.000000025"), (1e3, "1000"),
        (1e20, "1" + "0" * 20), (2.0**53 + 2, "9007199254740994"), (2**53 + 1, "9007199254740993"), (0.1, "0.1"),
        (123456.789, "123456.789"), (Decimal("1.50"), "1.50"), (Decimal("1E+3"), "1000"),
        (Decimal("1E-9"), "0.000000001"), (1e16, "1" + "0" * 16), ("1e-07", "1e-07"),
    ],
)  # fmt: skip
def test_a_number_becomes_the_text_that_people_write(value, text):
    assert as_text(value, "answer") == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN"), True, None, b"1", [1], {"a": 1}])
def test_what_is_no_text_and_no_number_is_refused_with_the_column(value):
    with pytest.raises(ValueError, match="the column answer has .*, which is neither a text nor a finite number"):
        as_text(value, "answer")


WIDTHS: dict[str, Any] = {"f2": pa.float16(), "f4": pa.float32(), "f8": pa.float64()}


@pytest.mark.parametrize("number", [0.1, 0.3, 1 / 3, 1e-4, 2.5, 7.0, -1.1])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_narrow_float_of_parquet_is_the_shortest_number_that_it_can_be(tmp_path, width, number):
    """Among all decimals with up to 17 digits, the first that numpy rounds to the stored value."""
    stored = np.dtype(width).type(number)
    right = next(one for n in range(1, 18) if np.dtype(width).type(one := float(f"{float(stored):.{n}g}")) == stored)
    of = WIDTHS[width]
    columns = {
        "plain": pa.array([stored, None], of),
        "list": pa.array([[[stored]], None], pa.list_(pa.list_(of))),
        "struct": pa.array([{"x": stored, "float": "f"}, None], pa.struct([("x", of), ("float", pa.string())])),
        "map": pa.array([[("k", stored)], None], pa.map_(pa.string(), of)),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = [row for _, row in read(tmp_path / "a.parquet")]
    assert rows[0] == {"plain": right, "list": [[right]], "struct": {"x": right, "float": "f"}, "map": [("k", right)]}
    assert rows[1] == dict.fromkeys(columns)
    # Values of a dictionary, and categories.
    encoded = {"a": pa.array([stored], of).dictionary_encode(), "b": pa.array(["x"]).dictionary_encode()}
    pq.write_table(pa.table(encoded), tmp_path / "a.parquet")
    assert [row for _, row in read(tmp_path / "a.parquet")] == [{"a": right, "b": "x"}]


def test_one_object_of_several_lines_is_a_row_and_one_around_the_rows_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS[0], indent=1))
    assert [*read(path)] == [(f"{path}:1", ROWS[0])]
    for indent in (None, 1):
        path.write_text(json.dumps({"version": "1.1", "data": ROWS}, indent=indent))
        with pytest.raises(TaskError, match=r"a.json:1: it has no .*; if `data` has the rows, write that list alone"):
            AnswersTask(str(path))


@pytest.mark.parametrize("content", ["", "\n \n", "question,answer\n", "[]"])
def test_a_file_without_rows_says_so(tmp_path, content):
    path = tmp_path / ("a.csv" if "," in content else "a.json")
    path.write_text(content)
    with pytest.raises(TaskError, match=rf"{path.name} has no rows"):
        AnswersTask(str(path))


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


def test_values_of_json_lines_have_line_numbers_and_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    for content, values in {
        b'{"a": 1}\n\n[2]\r\n3': [(1, {"a": 1}), (3, [2]), (4, 3)],
        '"one\u2028line\x85"\n'.encode(): [(1, "one\u2028line\x85")],
    }.items():
        path.write_bytes(content)
        assert list(json_lines(path, malformed=ValueError)) == values


@pytest.mark.parametrize("line", [b"{", b'"\xff"', b"[" * 100_000])
def test_a_malformed_line_is_an_error_that_names_it_or_is_skipped_on_request(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n" + line + b"\n2\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the line is not JSON"):
        list(json_lines(path, malformed=ValueError))
    assert list(json_lines(path, malformed=None)) == [(1, 1), (3, 2)]
