"""Logs: equal warnings are counted, not repeated."""

import logging

from tba.common.log import EqualWarnings, TextFormatter
from tba.tests.helpers.clock import ManualClock


def record(event: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("tba.x", level, "", 0, event, None, None)
    made.__dict__["fields"] = fields
    return made


def test_equal_warnings_are_counted_for_a_minute():
    clock = ManualClock()
    warnings = EqualWarnings(clock.monotonic)
    many = [record("rollout failed", prompt=f"p{n}", reason="too long", attempt=n) for n in range(1000)]
    assert [warnings.keep(one) for one in many] == [True, *[False] * 999]
    assert warnings.keep(record("rollout failed", prompt="p0", reason="another")), "another reason is another warning"
    assert warnings.keep(record("rollout failed", level=logging.ERROR, reason="too long")), "errors are never left out"
    clock.advance(61)
    later = record("rollout failed", prompt="p7", reason="too long")
    assert warnings.keep(later)
    assert TextFormatter("t", colour=False).format(later).endswith('prompt=p7 reason="too long" repeated=999')
    clock.advance(61)
    assert warnings.keep(last := record("rollout failed", prompt="p8", reason="too long"))
    assert "repeated" not in last.__dict__["fields"]
