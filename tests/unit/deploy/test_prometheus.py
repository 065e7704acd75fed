"""The endpoint for Prometheus, and the alerts and the dashboard of deploy/prometheus."""

import json
import socket
import struct
import threading
import urllib.request
from contextlib import closing

import pytest

from tba.buffer.server.prometheus import MetricsEndpoint, Sample, open_endpoint, samples_of
from tba.buffer.service.pace import StepMetrics
from tba.common.wire.fields import STALL_REASONS
from tba.common.wire.messages import Status
from tba.tests.helpers.prometheus import FOLDER, alerts, promtool
from tba.tests.helpers.statuses import make_client, make_status


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text: str = reply.read().decode()
        return text


def test_a_scrape_returns_the_samples_that_were_set_last(caplog):
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        assert "tba_" not in scrape(endpoint.port)
        endpoint.show([Sample("buffer_epoch", 1, "Epoch.")])
        endpoint.show([Sample("a_total", 2, "A.", {"kind": 'x"y\n'}), Sample("a_total", 3, "A.", {"kind": "z"})])
        text = scrape(endpoint.port)
        # A port that is taken is a warning.
        assert open_endpoint(str(endpoint.port), "r") is None
    assert "no endpoint for Prometheus" in caplog.messages
    assert open_endpoint("0.0.0.0:70000", "r") is None
    assert "tba_buffer_epoch" not in text
    assert '# TYPE tba_a_total counter\ntba_a_total{kind="x\\"y\\n",run="r"} 2.0\n' in text
    assert 'tba_a_total{kind="z",run="r"} 3.0' in text
    assert "process_resident_memory_bytes" in text


@pytest.mark.slow
def test_idle_and_dropped_connections_start_no_thread_and_print_nothing(monkeypatch, capsys):
    # DNS may take minutes for the name of a machine.
    monkeypatch.setattr(socket, "getfqdn", pytest.fail)
    with closing(MetricsEndpoint("127.0.0.1", 0, "r")) as endpoint:
        threads = threading.active_count()
        connections = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(4)]
        # It is reset in the middle of a request.
        connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connections.pop(0).close()
        assert "process_" in scrape(endpoint.port)
        assert threading.active_count() == threads
        for connection in connections:
            connection.close()
    assert capsys.readouterr().err == ""


def values(status: Status, name: str, steps: StepMetrics | None = None) -> dict[tuple[str, ...], float]:
    samples = samples_of(status, steps or StepMetrics(), now=1000.0)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}


def test_the_stall_and_the_clients_are_shown():
    clients = [make_client("searcher", "a"), make_client("searcher", "b", silent_seconds=60.0)]
    clients += [make_client("searcher", "c", activity="gone", silent_seconds=60.0), make_client("monitor")]
    stall = {"reason": "buffer_refuses", "sentence": "full"}
    status = make_status(7, clients=clients, rejected={"storage": 3}, stall=stall, last_step_seconds=5.0)
    stalled = values(status, "stalled")
    assert set(stalled) == {(reason,) for reason in STALL_REASONS}
    assert [reason for reason, value in stalled.items() if value] == [("buffer_refuses",)]
    assert values(status, "buffer_clients") == {
        **{("searcher", state): 1 for state in ("present", "silent", "gone")},
        **{("trainer", state): 0 for state in ("present", "silent", "gone")},
        **{("monitor", state): int(state == "present") for state in ("present", "silent", "gone")},
    }
    assert values(status, "buffer_rejected_requests_total") == {("storage",): 3}
    assert values(status, "buffer_last_step_timestamp_seconds") == {(): 995.0}
    assert not any(values(make_status(), "stalled").values())


def test_each_living_searcher_is_shown_with_its_heartbeat():
    first = make_client("searcher", "n1-gpu0", activity="generating", metrics={"in_flight": 3.0, "tokens": 50.0})
    twins = [make_client("searcher", sender=f"n1-cpu0.{n}", weights_version=n) for n in (1, 2)]
    status = make_status(7, clients=[first, *twins, make_client("searcher", "left", activity="gone")])
    assert values(status, "searcher_generating") == {("n1-gpu0",): 1, ("n1-cpu0.1",): 0, ("n1-cpu0.2",): 0}
    assert values(status, "searcher_weights_version") == {("n1-cpu0.1",): 1, ("n1-cpu0.2",): 2}
    assert values(status, "searcher_requests_in_flight") == {("n1-gpu0",): 3}
    assert values(status, "searcher_response_tokens_total") == {("n1-gpu0",): 50}


def test_the_last_step_is_shown_and_totals_of_all_reports():
    steps = StepMetrics()
    # The last report comes again.
    for step in (0, 1, 1):
        numbers = {"loss": step + 0.5, "reward_part_a-b": 1.0, "staleness_share_2_3": 0.25, "tokens": 8.0}
        steps.note(step, {**numbers, "skipped": float(step), "seconds_wait": 0.5, "seconds_step": 2.0})
    shown = {
        "loss": {(): 1.5},
        "reward_part": {("a-b",): 1.0},
        "staleness_share_ratio": {("2_3",): 0.25},
        "steps_total": {(): 2},
        "skipped_steps_total": {(): 1.0},
        "tokens_total": {(): 16.0},
        "phase_seconds_total": {("wait",): 1.0},
        "step_seconds": {(): 2.0},
        "seconds_wait": {},
    }
    status = make_status(2, clients=[make_client("trainer")])
    assert {name: values(status, f"trainer_{name}", steps) for name in shown} == shown
    assert values(status, "trainer_steps_total") == {}
    assert values(make_status(2), "trainer_steps_total", steps) == {}, "no trainer is connected"


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
        # The rest of what makes an alert, its labels and texts, is in the rules.
        firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
        samples = [{"labels": "{}", "value": 1}] if raised else []
        asked = [{"expr": firing, "eval_time": "25m", "exp_samples": samples}]
        given = [{"series": name, "values": value} for name, value in inputs.items()]
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": asked})
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
