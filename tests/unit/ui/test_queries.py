"""The saved queries of the SQL page: those of tba, and the files of a run."""

import html
import os
import re

import pytest


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
