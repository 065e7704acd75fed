"""A trainer's server and four nodes, each with its own server: what each sends when all fetch a snapshot at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tba.buffer.service.clients import Clients
from tba.common.clock import SystemClock
from tba.common.weights.snapshot_server import NodeServer
from tba.common.wire.messages import FetchChunk, WeightsRef
from tba.searcher.weights.assembly import SnapshotAssembler
from tba.tests.helpers.weights import WEIGHTS, CountingServer, RandomWeights
from tba.tests.runner import size

NODES = 4
# Weights of 8 or 32 MiB.
ELEMENTS = size(4 << 20, 16 << 20)


class Node(NodeServer):
    """A node, which counts the bytes of weights that it sends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.assembler = SnapshotAssembler(directory, "trainer", SystemClock())
        self.sent = 0
        self.has_sent = threading.Event()
        super().__init__("tcp://127.0.0.1:*", directory)

    def _chunk(self, reader: bytes, asked: FetchChunk) -> tuple[int, bytes]:
        found, data = super()._chunk(reader, asked)
        if asked.file == WEIGHTS:
            self.sent += len(data)
            self.has_sent.set()
        return found, data

    def fetch(self, ref: WeightsRef, sources: list[str]) -> bytes:
        found, _ = self.assembler.assemble(ref, nodes=sources)
        return found.weight_files[0].read_bytes()


@pytest.fixture
def nodes(tmp_path):
    nodes = [Node(tmp_path / f"node{number}") for number in range(NODES)]
    yield nodes
    for node in nodes:
        node.close()


def sources_of(nodes: list[Node]) -> list[list[str]]:
    """The sources of each node, as the buffer knows them."""
    clients: Any = Clients(SystemClock(), 60.0)
    for number, node in enumerate(nodes):
        clients.mark_seen(f"node{number}.1", "searcher")
        clients[f"node{number}.1"].serves = node.address
    return [clients.sources_of(node.address) for node in nodes]


@pytest.mark.parametrize("one_ends", [False, True], ids=["all live", "one ends while it sends"])
def test_the_trainer_sends_a_snapshot_about_once_however_many_nodes_fetch_it(nodes, tmp_path, one_ends):
    trainer = CountingServer("tcp://127.0.0.1:*", tmp_path / "trainer")
    weights = RandomWeights(tmp_path / "trainer", elements=ELEMENTS, address=trainer.address)
    ref = weights.full()
    with ThreadPoolExecutor(NODES) as pool:
        fetching = [pool.submit(node.fetch, ref, own) for node, own in zip(nodes, sources_of(nodes), strict=True)]
        if one_ends:
            assert nodes[1].has_sent.wait(60)
            nodes[1].close()
        assert all(one.result() == weights.truth[0] for one in fetching)
    served, whole = trainer.served[WEIGHTS], len(weights.truth[0])
    trainer.close()
    assert whole <= served <= 2 * whole
    if not one_ends:
        sent = [node.sent for node in nodes]
        # Node 0 has two to send to, node 1 one.
        assert served + sum(sent) >= NODES * whole
        assert max(sent) <= 3 * whole
