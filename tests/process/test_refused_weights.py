"""A searcher of another run, and one that gets snapshots it must not serve; tests/vllm has the engines."""

from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import arithmetic, changed


def test_a_searcher_continues_with_the_old_weights_and_loads_the_next_good_ones(
    make_config, serve_weights, start_tba, tba_here
):
    run = make_config(**arithmetic(train={"prompts_per_step": 1}))
    announcer = serve_weights(run)
    other = tba_here("search", "--config", run.file, *changed("run.name=other"))
    assert (other.exit_code, "belongs to run test, and run.name is other" in other.message) == (78, True)
    start_tba("search", "--config", run.file)
    announcer.wait_for(lambda s: s.weights_version == 0 and s.trajectories > 0)
    announcer.announce(1, flip_a_byte=True)
    check_refused(announcer, 1)
    announcer.announce(2, canary_error=0.5)
    later = check_refused(announcer, 2)
    announcer.announce(3)
    announcer.wait_for(lambda s: s.weights_version == 3 and s.trajectories > later.trajectories + 50)


def check_refused(announcer, version: int):
    """Wait until a version is refused and said to be, and check that generation goes on with version 0."""
    refused = announcer.wait_for(lambda s: s.metrics.get("weights_refusals", 0) >= version)
    names = (f"v0000000{version}", f"v{version}")
    later = announcer.wait_for(
        lambda s: s.trajectories > refused.trajectories + 50 and any(name in s.reason for name in names)
    )
    assert later.weights_version == 0
    # A machine with much to do sends heartbeats late, and the searcher is then said to be silent for a moment.
    wait_until(lambda: is_said_to_refuse(announcer.status()), 120, "the buffer says that the searcher refuses weights")
    return later


def is_said_to_refuse(status) -> bool:
    stall = status.stall
    return stall is not None and stall.reason == "weights_refused" and "by 1 of 1 searcher" in stall.sentence
