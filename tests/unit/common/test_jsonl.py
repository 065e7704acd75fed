"""JSON lines are read one value per line, with line numbers."""

import pytest

from tba.common import jsonl


def test_values_come_with_line_numbers_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[2]\r\n3')
    assert list(jsonl.read(path)) == [(1, {"a": 1}), (3, [2]), (4, 3)]


def test_only_a_newline_ends_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('"one\u2028line\x85"\n', encoding="utf-8")
    assert list(jsonl.read(path)) == [(1, "one\u2028line\x85")]


@pytest.mark.parametrize("line", [b"{", b'"\xff"', b"[" * 100_000])
def test_a_malformed_line_is_an_error_that_names_it_or_is_skipped_on_request(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"1\n" + line + b"\n2\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the line is not JSON"):
        list(jsonl.read(path))
    assert list(jsonl.read(path, skip_malformed=True)) == [(1, 1), (3, 2)]
