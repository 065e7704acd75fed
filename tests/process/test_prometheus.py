"""What a run shows to Prometheus has everything that deploy/prometheus asks for."""

import contextlib
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tba.common.errors import Refused
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.prometheus import expressions, names_in, promtool
from tba.tests.process.conftest import arithmetic, free_port


def scrape(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            text: str = reply.read().decode()
            return text
    except urllib.error.URLError:
        return ""


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
