"""Which endpoints only this machine can reach, and which of them need no keys."""

import pytest

from tba.common.wire.socket_files import is_local, is_private


@pytest.mark.parametrize(
    ("address", "local", "private"),
    [
        ("ipc:///tmp/buffer", True, True),
        ("ipc://@abstract", True, False),
        ("tcp://127.0.0.1:5757", True, True),
        ("tcp://127.0.1.1:*", True, True),
        ("tcp://localhost:5757", True, True),
        ("tcp://[::1]:5757", True, True),
        ("tcp://localhost.example.org:5757", False, False),
        ("tcp://[::]:5757", False, False),
        ("tcp://0.0.0.0:5757", False, False),
        ("tcp://*:5757", False, False),
        ("tcp://node1:5757", False, False),
    ],
)
def test_an_abstract_socket_is_local_and_not_private(address, local, private):
    assert (is_local(address), is_private(address)) == (local, private)
