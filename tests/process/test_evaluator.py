"""`tba search --eval` next to a run: what it evaluates, and that the run does not notice it."""

import pytest

from tba.common.evaluations import read_json_lines
from tba.common.wire import messages
from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.puts import connected
from tba.tests.process.conftest import arithmetic

pytestmark = [pytest.mark.torch]
_SECONDS = 300


def test_kept_snapshots_are_evaluated_while_the_run_goes_on_and_training_is_not_touched(
    make_config, serve_weights, start_tba
):
    run = make_config(
        **arithmetic(
            task={"held_out_limit": 8},
            train={"steps": 8, "keep_snapshot_every": 4},
            eval={"samples": 2, "kl": True, "embedder": str(EXAMPLE_MODEL)},
        )
    )
    announcer = serve_weights(run)
    announcer.announce(3)
    evaluator = start_tba("search", "--config", run.file, "--eval", "--cpu", "1")
    evaluations = run.directory / "eval.jsonl"
    wait_until(lambda: [row["version"] for row in read_json_lines(evaluations)] == [0], what="v0 is evaluated")
    announcer.announce(8)
    wait_until(lambda: [row["version"] for row in read_json_lines(evaluations)] == [0, 8], what="v8 is evaluated")

    status = announcer.status()
    (client,) = [client for client in status.clients if client.role == "evaluator"]
    assert (client.leases, client.trajectories) == (0, 0)
    assert (status.trajectories, status.prompts) == (0, 0), "it registers and delivers nothing"

    with connected(run.address, "trainer") as trainer:
        trainer.call(messages.FinishRun(step=8), messages.Done, deadline_seconds=60)
    assert evaluator.wait(_SECONDS) == 0, "it leaves a finished run"
    query = "SELECT version, step, held_out_prompts, kl FROM evaluations ORDER BY version"
    rows = run.query(query)
    assert [row[:3] for row in rows] == [(0, 0, 8), (8, 8, 8)]
    # Every snapshot is the reference itself.
    assert all(abs(kl) < 1e-3 for *_, kl in rows)
    first, second = read_json_lines(evaluations)
    assert first["embedding_distance"] == second["embedding_distance"]
    assert 0 < first["embedding_distance"] <= 2
