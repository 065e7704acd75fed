"""What the buffer server does about a stall: a line in the log, and one alarm."""

import http.server
import json
import shlex
import socket
import threading

import pytest
from pydantic import SecretStr

from tba.buffer.server.alarm import Alarm
from tba.buffer.server.stall_watch import StallWatch
from tba.common.config import AlarmSection
from tba.common.stall.facts import Stall
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.clock import ManualClock

_SILENT = Stall("searcher_silent", 'searcher "gpu3" has been silent; $(echo unquoted)')
_SLOW = Stall("rewards", "96 rewards")


def test_a_stall_is_logged_once_for_each_reason_and_alarms_once(caplog):
    clock, sent = ManualClock(), []
    watch = StallWatch(clock, lambda stall, seconds: sent.append((stall.reason, seconds)), after_seconds=30)

    def spend(seconds: int, stall: Stall | None) -> None:
        for _ in range(seconds):
            clock.advance(1)
            watch.update(stall)

    with caplog.at_level("INFO", "tba"):
        spend(3, _SLOW)
        spend(20, None)
        assert (caplog.messages, watch.seconds) == ([], 0)
        spend(20, _SILENT)
        # A moment without it does not end it.
        spend(2, None)
        spend(60, _SLOW)
        assert watch.seconds > 80
        spend(10, None)
    assert caplog.messages == ["the run stands still", "the run stands still", "the run moves again"]
    assert sent == [("rewards", 30)]
    spend(40, _SILENT)
    assert [reason for reason, _ in sent] == ["rewards", "searcher_silent"], "a new stall alarms again"


def test_the_command_of_an_alarm_gets_the_sentence_and_its_output_is_no_code(tmp_path):
    out = tmp_path / "out"
    command = f'printf "%s|" "$TBA_STALL" "$TBA_STALL_REASON" $TBA_STALL_RUN > {shlex.quote(str(out))}'
    alarm = Alarm(AlarmSection(command=SecretStr(command)), "r7")
    alarm.send(_SILENT, 600)
    wait_until(lambda: out.exists() and out.read_text().count("|") == 3, 60, "the command")
    assert out.read_text() == f"{_SILENT.sentence}|searcher_silent|r7|"
    alarm.close()


def test_a_command_that_does_not_end_is_killed_at_the_end_of_the_server(tmp_path, caplog):
    alarm = Alarm(AlarmSection(command=SecretStr(f"echo > {shlex.quote(str(tmp_path))}/started; sleep 600")), "r")
    alarm.send(_SILENT, 600)
    wait_until((tmp_path / "started").exists, 60, "the command")
    alarm.send(_SLOW, 600)
    alarm.close()
    assert "alarm dropped: the last one has not been sent yet" in caplog.messages
    assert "alarm.command killed: it did not end in time" in caplog.messages


def test_the_webhook_of_an_alarm_gets_json():
    bodies: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    alarm = Alarm(AlarmSection(webhook=SecretStr(f"http://127.0.0.1:{server.server_port}/hook")), "r7")
    alarm.send(_SLOW, 601.4)
    thread.join(60)
    alarm.close()
    server.server_close()
    assert [{key: body[key] for key in ("run", "reason", "sentence", "seconds", "text")} for body in bodies] == [
        {
            "run": "r7",
            "reason": "rewards",
            "sentence": "96 rewards",
            "seconds": 601,
            "text": "tba run r7 stands still: 96 rewards",
        }
    ]


def test_a_webhook_whose_server_sends_no_http_is_a_warning(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        alarm = Alarm(AlarmSection(webhook=SecretStr(f"http://127.0.0.1:{server.getsockname()[1]}/hook")), "r7")
        alarm.send(_SLOW, 601.4)
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"220 mail.example ESMTP\r\n")
        wait_until(lambda: "alarm.webhook failed" in caplog.messages, 60, "a warning")
        alarm.close()


def test_a_webhook_and_a_command_are_not_stored_and_a_webhook_must_be_http():
    command = SecretStr("curl -H 'Authorization: secret' https://hooks.example")
    section = AlarmSection(webhook=SecretStr("https://hooks.example/secret"), command=command)
    assert "secret" not in str(section.model_dump(mode="json"))
    with pytest.raises(ValueError, match="http://"):
        AlarmSection(webhook=SecretStr("file:///etc/passwd"))
