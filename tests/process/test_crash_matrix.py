"""SIGKILL at random moments under load: every acknowledged row is stored once, and all else is consistent with it."""

import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.config import Config
from tba.common.errors import BufferUnavailable
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.faults import assert_all_is_stored_once, producing
from tba.tests.helpers.puts import connected
from tba.tests.runner import size

KILLS = size(12, 50)


class Trainer(threading.Thread):
    """Requests batches and reports steps without pause. An earlier step must return the same batch again."""

    def __init__(self, address: str) -> None:
        super().__init__(name="trainer", daemon=True)
        self.batches: dict[int, list[int]] = {}
        self.reported: set[int] = set()
        self.repeated = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._address = address

    def run(self) -> None:
        client = BufferClient(self._address, role="trainer", name="trainer")
        try:
            while not self.stopping.is_set():
                self._train_a_step(client, random.Random(len(self.batches)))
        except BufferUnavailable:
            pass
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        finally:
            client.close()

    def _train_a_step(self, client: BufferClient, rng: random.Random) -> None:
        step = len(self.batches)
        if step and rng.random() < 0.3:
            earlier = rng.randrange(step)
            assert self._sample(client, earlier) == self.batches[earlier], f"batch {earlier} changed"
            self.repeated += 1
        if (ids := self._sample(client, step)) is None:
            return
        self.batches[step] = ids
        report = messages.ReportStep(
            step=step, metrics={}, reference="r", trajectory_ids=ids[:2], reference_logprobs=[-1.0] * 2
        )
        client.call(report, messages.Done, stop=self.stopping.is_set)
        self.reported.add(step)
        self.stopping.wait(0.02)

    def _sample(self, client: BufferClient, step: int) -> list[int] | None:
        message = messages.SampleBatch(step=step, prompts=1, samples=4, reference="r", wait_seconds=0.1)
        request = client.post(message)
        while not self.stopping.is_set():
            for reply in client.poll(0.1):
                if reply.header.id == request:
                    return reply.message.trajectory_ids if isinstance(reply.message, messages.Batch) else None
        raise BufferUnavailable("stopped")


@pytest.fixture
def trainer(run_config):
    trainer = Trainer(run_config.address)
    yield trainer
    trainer.stopping.set()
    if trainer.is_alive():
        trainer.join(60)


def wait_until_it_serves(address: str) -> Status:
    with connected(address) as client:
        return client.call(GetStatus(), Status, deadline_seconds=120)[0]


def test_acknowledged_rows_survive_kills_and_are_stored_once(start_tba, run_config, trainer):
    seed = int(os.environ.get("TBA_SEED", "0"))
    # Shown if the test fails.
    print(f"TBA_SEED={seed}")
    rng = random.Random(seed)
    server = start_tba("buffer", "serve", "--config", run_config.file)
    with producing(run_config.address, 4, tokens=64) as producers:
        trainer.start()
        for _ in range(KILLS):
            # Sometimes the kill comes while the server opens the database.
            if rng.random() < 0.15:
                time.sleep(rng.uniform(0.3, 0.8))
            else:
                wait_until_it_serves(run_config.address)
                time.sleep(rng.uniform(0.1, 0.6))
            server.send_signal(signal.SIGKILL)
            server.wait()
            server = start_tba("buffer", "serve", "--config", run_config.file)
        for producer in producers:
            producer.wait_until_all_is_answered(60)
    trainer.stopping.set()
    trainer.join(60)
    assert trainer.failure is None
    status = wait_until_it_serves(run_config.address)
    server.terminate()
    assert server.wait(60) == 0
    assert_all_is_stored_once(run_config.database, producers)
    assert sum(producer.posted for producer in producers) > 10 * KILLS
    assert sum(producer.duplicates for producer in producers) > 0, "no kill came between a commit and its reply"
    check_training(run_config.database, trainer)
    check_status(run_config.database, status)


def check_training(database: Path, trainer: Trainer) -> None:
    """Check that the recorded batches are those handed out, and that reported steps are recorded."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for step, ids in trainer.batches.items():
            rows = connection.execute("SELECT trajectory FROM consumption WHERE step = ? ORDER BY slot", (step,))
            assert [row[0] for row in rows] == ids
        trained = {row[0] for row in connection.execute("SELECT step FROM batches WHERE trained_at IS NOT NULL")}
        half = connection.execute(
            "SELECT COUNT(*) FROM batches b WHERE b.prompts * b.samples != "
            "(SELECT COUNT(*) FROM consumption_rows c WHERE c.batch = b.id)"
        ).fetchone()
    assert trainer.reported <= trained
    assert half == (0,)
    assert trainer.repeated > 0
    print(f"{len(trainer.batches)} batches, {trainer.repeated} repeated")


def check_status(database: Path, status: Status) -> None:
    """Check that a new server counts what the last one counted."""
    store = Store(database, durability="process")
    try:
        config = Config.model_validate({"train": {"prompts_per_step": 1}})
        run = store.open_run("test", seed=0, config={}, software={})
        rebuilt = BufferService(store, run, config, ManualClock()).status()
        rows, errors = store.trajectories.counts(run)
    finally:
        store.close()
    counts = ("trajectories", "errors", "sampleable", "step", "epoch", "prompts")
    assert {name: getattr(status, name) for name in counts} == {name: getattr(rebuilt, name) for name in counts}
    assert (status.trajectories, status.errors) == (rows, errors)
    # A client that stops does not wait for its last reply.
    assert status.rejected.keys() <= {"undeliverable"}
