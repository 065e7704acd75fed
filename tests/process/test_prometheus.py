"""What the processes of a run show to Prometheus has everything that deploy/prometheus asks for."""

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tba.common.errors import Refused
from tba.common.stall.facts import REASONS
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.prometheus import FOLDER, expressions, names_in, panels, promtool
from tba.tests.process.conftest import arithmetic, free_port

pytest.importorskip("prometheus_client")


def free_ports() -> int:
    """Return a port at which, and at the offsets that a run with two searchers uses, nothing listens."""
    for _ in range(100):
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as probes:
            for offset in (0, 1, 10, 11):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
    raise AssertionError("no free ports")


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            text: str = reply.read().decode()
            return text
    except urllib.error.URLError:
        return ""


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """Run a Prometheus with the rules of deploy/prometheus that scrapes these addresses; yields its own."""
    address = f"127.0.0.1:{free_port()}"
    rules, scraped = json.dumps([str(FOLDER / "alerts.yml")]), json.dumps(targets)
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: {rules}\n"
        f"scrape_configs: [{{job_name: tba, static_configs: [{{targets: {scraped}}}]}}]\n"
    )
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "series"}
    command = ["prometheus", f"--web.listen-address={address}", *(f"--{key}={value}" for key, value in options.items())]
    with (folder / "prometheus.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def evaluate(server: str, expression: str) -> list[object]:
    """Return the series of an expression now; none while Prometheus starts."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{server}/api/v1/query?{query}", timeout=60) as reply:
            series: list[object] = json.load(reply)["data"]["result"]
            return series
    # Refused, or 503.
    except urllib.error.URLError:
        return []


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_exposes_every_metric_of_the_dashboard_and_the_alerts(make_config, start_tba, tmp_path):
    port = free_ports()
    metrics = {"prometheus": port, "tensorboard": False}
    run = make_config(
        **arithmetic(metrics=metrics, search={"cpu_searchers": 2}, train={"steps": 10_000}, buffer={"max_staleness": 4})
    )
    process = start_tba("run", run.file)
    found: dict[int, str] = {}

    def all_there() -> bool:
        assert process.poll() is None
        found.update({at: scrape(at) for at in (port, port + 1, port + 10, port + 11)})
        swapped = all("tba_searcher_swap_pause_seconds" in found[at] for at in (port + 10, port + 11))
        return "tba_trainer_loss" in found[port] and "tba_buffer_rejected" in found[port + 1] and swapped

    wait_until(lambda: "tba_buffer_epoch" in scrape(port + 1), 60, "the buffer's endpoint")
    # A request that is refused: a monitor leases nothing.
    lease = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
    with contextlib.closing(BufferClient(run.address, role="monitor", name="test")) as client, pytest.raises(Refused):
        client.call(lease, messages.Leases, deadline_seconds=60.0)
    wait_until(all_there, 120, "a step and a swap of weights")
    exposed = set.union(*(names_in(text) for text in found.values()))
    missing = {title: names_in(expr) - exposed for title, expr in expressions().items() if names_in(expr) - exposed}
    assert not missing
    for text in found.values():
        promtool("check", "metrics", stdin=text)
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    queries = {title: expr.replace("$run", "test") for title, expr in panels().items()}
    # The run moves.
    stands_still = queries.pop("Stands still, by reason A")
    with prometheus(tmp_path, [f"127.0.0.1:{at}" for at in found]) as server:
        empty = set(queries)

        def all_drawn() -> bool:
            assert process.poll() is None
            empty.difference_update([title for title in empty if evaluate(server, queries[title])])
            return not empty

        with contextlib.suppress(AssertionError):
            wait_until(all_drawn, 60, "data of every panel")
        assert empty == set()
        assert evaluate(server, stands_still) == []
        assert len(evaluate(server, stands_still.replace("== 1", "== 0"))) == len(REASONS)
