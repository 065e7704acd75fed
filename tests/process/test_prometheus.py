"""What a run shows to Prometheus has everything that deploy/prometheus asks for."""

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tba.common.errors import Refused
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import STALL_REASONS
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.prometheus import FOLDER, expressions, names_in, panels, promtool
from tba.tests.process.conftest import arithmetic, free_port


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
    port = free_port()
    metrics = {"prometheus": port, "tensorboard": False}
    run = make_config(
        **arithmetic(metrics=metrics, search={"cpu_searchers": 2}, train={"steps": 10_000}, buffer={"max_staleness": 4})
    )
    process = start_tba("run", run.file)

    def all_there() -> bool:
        assert process.poll() is None
        text = scrape(port)
        swapped = text.count("\ntba_searcher_swap_pause_seconds{") == 2
        return "tba_trainer_loss" in text and "tba_buffer_rejected" in text and swapped

    wait_until(lambda: "tba_buffer_epoch" in scrape(port), what="the buffer's endpoint")
    # A request that is refused: a monitor leases nothing.
    lease = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
    with contextlib.closing(BufferClient(run.address, role="monitor", name="test")) as client, pytest.raises(Refused):
        client.call(lease, messages.Leases, deadline_seconds=60.0)
    wait_until(all_there, 120, "a step and a swap of weights")
    text = scrape(port)
    missing = {title: names for title, expr in expressions().items() if (names := names_in(expr) - names_in(text))}
    assert not missing
    promtool("check", "metrics", stdin=text)
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    queries = {title: expr.replace("$run", "test") for title, expr in panels().items()}
    # The run moves.
    stands_still = queries.pop("Stands still, by reason A")
    with prometheus(tmp_path, [f"127.0.0.1:{port}"]) as server:
        empty = set(queries)

        def all_drawn() -> bool:
            assert process.poll() is None
            empty.difference_update([title for title in empty if evaluate(server, queries[title])])
            return not empty

        with contextlib.suppress(AssertionError):
            wait_until(all_drawn, 60, "data of every panel")
        assert empty == set()
        assert evaluate(server, stands_still) == []
        assert len(evaluate(server, stands_still.replace("== 1", "== 0"))) == len(STALL_REASONS)
