"""Filters by words, where `tba buffer search` has made its index."""

import html
import re
import sqlite3
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from tba.buffer.tools.search import index_path, search
from tba.common.wire import messages
from tba.ui.app import make_app
from tba.ui.runs import find_runs
from tba.ui.trajectory_filter import _plan, statements

pytestmark = pytest.mark.slow

TEXTS = ["seven apples", "seven\x00pears <script>alert(1)</script>", "eight \u202eapples", "seven apples again"]


@pytest.fixture
def database(harness, trajectory):
    buffer = harness()
    keys = ["p0", "p1"]
    texts: list[str | None] = ["How many apples?", "How many pears?"]
    buffer.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=2, offset=0, keys=keys, texts=texts))
    buffer.announce(0, 0)
    buffer.put([trajectory(f"p{n % 2}", lease=0, tokens=[n], text=text) for n, text in enumerate(TEXTS)], 0)
    buffer.store.close()
    return buffer.store.path


@pytest.fixture
def indexed(database):
    search(database, "seven", limit=1)
    return database


def client(path):
    return TestClient(make_app([path]), base_url="http://127.0.0.1", raise_server_exceptions=False)


def found(page, kind="trajectories"):
    assert page.status_code == 200, page.text
    return [int(number) for number in re.findall(rf'href="/r/test/{kind}/(\d+)"', page.text)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"text": "seven"}, [4, 2, 1]),
        ({"text": "apples seven"}, [4, 1]),
        ({"text": "seven", "prompt": "1"}, [1]),
        ({"text": "seven", "searcher": "1", "error": "yes"}, []),
        ({"text": "alert(1)"}, [2]),
        ({"text": "bananas"}, []),
    ],
    ids=str,
)
def test_words_filter_the_trajectories(indexed, filters, expected):
    assert found(client(indexed).get("/r/test/trajectories", params=filters)) == expected


@pytest.mark.parametrize("page", ["trajectories", "prompts"])
def test_words_are_neither_syntax_nor_markup(indexed, page):
    browser = client(indexed)
    for text in ('"', "AND", "a*b", "text:", "(", "NEAR(", '12"', "'", "\x00", "</input><script>", "\u202e"):
        reply = browser.get(f"/r/test/{page}", params={"text": text})
        assert reply.status_code in {200, 400}, text
        assert not [mark for mark in ("<script>alert", "</input><script>", "\x00", "\u202e") if mark in reply.text]


def test_words_filter_the_prompts(indexed):
    browser = client(indexed)
    assert found(browser.get("/r/test/prompts", params={"text": "pears"}), "prompts") == [2]
    assert found(browser.get("/r/test/prompts", params={"text": "many", "key": "p0"}), "prompts") == [1]


def test_pages_of_words_continue_where_the_last_one_ended(indexed, monkeypatch):
    monkeypatch.setattr("tba.ui.trajectory_filter.PAGE_ROWS", 1)
    browser, address, ids = client(indexed), "/r/test/trajectories?text=seven", []
    while address:
        page = browser.get(address)
        ids += found(page)
        following = re.search(r'rel="next" href="([^"]*)"', page.text)
        address = html.unescape(following[1]) if following else ""
    assert ids == [4, 2, 1]


def test_a_list_of_words_sorts_nothing(indexed):
    (run,) = find_runs([indexed], print)
    with run.rows() as rows:
        plan = _plan(rows, run, {"text": "seven"})
        assert plan is not None
        for sql, values in statements(plan, (4.0, 4)):
            steps = [row["detail"] for row in rows.all(f"EXPLAIN QUERY PLAN {sql}", *values, 10)]
            assert [step for step in steps if "TEMP B-TREE" in step] == []


def test_without_an_index_the_page_says_how_to_make_one(database):
    browser = client(database)
    assert "tba buffer search WORD" in browser.get("/r/test/trajectories").text
    assert browser.get("/r/test/trajectories?text=seven").status_code == 400


def test_the_index_of_another_database_is_not_used(indexed, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/buffer.sqlite"
    other.write_bytes(indexed.read_bytes())
    index_path(other).write_bytes(index_path(indexed).read_bytes())
    assert client(other).get("/r/test/trajectories?text=seven").status_code == 400


def test_a_damaged_index_leaves_the_list_as_it_is_without_one(indexed):
    index_path(indexed).write_bytes(b"no database" * 1000)
    page = client(indexed).get("/r/test/trajectories")
    assert found(page) == [4, 3, 2, 1]
    assert "tba buffer search WORD" in page.text


def test_a_search_at_work_does_not_delay_the_list(indexed):
    with closing(sqlite3.connect(index_path(indexed), isolation_level=None)) as busy:
        busy.execute("BEGIN EXCLUSIVE")
        assert found(client(indexed).get("/r/test/trajectories")) == [4, 3, 2, 1]
    assert found(client(indexed).get("/r/test/trajectories?text=seven")) == [4, 2, 1]
