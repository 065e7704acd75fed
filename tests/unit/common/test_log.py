"""Logs: equal warnings are counted, not repeated."""

import logging

from tba.common.log import DuplicateFilter, TextFormatter
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
    traces = [record("reward failed", at="task.py:10", prompt=f"p{n}", trace=f"ValueError: {n}") for n in range(9)]
    assert [warnings.keep(one) for one in traces] == [True, *[False] * 8], "the errors of one line are equal"
    assert warnings.keep(record("reward failed", at="task.py:11", prompt="p0", trace="ValueError: 0"))
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


def test_a_line_break_in_a_field_begins_no_line_of_the_log_except_in_a_traceback():
    formatter = TextFormatter("buffer", colour=False)
    forged = formatter.format(record("leases expired", sender="evil\n12:00:00 buffer finished"))
    assert forged.endswith('leases expired sender="evil\\n12:00:00 buffer finished"')
    assert formatter.format(record("reward failed", trace="first\nsecond")).endswith("trace=first\nsecond")
