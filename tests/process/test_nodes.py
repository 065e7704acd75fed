"""A trainer's server and four nodes, each in a network namespace: what each sends when all fetch a snapshot at once."""

import json
import subprocess
from pathlib import Path

import pytest

from tba.buffer.service.clients import Clients
from tba.common.clock import SystemClock
from tba.tests.helpers.namespaces import inside, namespaces
from tba.tests.runner import size

NODES = 4
# Weights of 8 or 32 MiB.
ELEMENTS = size(4 << 20, 16 << 20)
TRAINER = """
import json, sys
import msgspec
from pathlib import Path
from tba.tests.helpers.weights import CountingServer, RandomWeights

directory = Path(sys.argv[1])
server = CountingServer(sys.argv[2], directory)
weights = RandomWeights(directory, elements=int(sys.argv[3]), address=server.address)
print(msgspec.json.encode(weights.full()).decode(), flush=True)
input()
print(json.dumps(server.served), flush=True)
server.close()
"""
# Its server counts what it sends, and ends the process after a number of chunks of weights (0: never).
NODE = """
import json, os, sys
import msgspec
from pathlib import Path
from tba.common.clock import SystemClock
from tba.common.weights.snapshot_server import NodeServer
from tba.common.wire.messages import WeightsRef
from tba.searcher.weights.assembly import SnapshotAssembler

directory, endpoint, sources, dies_after = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
sent = []

class Counting(NodeServer):
    def _chunk(self, reader, request):
        size, data = super()._chunk(reader, request)
        if request.file.endswith(".safetensors"):
            sent.append(len(data))
            if dies_after and len(sent) > dies_after:
                os._exit(9)
        return size, data

directory.mkdir()
server = Counting(endpoint, directory)
assembler = SnapshotAssembler(directory, "trainer", SystemClock())
print("ready", flush=True)
ref = msgspec.json.decode(input(), type=WeightsRef)
found, pinned = assembler.assemble(ref, nodes=sources)
print(str(found.weight_files[0]), flush=True)
input()
print(sum(sent), flush=True)
server.close()
"""


@pytest.fixture
def network():
    """Namespaces on one bridge, the trainer's first: their names. Host i has the address 10.77.0.(i + 1)."""
    with namespaces(NODES + 1) as names:
        yield names


@pytest.fixture
def start(network, start_script):
    """Starts a script in a namespace."""

    def start(host: int, script: str, *arguments: str) -> subprocess.Popen[str]:
        return start_script(script, *arguments, inside=inside(network[host]))

    return start


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tree() -> list[tuple[str, list[str]]]:
    """The address of each node and its sources, as the buffer knows them."""
    clients, addresses = Clients(SystemClock(), 60.0), [f"tcp://10.77.0.{n + 2}:5759" for n in range(NODES)]
    for number, address in enumerate(addresses):
        clients.mark_seen(f"node{number}.1", "searcher")
        clients[f"node{number}.1"].serves = address
    return [(address, clients.sources_of(address)) for address in addresses]


@pytest.mark.parametrize("killed", [None, 1], ids=["all live", "one dies while it sends"])
def test_the_trainer_sends_a_snapshot_about_once_however_many_nodes_fetch_it(start, tmp_path, killed):
    trainer = start(0, TRAINER, str(tmp_path / "trainer"), "tcp://10.77.0.1:5758", str(ELEMENTS))
    ref = hear(trainer)
    nodes = [
        start(
            number + 1, NODE, str(tmp_path / f"node{number}"), address, json.dumps(sources),
            "3" if number == killed else "0",
        )
        for number, (address, sources) in enumerate(tree())
    ]  # fmt: skip
    assert [hear(node) for node in nodes] == ["ready"] * NODES
    for node in nodes:
        tell(node, ref)
    found = {number: hear(node) for number, node in enumerate(nodes) if number != killed}
    truth = (Path(json.loads(ref)["path"]) / "model.safetensors").read_bytes()
    assert all(Path(path).read_bytes() == truth for path in found.values())
    tell(trainer)
    served = json.loads(hear(trainer))["model.safetensors"]
    assert len(truth) <= served <= 2 * len(truth)
    if killed is not None:
        assert nodes[killed].wait() == 9
        return
    for node in nodes:
        tell(node)
    sent = [int(hear(node)) for node in nodes]
    # Node 0 has two to send to, node 1 one.
    assert served + sum(sent) >= NODES * len(truth)
    assert max(sent) <= 3 * len(truth)
