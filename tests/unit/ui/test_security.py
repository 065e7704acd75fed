"""Who may see the pages of `tba ui`."""

import pytest
from starlette.testclient import TestClient

from tba.common.errors import UsageError
from tba.ui.app import make_app

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1:5780", "localhost", "[::1]:5780"])
def test_requests_to_loopback_are_answered(filled, host):
    assert TestClient(make_app([filled])).get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:5780", "127.0.0.1.evil.example", "", "localhost.evil.example"])
def test_requests_with_another_host_are_refused(filled, host):
    reply = TestClient(make_app([filled])).get("/static/style.css", headers={"host": host})
    assert reply.status_code == 403


@pytest.mark.parametrize(("site", "status"), [("cross-site", 400), ("same-origin", 200)])
@pytest.mark.parametrize("page", ["sql", "sql.csv"])
def test_a_link_of_another_site_runs_no_statement(filled, page, site, status):
    browser = TestClient(make_app([filled]), base_url="http://localhost")
    reply = browser.get(f"/r/test/{page}?sql=SELECT 1", headers={"sec-fetch-site": site})
    assert reply.status_code == status


def test_a_token_is_needed_if_there_is_one(filled):
    browser = TestClient(make_app([filled], token=TOKEN), follow_redirects=False)
    assert browser.get("/r/test").status_code == 401
    assert browser.get("/r/test?token=wrong").status_code == 401
    assert browser.get("/r/test", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    entry = browser.get(f"/r/test/steps?token={TOKEN}&before=1")
    assert (entry.status_code, entry.headers["location"]) == (303, "/r/test/steps?before=1")
    assert "HttpOnly" in entry.headers["set-cookie"]
    assert browser.get("/r/test").status_code == 200


@pytest.mark.parametrize(("host", "token"), [("0.0.0.0", None), ("127.0.0.1", "short")])
def test_an_open_address_needs_a_long_token(filled, host, token):
    from tba.ui.server import serve

    with pytest.raises(UsageError, match="--token"):
        serve([filled], host=host, port=0, token=token, report=print)
