"""What all roles report to systemd, and to Prometheus: everything that deploy/prometheus asks for."""

import contextlib
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tba.common.errors import Refused
from tba.common.system.process import NotifySocket
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
def test_roles_started_by_hand_in_any_order_report_to_systemd_and_every_metric_of_the_dashboard_to_prometheus(
    make_config, start_tba
):
    """tests/process/test_fleet.py has several searchers."""
    port = free_port()
    metrics = {"prometheus": port, "tensorboard": False}
    run = make_config(**arithmetic(metrics=metrics, train={"steps": 100_000}, buffer={"max_staleness": 4}))
    heard: dict[tuple[str, ...], list[str]] = {}
    sockets = {}
    for role in (("train", "--processes", "2"), ("search", "--cpu", "1"), ("buffer", "serve")):
        sockets[role], heard[role] = NotifySocket(), []
        start_tba(*role, "--config", run.file, NOTIFY_SOCKET=sockets[role].address)

    def all_reported() -> bool:
        for role, systemd in sockets.items():
            heard[role] += systemd.receive()
        return all(lines.count("WATCHDOG=1") >= 2 and "READY=1" in lines for lines in heard.values())

    wait_until(all_reported)
    # A request that is refused: a monitor leases nothing.
    lease = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=0.0)
    with contextlib.closing(BufferClient(run.address, role="monitor", name="test")) as client, pytest.raises(Refused):
        client.call(lease, messages.Leases, deadline_seconds=60.0)
    shown = ("tba_trainer_loss", "tba_buffer_rejected", "\ntba_searcher_swap_pause_seconds{")
    wait_until(lambda: all(name in scrape(port) for name in shown), what="a step and a swap of weights")
    needed = set().union(*map(names_in, expressions().values()))
    # Some come with the next heartbeat.
    wait_until(lambda: needed <= names_in(scrape(port)), what="every metric of the dashboard")
    text = scrape(port)
    for systemd in sockets.values():
        systemd.close()
    promtool("check", "metrics", stdin=text)
