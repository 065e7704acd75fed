"""Logs, in which equal warnings are counted; why a run stands still; and which run a place belongs to."""

import json
import logging
import os
import subprocess
import sys

import pytest

from tba.common.errors import ConfigError
from tba.common.log import DuplicateFilter, TextFormatter
from tba.common.run_identity import RunIdentity, refuse_other_run, refuse_other_server
from tba.common.run_status import Facts, stall_of
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.clock import ManualClock


def record(event: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("tba.x", level, "", 0, event, None, None)
    made.__dict__["fields"] = fields
    return made


def test_equal_warnings_are_counted_for_a_minute():
    clock = ManualClock()
    warnings = DuplicateFilter(clock.monotonic)
    many = [record("rollout failed", prompt=f"p{n}", reason="too long", attempt=n) for n in range(1000)]
    assert [warnings.keep(one) for one in many] == [True, *[False] * 999]
    assert warnings.keep(record("rollout failed", prompt="p0", reason="another")), "another reason is another warning"
    assert warnings.keep(record("rollout failed", level=logging.ERROR, reason="too long")), "errors are never left out"
    traces = [record("reward failed", at="task.py:10", prompt=f"p{n}", error=f"ValueError: {n}") for n in range(9)]
    assert [warnings.keep(one) for one in traces] == [True, *[False] * 8], "the errors of one line are equal"
    assert warnings.keep(record("reward failed", at="task.py:11", prompt="p0", error="ValueError: 0"))
    clock.advance(61)
    later = record("rollout failed", prompt="p7", reason="too long")
    assert warnings.keep(later)
    assert TextFormatter("t", colour=False).format(later).endswith('prompt=p7 reason="too long" repeated=999')
    clock.advance(61)
    assert warnings.keep(last := record("rollout failed", prompt="p8", reason="too long"))
    assert "repeated" not in last.__dict__["fields"]


def test_warnings_that_a_peer_causes_are_equal_whatever_their_reasons():
    clock = ManualClock()
    warnings = DuplicateFilter(clock.monotonic)
    many = [record("request refused", by="10.0.0.1", sender=f"s{n}", reason=f"unknown {n}") for n in range(1000)]
    assert [warnings.keep(one) for one in many] == [True, *[False] * 999]
    assert warnings.keep(record("request refused", by="10.0.0.2", sender="s0", reason="unknown 0"))
    assert warnings.keep(record("connection closed", by="10.0.0.1"))
    clock.advance(61)
    assert warnings.keep(later := record("request refused", by="10.0.0.1"))
    assert later.__dict__["fields"]["repeated"] == 999


def test_a_line_break_in_a_field_begins_no_line_of_the_log():
    formatter = TextFormatter("buffer", colour=False)
    forged = formatter.format(record("leases expired", sender="evil\n12:00:00 buffer finished"))
    assert forged.endswith('leases expired sender="evil\\n12:00:00 buffer finished"')


def test_a_failed_thread_is_one_line_of_a_journal():
    program = """if True:
        import threading
        from tba.common.log import configure
        configure("train")
        thread = threading.Thread(target=open, args=("/nowhere/file",), name="writer")
        thread.start()
        thread.join()
    """
    written = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TBA_LOG": "json"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    line = json.loads(written)
    assert (line["level"], line["event"], line["thread"]) == ("error", "a thread has failed", "writer")
    assert line["error"] == "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/file'"


def silent(seconds: float, *failing: str) -> Facts:
    return Facts(None, "tcp://a:5757", seconds, failing)


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        (silent(42), "buffer_silent", ("at tcp://a:5757", "for 42 s", "again with `tba buffer serve`")),
        (silent(5 * 3600), "buffer_silent", ("5 h",)),
        (silent(1, "buffer failed 2 times: disk I/O error"), "process_fails", ("disk I/O error", "run.dir/logs")),
    ],
)
def test_that_the_buffer_does_not_answer_is_known_to_the_asker(facts, reason, words):
    stall = not_none(stall_of(facts))
    assert stall.reason == reason
    assert [word for word in words if word not in stall.sentence] == []
    # One that has just stopped answering may restart.
    assert stall_of(silent(3)) is None


TEST, OFFLINE = RunIdentity("test"), RunIdentity("test", "/other/buffer.sqlite")


@pytest.mark.parametrize(
    ("found", "asked", "sentence"),
    [
        ([RunIdentity("a"), RunIdentity("b")], TEST, 'to run a, b, and run.name is test: set run.name = "a", or set'),
        ([OFFLINE], TEST, "to run test, which was trained offline from .* continues it: set another run.dir"),
        ([TEST], OFFLINE, "to run test, which was not trained offline: set another run.dir"),
    ],
)
def test_the_place_of_another_run_is_refused_with_what_to_do(found, asked, sentence):
    with pytest.raises(ConfigError, match=f"^run/ belongs {sentence}"):
        refuse_other_run("run/", found, asked)


def test_a_new_place_and_that_of_the_same_run_are_used_and_the_server_of_another_is_not():
    for found, asked in (([], TEST), ([TEST], TEST), ([RunIdentity("a"), TEST], TEST), ([OFFLINE], OFFLINE)):
        refuse_other_run("run/", found, asked)
    with pytest.raises(ConfigError, match="the buffer at ipc://x belongs to run a, and run.name is b"):
        refuse_other_server("ipc://x", "a", "b")
