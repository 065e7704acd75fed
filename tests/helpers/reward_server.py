"""A reward model behind vLLM's pooling routes, in a process of its own: `python -m tba.tests.helpers.reward_server`.

A text scores a tenth of its length. For red-teaming it is also a victim, which writes a text backwards with a digit at
its end, or repeats the message of a chat; and a classifier with two labels, which flags the digit 7. It prints its
address. A POST to /faults of {"kind": ..., "count": ...} makes the next requests fail.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "secret"


class Server(ThreadingHTTPServer):
    """Scores a text by its length. `requests` counts requests, `most` is the largest number at a time."""

    daemon_threads = True
    # Of connections that wait to be accepted.
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.faults: list[str] = []
        self.meeting = threading.Barrier(3)
        self.requests = self.now = self.most = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._reply({"requests": self.server.requests, "most": self.server.most})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        if self.path == "/faults":
            server.faults = [body["kind"]] * body["count"]
            self._reply({})
            return
        with server.lock:
            fault = server.faults.pop() if server.faults else ""
            server.requests += 1
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            if fault == "meets":
                server.meeting.wait(60)
            if fault not in ("", "meets"):
                self._fail(fault)
            else:
                self._score(body)
        finally:
            with server.lock:
                server.now -= 1

    def _score(self, body: dict[str, Any]) -> None:
        if self.path == "/v1/completions":
            texts = [f"{body['prompt'][::-1]}{n}" for n in range(body["n"])]
            self._reply({"choices": [{"text": text} for text in texts]})
            return
        if self.path == "/v1/chat/completions":
            assert [message["role"] for message in body["messages"]] == ["user"]
            self._reply({"choices": [{"message": {"content": body["messages"][0]["content"]}}] * body["n"]})
            return
        if "use_activation" not in body:
            share = body["input"].count("7") / max(len(body["input"]), 1)
            self._reply({"data": [{"label": "", "probs": [1 - share, share], "num_classes": 2}]})
            return
        assert body["use_activation"] is False
        if self.headers["authorization"] not in (None, f"Bearer {KEY}"):
            self._reply({"error": {"message": "wrong key"}}, 401)
            return
        if self.path == "/score":
            logit = _score_of(body["text_1"] + body["text_2"])
            self._reply({"data": [{"index": 0, "score": logit}]})
        elif "messages" in body:
            first, last = (message["content"] for message in body["messages"])
            assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
            self._reply({"data": [{"probs": [_score_of(f"+{first}={last}")]}]})
        elif self.path == "/classify":
            self._reply({"data": [{"label": "LABEL_0", "probs": [_score_of(body["input"])]}]})
        else:
            assert (self.path, body["task"]) == ("/pooling", "classify")
            self._reply({"data": [{"object": "pooling", "data": [_score_of(body["input"])]}]})

    def _fail(self, fault: str) -> None:
        if fault.isdigit():
            self._reply({"error": {"message": "out of order"}}, int(fault))
        elif fault == "closes":
            self.close_connection = True
        elif fault == "hangs":
            time.sleep(3600)
        elif fault == "drips":
            self.send_response(200)
            self.send_header("content-length", "100")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.1)
        elif fault == "endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(b" " * 65536)
        else:
            self._send(fault.encode())

    def _reply(self, answer: Any, status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), status)

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _score_of(text: str) -> float:
    return len(text) / 10


class RewardServer:
    """The process, from the side of a test."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tba.tests.helpers.reward_server"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def fail(self, kind: str, count: int = 1) -> None:
        """Make the next `count` requests fail: a status, closes, hangs, drips, endless, or the text of a reply.

        Three that are to `meet` wait until all three are there, and are answered.
        """
        data = json.dumps({"kind": kind, "count": count}).encode()
        urllib.request.urlopen(f"{self.url}/faults", data).read()

    def counts(self) -> dict[str, int]:
        """Return how many requests there were, and how many at a time."""
        found: dict[str, int] = json.load(urllib.request.urlopen(self.url))
        return found


@contextlib.contextmanager
def serving() -> Iterator[RewardServer]:
    """Start a server; it ends with the block."""
    server = RewardServer()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def _main() -> None:
    server = Server()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _main()
