"""The stall of a run: a status in, the culprit and the remedy out; and how the server follows it."""

import sys
from typing import Any

import msgspec
import pytest

from tba.buffer.service.stall import StallWatch, find_stall
from tba.common.wire.fields import STALL_REASONS
from tba.common.wire.messages import Stall, Status
from tba.tests.helpers.checks import not_none
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.statuses import make_client, make_status

_LACK = "412 of 512 prompts have trajectories at staleness <= 4"


def searcher(name: str = "gpu0", **changes: Any):
    fields = {"activity": "generating", "activity_seconds": 300.0, "weights_version": 7, "metrics": {"in_flight": 48.0}}
    return make_client("searcher", name, **fields | changes)


def waiting(name: str = "gpu0", reason: str = "", metrics: dict[str, float] | None = None, **changes: Any):
    return searcher(name, activity="waiting", reason=reason, metrics=metrics or {}, **changes)


def trainer(**changes: Any):
    return make_client("trainer", **{"activity_seconds": 1000.0} | changes)


def failing(reason: str, **changes: Any):
    return make_client("monitor", reason, activity="failing", reason=reason, **changes)


def run(*clients: Any, **changes: Any) -> Status:
    """A run at step 12 whose last step took as long as usual."""
    fields: dict[str, Any] = {
        "uptime_seconds": 5000.0,
        "trajectories": 9000,
        "last_step_seconds": 9.0,
        "usual_step_seconds": 14.0,
        "newest_version": 7,
    }
    return make_status(12, clients=list(clients), **fields | changes)


def starved(*searchers: Any, **changes: Any) -> Status:
    """A run whose trainer has waited for a batch for 40 s."""
    fields = {"trainer_waits_for": _LACK, "trainer_waits_seconds": 40.0, "last_step_seconds": 54.0}
    return run(trainer(activity="waiting", reason=_LACK), *searchers, **fields | changes)


def new_run(*clients: Any, seconds: float, **changes: Any) -> Status:
    """A run without a step, whose buffer was started some seconds ago."""
    return make_status(clients=list(clients), uptime_seconds=seconds, **changes)


_DISK = "96 MiB are free on the disk of b.sqlite, buffer.min_free_mib is 128: make room"
_CANARY = "v812 does not match the trainer: its log-probabilities differ by 0.9 on the canary"
_OLD_REFUSED = {"refused_version": 7.0}
_GONE = "v00000007/manifest.json: No such file or directory: already deleted, or not on this machine"
_FETCH = "waiting for the trainer at tcp://a:1 to send model.safetensors: silent for 31 s"
_FULL = "the spool is full (512 MiB): waiting for the buffer at tcp://a:5757"
_REFUSING = {"refused_version": 812.0}
_UNDER_WAY = "224 of 224 prompts under way: buffer.max_staleness = 6 allows no more before the next step"
_HUGE = {"rewards_waiting": sys.float_info.max, "reward_timeouts": -sys.float_info.max}
_STARVED_WORDS = ("the trainer waits", "412 of 512")

# A status, the reason, and words that the sentence must contain.
STALLS: dict[str, tuple[Status, str, tuple[str, ...]]] = {
    "disk of the buffer is full": (
        run(trainer(), searcher(), refuses_puts=_DISK, free_bytes=3, disk_bytes=100),
        "buffer_refuses",
        ("buffer refuses puts", "3% of its disk is free", "buffer.min_free_mib", "make room"),
    ),
    "disk full and spools full": (
        starved(*(waiting(f"gpu{n}", _FULL, {"paused": 1.0}) for n in range(3)), refuses_puts=_DISK),
        "buffer_refuses",
        ("all 3 searchers are paused", "spool is full", "buffer refuses puts"),
    ),
    "trainer crashes": (
        run(searcher(), failing("trainer failed 3 times: CUDA out of memory")),
        "process_fails",
        ("trainer failed 3 times", "CUDA out of memory"),
    ),
    "another machine's searchers crash": (
        starved(failing("gpu0 on n2 failed 4 times: no CUDA device")),
        "process_fails",
        ("gpu0 on n2", "no CUDA device", *_STARVED_WORDS),
    ),
    "no trainer was ever started": (new_run(searcher(), seconds=700), "no_trainer", ("no trainer", "`tba train`")),
    "no trainer since the buffer's restart": (
        run(searcher(), uptime_seconds=700.0),
        "no_trainer",
        ("12 min", "tba train --resume"),
    ),
    "trainer left": (
        run(trainer(activity="gone", activity_seconds=200.0, host="n8"), searcher()),
        "no_trainer",
        ("on n8 left 3 min ago", "step 12", "--resume"),
    ),
    "trainer was killed": (
        run(trainer(silent_seconds=45.0, host="n8"), searcher()),
        "trainer_silent",
        ("trainer on n8", "45 s", "--resume"),
    ),
    "trainer hangs in a step": (
        run(trainer(), searcher(), last_step_seconds=400.0),
        "trainer_hangs",
        ("step 12", "7 min", "14 s", "py-spy"),
    ),
    "trainer hangs in its first step": (
        new_run(trainer(activity_seconds=2000.0), searcher(), seconds=3000, last_step_seconds=3000.0),
        "trainer_hangs",
        ("step 0", "33 min"),
    ),
    "no memory for a snapshot": (
        run(trainer(activity="publishing", reason="the weights of step 12 wait for memory: 2 GiB are free")),
        "publication",
        ("not published", "2 GiB are free"),
    ),
    "snapshot is written slowly": (run(trainer(activity="publishing")), "publication", ("17 min", "run.dir")),
    "checkpoint is written slowly": (run(trainer(activity="saving")), "checkpoint", ("checkpoint", "run.dir")),
    "old weights, and the newest are not published": (
        starved(waiting(reason="weights v7 are too old for max_staleness 4")),
        "limits",
        ("too old", "buffer.max_staleness"),
    ),
    "batch waits for weights that wait for disk": (
        run(
            trainer(activity="publishing", activity_seconds=40.0, reason="v8 waits for disk space"),
            waiting(reason="weights v7 are too old for max_staleness 0"),
            trainer_waits_for=_LACK,
            trainer_waits_seconds=40.0,
        ),
        "publication",
        ("v8 waits for disk space", *_STARVED_WORDS),
    ),
    "no searcher was ever started": (
        new_run(
            trainer(activity="waiting"), seconds=900, trainer_waits_for="0 of 8 prompts", trainer_waits_seconds=800.0
        ),
        "no_searcher",
        ("no searcher is connected", "tba search"),
    ),
    "the only searcher left": (starved(searcher(activity="gone")), "no_searcher", ("; the only searcher left: start",)),
    "all searchers left": (
        starved(searcher("gpu0", activity="gone"), searcher("gpu1", activity="gone")),
        "no_searcher",
        ("both searchers left", *_STARVED_WORDS),
    ),
    "a searcher is silent": (
        starved(searcher("gpu0"), searcher("gpu3", silent_seconds=94.0, leases=56)),
        "searcher_silent",
        ("searcher gpu3 has been silent for 94 s", "56 prompts", "buffer.lease_seconds", *_STARVED_WORDS),
    ),
    "all searchers are silent": (
        starved(*(searcher(f"gpu{n}", silent_seconds=60.0) for n in range(7))),
        "searcher_silent",
        ("all 7 searchers have been silent", "network"),
    ),
    "many searchers are silent": (
        starved(*(searcher(f"gpu{n}", silent_seconds=60.0 * (n != 0)) for n in range(7))),
        "searcher_silent",
        ("gpu1, gpu2, gpu3 and 3 more",),
    ),
    "the canary refuses": (
        run(trainer(), *(searcher(f"gpu{n}", reason=_CANARY, metrics=_REFUSING) for n in range(7))),
        "weights_refused",
        ("snapshot 812 refused by 7 of 7 searchers", "0.9 on the canary"),
    ),
    "the server restarted after the announcement": (
        run(trainer(weights_version=7), searcher(reason=_CANARY, metrics=_OLD_REFUSED), earlier_version=7),
        "weights_refused",
        ("0.9 on the canary",),
    ),
    "a resumed trainer has not published yet": (
        starved(waiting(reason=_GONE, metrics=_OLD_REFUSED, weights_version=None), earlier_version=7),
        "weights_missing",
        ("waiting for the first snapshot since the trainer's start", "v7 is of an earlier start", *_STARVED_WORDS),
    ),
    "a resumed trainer publishes nothing": (
        run(trainer(), waiting(reason=_GONE, weights_version=None, activity_seconds=700.0), earlier_version=7),
        "weights_missing",
        ("waiting for the first snapshot since the trainer's start", "already deleted"),
    ),
    "one searcher refuses while the trainer waits": (
        starved(searcher("gpu0"), searcher("gpu1", reason=_CANARY, metrics=_REFUSING)),
        "weights_refused",
        ("by 1 of 2 searchers", *_STARVED_WORDS),
    ),
    "no snapshot is published": (
        new_run(
            trainer(),
            waiting(reason="no snapshot is published yet", weights_version=None, activity_seconds=700.0),
            seconds=800,
        ),
        "weights_missing",
        ("gpu0", "the trainer has published no weights in 12 min"),
    ),
    "the first weights do not arrive": (
        run(trainer(), waiting(reason=_FETCH, weights_version=None)),
        "weights_missing",
        ("v7", "silent for 31 s"),
    ),
    "newer weights do not arrive": (
        starved(waiting("gpu0", _FETCH), waiting("gpu1", _FETCH), newest_version=8),
        "weights_old",
        ("both searchers are at v7 and v8 is published", "silent for 31 s", "search.weights_from"),
    ),
    "every reward fails": (
        starved(searcher(), rows_since_step=4096, errors_since_step=4090, common_error="reward: KeyError: 'answer'"),
        "only_errors",
        ("4090 of 4096 trajectories", "KeyError: 'answer'", *_STARVED_WORDS),
    ),
    "spool full of a slow buffer": (
        starved(waiting(reason=_FULL, metrics={"paused": 1.0}), commit_seconds=4.2),
        "spool",
        ("searcher gpu0 is paused", "spool is full", "4.2 s", "disk is slow or busy"),
    ),
    "rewards hang": (
        starved(waiting(metrics={"rewards_waiting": 96.0, "reward_seconds": 10.0, "reward_timeouts": 3.0})),
        "rewards",
        ("96 rewards", "the last one came after 10 s", "3 timeouts", "task.reward_seconds"),
    ),
    "metrics whose sum is not finite": (starved(*(waiting(f"gpu{n}", metrics=_HUGE) for n in range(2))), "rewards", ()),
    "puts get no reply": (
        starved(waiting(metrics={"unacknowledged_groups": 5.0})),
        "unacknowledged",
        ("5 puts of searcher gpu0", "network"),
    ),
    "puts wait for a slow disk": (
        starved(waiting(metrics={"unacknowledged_groups": 1.0}), commit_seconds=9.0),
        "unacknowledged",
        ("1 put of searcher gpu0", "9.0 s"),
    ),
    "both sides wait": (
        starved(waiting("gpu0", _UNDER_WAY), waiting("gpu1", _UNDER_WAY)),
        "limits",
        ("both searchers are waiting", _UNDER_WAY, "buffer.max_staleness", *_STARVED_WORDS),
    ),
    "a limit takes what arrives": (
        starved(searcher(), fruitless_seconds=61.0, fruitless_rows=480, left_sampling={"dedup": 3, "prompt_cap": 477}),
        "no_growth",
        ("480 trajectories arrived in 61 s", "477 left sampling by buffer.prompt_cap", "raise buffer.prompt_cap"),
    ),
    "engines hang": (
        starved(searcher(), last_put_seconds=1800.0, trainer_waits_seconds=1790.0),
        "no_data",
        ("48 responses", "30 min", "search.max_tokens"),
    ),
}

HEALTHY: dict[str, Status] = {
    "training": run(trainer(), searcher()),
    "finished": run(finished=True, uptime_seconds=9000.0),
    "starting": new_run(seconds=30),
    "a resumed run loads its models": run(uptime_seconds=90.0),
    "only the searchers still load": starved(uptime_seconds=90.0),
    "a trainer that left loads its model again": run(
        trainer(activity="gone", activity_seconds=300.0), make_client("monitor", metrics={"trainer": 1.0}), searcher()
    ),
    "searchers that left load their model again": starved(
        searcher(activity="gone"), make_client("monitor", metrics={"search": 1.0})
    ),
    "a supervisor failed and is gone": new_run(failing("x failed", silent_seconds=300.0), seconds=30),
    "searchers ahead": run(trainer(), waiting(reason=_UNDER_WAY)),
    "a short wait for a batch": starved(waiting(reason=_UNDER_WAY), trainer_waits_seconds=2.0),
    "searchers at work for a batch": starved(searcher(), last_put_seconds=100.0),
    "a batch grows slowly": starved(searcher(), fruitless_seconds=50.0, fruitless_rows=480),
    **{
        f"a run with searchers {states} is being stopped": run(
            trainer(activity="gone"),
            *(searcher(f"gpu{n}", activity=state) for n, state in enumerate(states)),
            trainer_waits_for=_LACK,
            trainer_waits_seconds=800.0,
            uptime_seconds=5.0,
        )
        for states in (("gone",), ("gone", "gone"), ("generating",), ("gone", "generating"))
    },
    "one of two searchers crashes": run(trainer(), searcher(), failing("gpu1 failed 2 times: x")),
    "a searcher has only the address of weights that are gone": run(
        waiting(reason=_GONE, metrics=_OLD_REFUSED, weights_version=None), earlier_version=7, uptime_seconds=90.0
    ),
    "a resumed trainer writes its first snapshot": run(
        trainer(weights_version=8), waiting(reason=_GONE, metrics=_OLD_REFUSED, weights_version=None), earlier_version=7
    ),
    "a searcher has not heard of the first snapshot": run(
        trainer(weights_version=8),
        waiting(reason=_GONE, metrics=_OLD_REFUSED, weights_version=None, activity_seconds=30.0),
        earlier_version=7,
        newest_version=8,
    ),
    "a long step of a slow model": run(trainer(), searcher(), last_step_seconds=400.0, usual_step_seconds=60.0),
}


# Of each reason, what every sentence says to do; that of a refused put comes from the server.
REMEDIES = {
    "buffer_refuses": "make room|check that disk",
    "process_fails": "read the logs in run.dir/logs",
    "no_trainer": "start it with `tba train",
    "trainer_silent": "start it again with `tba train --resume`",
    "trainer_hangs": "inspect it with `py-spy dump`",
    "publication": "free some space|check it",
    "checkpoint": "train.checkpoint_every",
    "no_searcher": "start them with `tba search`",
    "searcher_silent": "start it again",
    "weights_refused": "compare the model and the package versions",
    "weights_missing": "read its log|search.weights_from",
    "weights_old": "search.weights_from",
    "only_errors": "`tba task check`|raise search.max_tokens",
    "spool": "check the network|on a faster one",
    "rewards": "raise task.reward_workers",
    "unacknowledged": "check the network|on a faster one",
    "limits": "raise buffer.max_staleness",
    "no_growth": "raise buffer.|set buffer.dedup = false|lower train.prompts_per_step",
    "no_data": "lower search.max_tokens",
}


@pytest.mark.parametrize(("status", "reason", "words"), STALLS.values(), ids=STALLS)
def test_the_sentence_of_a_stall_names_the_culprit_and_the_remedy(status: Status, reason: str, words: tuple[str, ...]):
    # An unanswered buffer is what only the asker can know.
    assert {reason for _, reason, _ in STALLS.values()} == set(STALL_REASONS) - {"buffer_silent"}
    stall = not_none(find_stall(status))
    assert stall.reason == reason, stall.sentence
    assert [word for word in words if word not in stall.sentence] == [], stall.sentence
    assert any(remedy in stall.sentence for remedy in REMEDIES[reason].split("|")), stall.sentence


@pytest.mark.parametrize("status", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_stall(status: Status):
    assert find_stall(status) is None


_SILENT = Stall("searcher_silent", 'searcher "gpu3" has been silent; $(echo unquoted)')
_SLOW = Stall("rewards", "96 rewards")


def test_a_stall_is_logged_once_for_each_reason(caplog):
    clock = ManualClock()
    watch = StallWatch(clock)

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


CUT = "not trained on: cut off after 1 tokens, and task.truncated = mask"
# Rows and errors since the last step, the most common error, and what to do.
ERRORS = [
    (9, 9, CUT, "raise search.max_tokens, or set another task.truncated"),
    (8, 4, CUT, "raise search.max_tokens, or set another task.truncated"),
    (9, 9, f"reward: {CUT}", "`tba task check`"),
    (9, 9, "reward: KeyError: 'answer'", "`tba task check`"),
    (9, 5, "", "`tba task check`"),
    (9, 4, CUT, None),
    (9, 0, "", None),
]


@pytest.mark.parametrize(("rows", "errors", "common", "remedy"), ERRORS)
def test_the_remedy_of_rows_with_errors_depends_on_the_error(rows, errors, common, remedy):
    stall = find_stall(starved(searcher(), rows_since_step=rows, errors_since_step=errors, common_error=common))
    assert (stall is not None and stall.reason == "only_errors") == (remedy is not None)
    assert remedy is None or remedy in not_none(stall).sentence


def test_a_reason_of_characters_that_are_escaped_fits_a_status():
    stall = not_none(find_stall(starved(waiting(reason="\u200b" * 1000, metrics={"paused": 1.0}))))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stall), type=Stall) == stall
