"""The curriculum of a real server that is killed within an epoch."""

import signal
from pathlib import Path

import pytest

from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.puts import connected, make_trajectory, prepare, put_message

PROMPTS, ANSWERS = 12, 4
CURRICULUM = {"solved": 0.75, "unsolved_last": True, "answers": ANSWERS, "revisit_every": 1000}
# How many of the answers to these prompts pass; two of the others.
PASSES = {"p1": 4, "p2": 3, "p3": 4, "p5": 0, "p6": 0}
EPOCHS = PROMPTS + 2 * (PROMPTS - 3)


def visit(client: BufferClient, sequence: int) -> str:
    """Lease a prompt, and answer it. Returns its key."""
    lease = messages.LeasePrompts(want=1, held=[], weights_version=0, wait_seconds=60.0)
    leases, _ = client.call(lease, messages.Leases, deadline_seconds=120.0)
    (granted,) = leases.visits
    passes = PASSES.get(granted.prompt_key, 2)
    rows = [
        make_trajectory(granted.prompt_key, granted.lease, tokens=[sequence + n], reward=float(n < passes))
        for n in range(ANSWERS)
    ]
    posted = client.post(*put_message(rows, sequence))
    while not any(reply.header.id == posted for reply in client.poll(1.0)):
        pass
    return granted.prompt_key


@pytest.fixture
def epochs_of(make_config_in, start_tba, tmp_path: Path):
    """Return a function that visits the prompts of three epochs, and kills the server after some of the visits."""

    def run(name: str, kills: tuple[int, ...]) -> tuple[list[str], Status]:
        folder = tmp_path / name
        folder.mkdir()
        config = make_config_in(folder, train={"prompts_per_step": 1}, curriculum=CURRICULUM)
        serve = "buffer", "serve", "--config", config.file
        server, keys = start_tba(*serve), []
        with connected(config.address, "searcher") as client:
            prepare(client, prompts=PROMPTS)
            for number in range(EPOCHS):
                if number in kills:
                    server.send_signal(signal.SIGKILL)
                    server.wait()
                    server = start_tba(*serve)
                keys.append(visit(client, number * ANSWERS))
        with connected(config.address) as client:
            return keys, client.call(GetStatus(), Status, deadline_seconds=120.0)[0]

    return run


@pytest.mark.slow
def test_a_server_that_is_killed_within_epochs_hands_out_the_prompts_in_the_same_order(epochs_of):
    whole, status = epochs_of("whole", ())
    assert (status.epoch, status.skipped_prompts, status.postponed_prompts) == (2, 3, 2)
    assert {"p1", "p2", "p3"}.isdisjoint(whole[PROMPTS:])
    assert {*whole[PROMPTS + 7 : PROMPTS + 9]} == {*whole[-2:]} == {"p5", "p6"}
    # Within the first epoch, at the beginning of the second, within it, and within the third.
    assert epochs_of("killed", (5, PROMPTS, PROMPTS + 4, PROMPTS + 15))[0] == whole
