"""SIGKILL at random moments under load: every acknowledged row is stored once, and all else is consistent with it."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tba.buffer.service.service import BufferService
from tba.buffer.store.store import Store
from tba.common.config import Config
from tba.common.errors import BufferUnavailable
from tba.common.wire import messages
from tba.common.wire.client import BufferClient
from tba.common.wire.messages import GetStatus, Status
from tba.tests.helpers.clock import ManualClock
from tba.tests.helpers.producers import PROMPTS, episode_of, tokens_of
from tba.tests.helpers.puts import connected, prepare
from tba.tests.process.conftest import clean_environment
from tba.tests.runner import size

KILLS = size(12, 50)
# Producers per process. The last process is itself killed now and then.
PRODUCERS = (3, 3, 2)
TOKENS = 64


class Load:
    """The producer processes of a test, and their ledger."""

    def __init__(self, address: str, ledger: Path, output: Path) -> None:
        self.ledger = ledger
        self._address = address
        self._output = output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, producers: int) -> None:
        program = Path(__file__).parents[1] / "helpers/producers.py"
        command = [sys.executable, str(program), self._address, str(self.ledger)]
        with self._output.open("ab") as output:
            self._processes[number] = subprocess.Popen(
                [*command, str(producers), "50", str(TOKENS)], env=clean_environment(), stdout=output, stderr=output
            )

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def drain(self, timeout: float) -> list[int]:
        """Stop the producers once all their puts are acknowledged. Returns their exit codes."""
        for process in self._processes.values():
            process.terminate()
        return [process.wait(timeout) for process in self._processes.values()]

    def end(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def acknowledged(self) -> list[tuple[str, int, int, int, int]]:
        """Return (sender, first sequence, rows, stored, duplicates) of each acknowledgement."""
        rows = [line.split() for line in self.ledger.read_text().splitlines()]
        return [(row[0], int(row[1]), int(row[2]), int(row[3]), int(row[4])) for row in rows]


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
        message = messages.SampleBatch(step=step, prompts=4, samples=4, reference="r", wait_seconds=0.1)
        request = client.post(message)
        while not self.stopping.is_set():
            for reply in client.poll(0.1):
                if reply.header.id == request:
                    return reply.message.trajectory_ids if isinstance(reply.message, messages.Batch) else None
        raise BufferUnavailable("stopped")


@pytest.fixture
def load(run_config, tmp_path):
    load = Load(run_config.address, tmp_path / "ledger", tmp_path / "load.log")
    yield load
    load.end()


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


def test_acknowledged_rows_survive_kills_and_are_stored_once(start_tba, run_config, load, trainer):
    seed = int(os.environ.get("TBA_SEED", "0"))
    # Shown if the test fails.
    print(f"TBA_SEED={seed}")
    rng = random.Random(seed)
    server = start_tba("buffer", "serve", "--config", run_config.file)
    with connected(run_config.address, "searcher") as client:
        prepare(client, PROMPTS)
    for number, producers in enumerate(PRODUCERS):
        load.start(number, producers)
    trainer.start()
    for kill in range(KILLS):
        # Sometimes the kill comes while the server opens the database.
        if rng.random() < 0.15:
            time.sleep(rng.uniform(0.3, 0.8))
        else:
            wait_until_it_serves(run_config.address)
            time.sleep(rng.uniform(0.1, 0.6))
        if kill % 10 == 5:
            load.kill(2)
            load.start(2, PRODUCERS[2])
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = start_tba("buffer", "serve", "--config", run_config.file)
    assert load.drain(60) == [0, 0, 0], "a producer received an unexpected reply"
    trainer.stopping.set()
    trainer.join(60)
    assert trainer.failure is None
    status = wait_until_it_serves(run_config.address)
    server.terminate()
    assert server.wait(60) == 0
    check_rows(run_config.database, load)
    check_training(run_config.database, trainer)
    check_status(run_config.database, status)


def check_rows(database: Path, load: Load) -> None:
    """Check that every acknowledged row is stored once, with its sender's tokens."""
    acks = load.acknowledged()
    acknowledged = {(sender, first + k) for sender, first, rows, _, _ in acks for k in range(rows)}
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        stored = connection.execute(
            "SELECT s.sender, t.sequence, p.response_ids, t.turns, p.segments FROM trajectory_rows t "
            "JOIN senders s ON s.id = t.sender LEFT JOIN payloads p ON p.trajectory = t.id"
        ).fetchall()
        assert connection.execute("SELECT COUNT(*) FROM payloads").fetchone() == (len(stored),)
        done, with_rows = (
            {row[0] for row in connection.execute(query)}
            for query in (
                "SELECT id FROM visits WHERE done_at IS NOT NULL",
                "SELECT DISTINCT visit FROM trajectory_rows",
            )
        )
    times = Counter((sender, sequence) for sender, sequence, *_ in stored)
    assert max(times.values()) == 1
    assert acknowledged <= set(times), f"{len(acknowledged - set(times))} acknowledged rows are lost"
    for sender, sequence, response, turns, segments in stored:
        assert np.array_equal(np.frombuffer(response, "<i4"), tokens_of(sender, sequence, TOKENS))
        episode = episode_of(sequence, TOKENS)
        assert json.loads(turns) == episode.get("turns", [])
        assert np.frombuffer(segments, "<i4").tolist() == list(episode.get("segments", []))
    assert done == with_rows, "a visit is closed by the transaction with its rows"
    assert len(acks) > 10 * KILLS
    assert sum(duplicates for *_, duplicates in acks) > 0, "no kill came between a commit and its acknowledgement"
    print(f"{len(acks)} acks, {len(stored)} rows, {sum(d for *_, d in acks)} repeated")


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
