"""Why a run stands still, with what only the asker can know."""

import pytest

from tba.common.run_status import Facts, find_stall
from tba.tests.helpers.statuses import make_client, make_status

_CRASHES = ["buffer failed 2 times: disk I/O error"]


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        (
            Facts(None, "tcp://a:5757", 42),
            "buffer_silent",
            ("at tcp://a:5757", "for 42 s", "again with `tba buffer serve`"),
        ),
        (Facts(None, "tcp://a:5757", 5 * 3600), "buffer_silent", ("5 h",)),
        (Facts(None, "tcp://a:5757", 1, failing=_CRASHES), "process_fails", ("disk I/O error", "run.dir/logs")),
    ],
)
def test_that_the_buffer_does_not_answer_is_known_to_the_asker(facts, reason, words):
    stall = find_stall(facts)
    assert stall is not None
    assert stall.reason == reason
    assert [word for word in words if word not in stall.sentence] == []


def test_a_buffer_that_has_just_stopped_answering_may_restart():
    assert find_stall(Facts(None, "tcp://a:1", 3.0)) is None


GONE = make_client("trainer", activity="gone", activity_seconds=300.0)


@pytest.mark.parametrize(
    ("role", "facts"),
    [("searcher", {"trainer_waits_seconds": 300.0}), ("trainer", {"uptime_seconds": 300.0}),
     ("trainer", {"uptime_seconds": 9e9, "clients": [GONE]})],
)  # fmt: skip
def test_a_role_is_not_missing_while_a_child_of_the_asker_loads_its_model_for_up_to_ten_minutes(role, facts):
    stall = {"reason": f"no_{role}", "sentence": "none is connected"}
    status = make_status(stall=stall, **facts)
    assert find_stall(Facts(status)) == status.stall
    assert find_stall(Facts(status, loading={role})) is None
    later = make_status(stall=stall, trainer_waits_seconds=601.0, uptime_seconds=601.0)
    assert find_stall(Facts(later, loading={role})) == later.stall
