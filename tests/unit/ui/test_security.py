"""Who may see the pages of `tba ui`."""

import itertools
import socket
import threading

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from tba.common.errors import UsageError
from tba.tests.helpers.checks import wait_until
from tba.ui import app
from tba.ui.app import make_app, serve

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef"


def test_only_requests_to_loopback_are_answered(filled):
    browser = TestClient(make_app([filled]))
    own, others = ("127.0.0.1:5780", "localhost", "[::1]:5780"), ("evil.example:5780", "127.0.0.1.evil.example", "")
    for host, address in itertools.product((*own, *others, "localhost.evil.example"), ("/", "/static/style.css")):
        status = 200 if host in own else 403
        assert browser.get(address, headers={"host": host}).status_code == status, host


@pytest.mark.parametrize("page", ["sql", "sql.csv"])
def test_a_link_of_another_site_runs_no_statement(filled, page):
    browser = TestClient(make_app([filled]), base_url="http://localhost")
    for site, status in (("cross-site", 400), ("same-origin", 200)):
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
    with pytest.raises(UsageError, match="--token"):
        serve([filled], host=host, port=0, token=token, report=print)


def test_connections_without_a_whole_request_make_room_for_others(filled, monkeypatch):
    monkeypatch.setattr(app, "_REQUEST_SECONDS", 0.3)
    made = []
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app([filled]), http=app._Protocol, limit_concurrency=8, log_level="warning", ws="none")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        for start in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"):
            made += [socket.create_connection(listener.getsockname()) for _ in range(4)]
            for connection in made[-4:]:
                connection.sendall(start)
        address = f"http://localhost:{listener.getsockname()[1]}/static/style.css"
        wait_until(lambda: httpx.get(address).status_code == 200)
    finally:
        running.should_exit = True
        for connection in made:
            connection.close()
        thread.join()
