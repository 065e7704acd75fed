"""Files that are opened where anything may have been put: a FIFO has no process wait for it."""

import contextlib
import os
import threading

import pytest

from tba.common.errors import TbaError
from tba.common.evaluations import record_evaluations
from tba.common.system.durable import exclusive_lock, open_regular, sync, write_text
from tba.common.weights.delta import unpack_delta
from tba.common.weights.model_files import weights_digest
from tba.common.weights.node_store import VERIFIED, is_verified
from tba.common.weights.tensor_file import blake3_of, read_layout
from tba.common.wire.keys import OWN, own_pair, read_authorized
from tba.deploy.child import Child
from tba.deploy.run_directory import last_launch
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.model.adapters import base_digest


def lock(path) -> None:
    with exclusive_lock(path, "taken"):
        pass


# A file, and what opens it.
OPENED = {
    "lock": lambda folder: lock(folder / "lock"),
    ".eval.jsonl.lock": lambda folder: record_evaluations(folder, []),
    "eval.jsonl": lambda folder: record_evaluations(folder, []),
    ".text.PID.tmp": lambda folder: write_text(folder / "text", "content"),
    "launcher.lock": last_launch,
    "trainer.log": lambda folder: Child("trainer", "trainer", [], folder / "trainer.log").open_log(),
    "metrics.jsonl": lambda folder: MetricsLog(folder, first_step=0).close(),
    OWN: own_pair,
    "node1.pub": read_authorized,
    VERIFIED: lambda folder: is_verified(folder, ""),
    "model.safetensors": weights_digest,
    "base.safetensors": base_digest,
    "delta": lambda folder: unpack_delta(folder / "delta", folder / "unpacked", 1),
    "hashed": lambda folder: blake3_of(folder / "hashed"),
    "mapped": lambda folder: read_layout(folder / "mapped"),
    "synced": lambda folder: sync(folder / "synced"),
    "appended": lambda folder: open_regular(folder / "appended", "ab"),
}


@pytest.mark.parametrize(("name", "use"), OPENED.items(), ids=OPENED)
def test_a_fifo_in_the_place_of_a_file_is_refused_or_left_alone(tmp_path, name, use):
    def open_it() -> None:
        with contextlib.suppress(OSError, TbaError):
            use(tmp_path)

    name = name.replace("PID", str(os.getpid()))
    os.mkfifo(tmp_path / name)
    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(10)
    waits = thread.is_alive()
    if waits:
        # Both ends, so that it waits no longer.
        os.close(os.open(tmp_path / name, os.O_RDWR))
    assert not waits
