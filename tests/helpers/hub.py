"""A hub of models on this machine, for the real client of `huggingface_hub`: HF_ENDPOINT is its address.

It serves the routes that a download uses: information on a repository, the list of its files, and each file.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef" * 2 + "01234567"


@dataclass
class Hub:
    """`models` are directories by name; those of `gated` may be listed and not downloaded.

    `requests` are the paths that were asked for, and `served` the names of the files. `status` is an error that answers
    every request. Weights are sent once `sends_weights` is set, as it is at first.
    """

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    status: int = 0
    sends_weights: threading.Event = field(default_factory=threading.Event)
    address: str = ""


@contextlib.contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.sends_weights.set()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.sends_weights.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.hub.requests.append(self.path)
        # /api/models/OWNER/NAME/..., or /OWNER/NAME/resolve/REVISION/FILE
        parts = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if self.hub.status:
            return self._reply(self.hub.status, b"", {})
        if name not in self.hub.models:
            return self._reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = sorted(path for path in self.hub.models[name].iterdir() if path.is_file())
        if not rest or rest[0] == "revision":
            return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in files]})
        if rest[0] == "tree":
            entries = ({"path": path.name, "size": path.stat().st_size, "oid": _digest(path)} for path in files)
            return self._json([{"type": "file"} | entry for entry in entries])
        return self._serve_file(name, self.hub.models[name] / rest[2])

    def _serve_file(self, name: str, path: Path) -> None:
        if name in self.hub.gated:
            return self._reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if not path.is_file():
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.hub.served.append(path.name)
            if path.suffix == ".safetensors":
                self.hub.sends_weights.wait()
        return self._reply(200, path.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(path)}"'})

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
