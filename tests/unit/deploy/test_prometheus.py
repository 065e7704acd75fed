"""The endpoints for Prometheus, and the alerts and the dashboard of deploy/prometheus."""

import contextlib
import json
import socket
import threading
import urllib.request
from contextlib import closing

import pytest

from tba.buffer.server.prometheus import samples_of as buffer_samples
from tba.common import prometheus
from tba.common.config import Config
from tba.common.errors import MissingExtra
from tba.common.prometheus import MetricsEndpoint, Sample, open_endpoint
from tba.common.stall.facts import REASONS, Stall
from tba.common.system.devices import number_of
from tba.searcher.prometheus import samples_of as searcher_samples
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.prometheus import FOLDER, alerts, expressions, promtool
from tba.tests.helpers.statuses import make_client, make_status

pytest.importorskip("prometheus_client")


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text: str = reply.read().decode()
        return text


def config_with(**metrics: object) -> Config:
    return Config.model_validate({"run": {"name": "r"}, "metrics": metrics})


def test_a_scrape_returns_the_samples_that_were_set_last():
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        assert "tba_" not in scrape(endpoint.port)
        endpoint.show([Sample("buffer_epoch", 1, "Epoch.")])
        endpoint.show([Sample("a_total", 2, "A.", {"kind": 'x"y\n'}), Sample("a_total", 3, "A.", {"kind": "z"})])
        text = scrape(endpoint.port)
    assert "tba_buffer_epoch" not in text
    assert '# TYPE tba_a_total counter\ntba_a_total{kind="x\\"y\\n",run="r"} 2.0\n' in text
    assert 'tba_a_total{kind="z",run="r"} 3.0' in text
    assert "process_resident_memory_bytes" in text


def test_the_endpoint_opens_without_asking_for_the_name_of_the_machine(monkeypatch):
    def unanswered(name: str = "") -> str:
        raise AssertionError(f"DNS was asked for the name of {name}")

    monkeypatch.setattr("socket.getfqdn", unanswered)
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        assert "process_" in scrape(endpoint.port)


def test_a_client_that_sends_nothing_does_not_block_the_endpoint(monkeypatch, capsys):
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.1)
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(2)]
        assert "process_" in scrape(endpoint.port)
        for connection in silent:
            connection.close()
    assert capsys.readouterr().err == ""


def test_a_client_that_sends_a_byte_at_a_time_keeps_neither_others_nor_the_end_waiting(monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.3)
    endpoint = MetricsEndpoint("127.0.0.1", 0, "r")
    with closing(socket.create_connection(("127.0.0.1", endpoint.port))) as slow:
        done = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not done.wait(0.05):
                    slow.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert "process_" in scrape(endpoint.port)
            endpoint.close()
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("value", "role", "number", "endpoint"),
    [
        ("9400", "trainer", 0, ("127.0.0.1", 9400)),
        (9400, "buffer", 0, ("127.0.0.1", 9401)),
        ("0.0.0.0:9400", "searcher", 6, ("0.0.0.0", 9416)),
    ],
)
def test_each_process_of_a_machine_has_its_own_port(value, role, number, endpoint):
    assert config_with(prometheus=value).metrics.endpoint(role, number) == endpoint


def test_the_number_of_a_searcher_is_that_of_its_first_device():
    assert [number_of(label) for label in ("cpu1", "gpu3", "gpu10-11", "GPU-1a2b")] == [1, 3, 10, 0]


def test_a_port_that_is_taken_is_a_warning(caplog):
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        assert open_endpoint(config_with(prometheus=f"{endpoint.port - 1}"), "buffer") is None
    assert "no endpoint for Prometheus" in caplog.messages
    assert open_endpoint(config_with(), "buffer") is None


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[prometheus\]'"):
        open_endpoint(config_with(prometheus="9400"), "buffer")


def values(samples: list[Sample], name: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}


def test_the_buffer_shows_the_stall_and_its_clients():
    clients = [make_client("searcher", "a"), make_client("searcher", "b", silent_seconds=60.0)]
    clients += [make_client("searcher", "c", activity="gone", silent_seconds=60.0), make_client("monitor")]
    status = make_status(7, clients=clients, rejected={"storage": 3}, refuses_puts="full", last_step_seconds=5.0)
    clock = ManualClock()
    samples = buffer_samples(status, Stall("buffer_refuses", "full"), clock)
    stalled = values(samples, "stalled")
    assert set(stalled) == {(reason,) for reason in REASONS}
    assert [reason for reason, value in stalled.items() if value] == [("buffer_refuses",)]
    assert values(samples, "buffer_clients") == {
        **{("searcher", state): 1 for state in ("present", "silent", "gone")},
        **{("trainer", state): 0 for state in ("present", "silent", "gone")},
        **{("monitor", state): int(state == "present") for state in ("present", "silent", "gone")},
    }
    assert values(samples, "buffer_rejected_requests_total") == {("storage",): 3}
    assert values(samples, "buffer_last_step_timestamp_seconds") == {(): clock.wall() - 5}
    assert not any(value for value in values(buffer_samples(make_status(), None, clock), "stalled").values())


def test_a_searcher_shows_its_heartbeat_and_totals():
    metrics = {"in_flight": 3.0, "tokens_per_second": 10.0, "preemptions": 2.0}
    samples = searcher_samples(metrics, version=None, is_generating=True, trajectories=4, tokens=50)
    assert {sample.name: sample.value for sample in samples} == {
        "searcher_generating": 1,
        "searcher_trajectories_total": 4,
        "searcher_response_tokens_total": 50,
        "searcher_requests_in_flight": 3,
        "searcher_preemptions_total": 2,
    }


# ---------------------------------------------------------------- deploy/prometheus


def test_promtool_accepts_rules_configuration_and_queries():
    assert "SUCCESS" in promtool("check", "rules", FOLDER / "alerts.yml")
    assert "SUCCESS" in promtool("check", "config", FOLDER / "prometheus.yml")


# Of each alert: series that raise it, and one that ends it. Values are one minute apart.
ALERTS = {
    "TbaStalled": ('tba_stalled{run="r", reason="spool"}', "1x30", "0x30"),
    "TbaBufferGone": ('tba_buffer_finished{run="r"}', "0x5 _x25", "0x30"),
    "TbaSearcherSilent": ('tba_buffer_clients{run="r", role="searcher", state="silent"}', "2x30", "0x30"),
    "TbaNoSearcher": ('tba_buffer_clients{run="r", role="searcher", state="present"}', "0x30", "1x30"),
    "TbaBufferRefusesPuts": ('tba_buffer_refuses_puts{run="r"}', "1x30", "0x30"),
    "TbaDiskNearlyFull": ('tba_buffer_disk_free_bytes{run="r"}', "5x30", "50x30"),
    "TbaLossNotFinite": ('tba_trainer_skipped_steps_total{run="r"}', "0+1x30", "3x30"),
    "TbaStaleData": ('tba_trainer_staleness_mean{run="r"}', "40x30", "4x30"),
    "TbaWeightsRefused": ('tba_searcher_weights_refusals_total{run="r"}', "0+1x30", "3x30"),
    "TbaManyFailedResponses": ('tba_searcher_failed_responses_total{run="r"}', "0+5x30", "0+1x30"),
}
OTHERS = {
    'tba_buffer_finished{run="r"}': "0x30",
    'tba_buffer_disk_bytes{run="r"}': "100x30",
    'tba_searcher_trajectories_total{run="r"}': "0+20x30",
}


@pytest.mark.parametrize("raised", [True, False])
def test_each_alert_is_raised_by_its_series_and_by_no_healthy_ones(tmp_path, raised):
    assert {name for name, _ in alerts()} == set(ALERTS)
    tests = []
    for alert, (series, bad, good) in ALERTS.items():
        others = {name: value for name, value in OTHERS.items() if name != series}
        inputs = {series: bad if raised else good, **others}
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": value} for name, value in inputs.items()],
                # The rest of what makes an alert, its labels and texts, is in the rules.
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": "25m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if raised else [],
                    }
                ],
            }
        )
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(FOLDER / "alerts.yml")], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)


def test_the_dashboard_has_what_grafana_requires_of_its_schema():
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(dashboard)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert {"id", "type", "title", "gridPos"} <= set(panel)
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24, f"{panel['title']} is wider than the grid"
        assert not cells & taken, f"{panel['title']} is over another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all({"refId", "expr", "legendFormat"} <= set(target) for target in panel["targets"])
        assert "$run" in "".join(target["expr"] for target in panel["targets"]) or "process_" in str(panel["targets"])


def test_the_dashboard_has_panels_of_every_role():
    text = "".join(expressions().values())
    assert all(f"tba_{role}_" in text for role in ("trainer", "buffer", "searcher"))
