"""SIGKILL of the server at random moments, under load: what was acknowledged is there, once, and nothing is torn."""

import random
import sqlite3
import threading
import time

import pytest

from tba.buffer.check import check
from tba.common import wire
from tba.common.client import BufferClient
from tba.common.errors import BufferUnavailable

from .load import GROUP, Producers, prepare

KILLS = 50
PRODUCERS = 8
SEED = 20_261_121


class FakeTrainer(threading.Thread):
    """Samples a batch, asks for it again, reports it, over and over: steps must come out whole and once."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.stopping = threading.Event()
        self.batches: dict[int, list[int]] = {}
        self.changed: list[int] = []  # steps whose batch was another one when it was asked for again
        self.reported = 0

    def run(self) -> None:
        client = BufferClient(self._address, role="trainer", name="trainer")
        while not self.stopping.is_set():
            try:
                self._step(client)
            except BufferUnavailable:
                break
        client.close()

    def _step(self, client: BufferClient) -> None:
        step = self.reported
        for _ in range(2):
            message = wire.SampleBatch(step=step, prompts=8, samples=4, reference="r", wait_seconds=1.0)
            reply, _frames = client.ask(message, wire.Message, self.stopping.is_set)
            if not isinstance(reply, wire.Batch):
                return
            if self.batches.setdefault(step, reply.trajectory_ids) != reply.trajectory_ids:
                self.changed.append(step)
        ids = self.batches[step]
        report = wire.ReportStep(
            step=step, metrics={"loss": 1.0}, reference="r", trajectory_ids=ids, reference_logprobs=[0.0] * len(ids)
        )
        client.ask(report, wire.Done, self.stopping.is_set)
        self.reported += 1


@pytest.fixture
def producers(run_config, tmp_path):
    made = Producers(run_config.address, tmp_path)
    yield made
    made.end()


def status_of(run_config) -> wire.Status:
    client = BufferClient(run_config.address, role="monitor", name="test")
    try:
        return client.call(wire.GetStatus(), wire.Status, deadline_seconds=30)[0]
    finally:
        client.close()


@pytest.mark.timeout(600)
def test_fifty_kills_of_the_server_lose_nothing_and_double_nothing(run_config, start_tba, producers):
    server = start_tba("buffer", "serve", "--config", run_config.file)
    prepare(run_config.address)
    producers.start(PRODUCERS)
    trainer = FakeTrainer(run_config.address)
    trainer.start()
    rng = random.Random(SEED)
    for kill in range(KILLS):
        status_of(run_config)
        time.sleep(rng.uniform(0.02, 0.4))
        if kill % 10 == 5:
            producers.kill_one()
        server.kill()
        server.wait()
        server = start_tba("buffer", "serve", "--config", run_config.file)
    producers.finish(seconds=90)
    trainer.stopping.set()
    trainer.join(30)
    check_rows(run_config, producers)
    check_steps(run_config, trainer)
    check_statistics(run_config, server, start_tba)


def query(run_config, sql: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run_config.database}?mode=ro", uri=True) as database:
        return database.execute(sql).fetchall()


def check_rows(run_config, producers: Producers) -> None:
    """Every acknowledged row is there once; every put is there whole; some were put twice, and known."""
    assert query(run_config, "PRAGMA integrity_check") == [("ok",)]
    assert [fault for fault in check(run_config.database) if fault["result"] == "fail"] == []
    rows = query(run_config, "SELECT s.sender, t.sequence FROM trajectory_rows t JOIN senders s ON s.id = t.sender")
    acknowledged = producers.acknowledged()
    assert len(acknowledged) > KILLS * PRODUCERS
    assert acknowledged <= set(rows)
    assert len(rows) == len(set(rows))
    groups = query(run_config, f"SELECT COUNT(*) FROM trajectory_rows GROUP BY sender, sequence / {GROUP}")
    assert set(groups) == {(GROUP,)}
    assert query(run_config, "SELECT COUNT(*) FROM payloads") == [(len(rows),)]
    assert producers.duplicates() > 0, "no kill fell between a commit and its acknowledgement: kill more often"


def check_steps(run_config, trainer: FakeTrainer) -> None:
    """A batch that was handed out stays what it was, and every reported step is on record once."""
    assert trainer.changed == []
    assert trainer.reported > 10
    recorded: dict[int, list[int]] = {}
    for step, trajectory in query(run_config, "SELECT step, trajectory FROM consumption_rows ORDER BY step, slot"):
        recorded.setdefault(step, []).append(trajectory)
    assert {step: recorded[step] for step in trainer.batches} == trainer.batches
    trained = query(run_config, "SELECT step FROM batches WHERE trained_at IS NOT NULL ORDER BY step")
    assert trained[: trainer.reported] == [(step,) for step in range(trainer.reported)]


def check_statistics(run_config, server, start_tba) -> None:
    """What the server counts is what the file holds, and what a new start counts."""
    before = status_of(run_config)
    assert before.trajectories == query(run_config, "SELECT COUNT(*) FROM trajectory_rows")[0][0]
    server.terminate()
    assert server.wait(30) == 0
    start_tba("buffer", "serve", "--config", run_config.file)
    after = status_of(run_config)
    assert (after.trajectories, after.sampleable, after.step) == (before.trajectories, before.sampleable, before.step)
