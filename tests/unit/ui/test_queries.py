"""Filters by words of the texts, and the saved queries of the SQL page: those of tba, and the files of a run."""

import html
import os
import re

import pytest

from tba.common.wire import messages
from tba.tests.helpers.browser import client


@pytest.fixture
def browser(filled):
    return client(filled)


def saved(page):
    return [html.unescape(name) for name in re.findall(r"/sql\?query=[^>]*>([^<]*)<", page.text)]


@pytest.mark.slow
def test_every_built_in_query_has_an_address_and_returns_rows_or_none(browser):
    page = browser.get("/r/test/sql")
    names = saved(page)
    assert {"best responses", "worst responses of late"} <= set(names)
    assert "id, run, prompt, prompt_text, answer," in page.text
    for name in names:
        page = browser.get("/r/test/sql", params={"query": name})
        assert (page.status_code, "<thead>" in page.text or "No rows." in page.text) == (200, True)
        assert browser.get("/r/test/sql.csv", params={"query": name}).status_code == 200


def test_files_of_the_run_are_queries(browser, filled):
    (filled.parent / "queries").mkdir()
    (filled.parent / "queries/my rows.sql").write_text(
        "SELECT COUNT(*) AS mine FROM trajectories WHERE run = '{run}'\n"
    )
    assert "my rows" in saved(browser.get("/r/test/sql"))
    assert browser.get("/r/test/sql.csv?query=my rows").text == "mine\n7\n"


def test_links_large_files_other_names_pipes_and_a_linked_directory_are_no_queries(browser, filled, tmp_path):
    folder = filled.parent / "queries"
    folder.mkdir()
    secret = tmp_path / "secret.sql"
    secret.write_text("SELECT 'secret'")
    (folder / "link.sql").symlink_to(secret)
    (folder / "large.sql").write_text("x" * 100_000)
    (folder / "bytes.sql").write_bytes(b"\xff\xfe")
    (folder / "<b>.sql").write_text("SELECT 1")
    os.mkfifo(folder / "pipe.sql")
    page = browser.get("/r/test/sql")
    assert not {"link", "large", "bytes", "<b>", "pipe"} & set(saved(page))
    for name in ("link", "../secret", "secret", "/etc/passwd"):
        reply = browser.get("/r/test/sql", params={"query": name})
        assert (reply.status_code, "SELECT &#39;secret" in reply.text) == (404, False)
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/mine.sql").write_text("SELECT 1")
    folder.symlink_to(tmp_path / "elsewhere")
    assert "mine" not in saved(browser.get("/r/test/sql"))


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


def found(database, kind="trajectories", **filters):
    page = client(database).get(f"/r/test/{kind}", params=filters)
    assert page.status_code == 200, page.text
    return [int(number) for number in re.findall(rf'href="/r/test/{kind}/(\d+)"', page.text)]


@pytest.mark.slow
def test_words_filter_the_trajectories_and_the_prompts(database):
    assert found(database, text="seven") == [4, 2, 1]
    assert found(database, text="apples seven") == [4, 1]
    assert found(database, text="seven", prompt="1") == [1]
    assert found(database, text="seven", searcher="1", error="yes") == []
    assert found(database, text="alert(1)") == [2]
    assert found(database, text="APPLES", sort="best") == [4, 3, 1]
    assert found(database, text="bananas") == []
    assert found(database, "prompts", text="pears") == [2]
    assert found(database, "prompts", text="many p0") == [1]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["trajectories", "prompts"])
def test_words_are_neither_syntax_nor_markup(database, page):
    browser = client(database)
    for text in ('"', "AND", "a*b", "text:", "(", "NEAR(", '12"', "'", "\x00", "</input><script>", "\u202e"):
        reply = browser.get(f"/r/test/{page}", params={"text": text})
        assert reply.status_code in {200, 400}, text
        assert not [mark for mark in ("<script>alert", "</input><script>", "\x00", "\u202e") if mark in reply.text]
