"""The saved queries of the SQL page."""

import html
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


def test_a_query_that_is_not_saved_is_refused_with_those_that_are(browser):
    reply = browser.get("/r/test/sql", params={"query": "../secret"})
    assert (reply.status_code, "waste by step" in reply.text, "sql=SELECT" in reply.text) == (404, True, True)
    assert browser.get("/r/test/sql.csv?query=mine").status_code == 404
