"""Binding an address: by one server at a time, and without replacing existing files."""

import fcntl
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from tba.common.errors import AddressInUse, ConfigError
from tba.common.wire.channels import ServerChannel
from tba.common.wire.socket_files import make_socket_directory, socket_of


def outcome(address: str, all_ready: threading.Barrier, all_tried: threading.Barrier) -> str:
    all_ready.wait()
    try:
        channel = ServerChannel(address)
    except AddressInUse:
        all_tried.wait()
        return "in use"
    all_tried.wait()
    channel.close()
    return "bound"


def test_one_of_several_servers_that_start_together_gets_the_socket_file(tmp_path):
    count, outcomes = 8, []
    barriers = threading.Barrier(count), threading.Barrier(count)
    threads = [
        threading.Thread(target=lambda: outcomes.append(outcome(f"ipc://{tmp_path}/socket", *barriers)))
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["bound", *["in use"] * (count - 1)]


def test_a_server_with_a_full_backlog_keeps_its_socket_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as stuck, socket.socket(socket.AF_UNIX) as waiting:
        stuck.bind(f"{tmp_path}/socket")
        stuck.listen(0)
        waiting.connect(f"{tmp_path}/socket")
        with pytest.raises(AddressInUse, match=f"buffer.address ipc://{tmp_path}/socket is in use"):
            ServerChannel(f"ipc://{tmp_path}/socket")
        assert Path(tmp_path, "socket").is_socket()


def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path):
    precious = tmp_path / "buffer.sqlite"
    precious.write_text("rows")
    with pytest.raises(ConfigError, match="the file is no socket"):
        ServerChannel(f"ipc://{precious}")
    assert precious.read_text() == "rows"


@pytest.mark.parametrize("path", ["nowhere/socket", "x" * 200])
def test_a_socket_file_that_cannot_be_created_is_a_configuration_error(tmp_path, path):
    with pytest.raises(ConfigError, match="cannot be bound"):
        ServerChannel(f"ipc://{tmp_path}/{path}")


def test_addresses_without_a_file_are_bound():
    for address in ("ipc://*", "ipc://@tba-test-channels", "ipc://@tba-test/channels", "tcp://127.0.0.1:*"):
        ServerChannel(address).close()


@pytest.mark.parametrize("name", ["@socket", "*socket"])
def test_a_socket_file_is_kept_if_its_name_begins_with_a_wildcard(tmp_path, name):
    first = ServerChannel(f"ipc://{tmp_path}/{name}")
    with pytest.raises(AddressInUse):
        ServerChannel(f"ipc://{tmp_path}/{name}")
    first.close()


@pytest.fixture
def held():
    """Lock directories, as any program that may read them can."""
    held = []

    def hold(directory: Path):
        held.append(os.open(directory, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_SH)

    yield hold
    for descriptor in held:
        os.close(descriptor)


def test_a_directory_locked_by_another_program_is_an_address_in_use(tmp_path, held, monkeypatch):
    monkeypatch.setattr("tba.common.wire.socket_files._LOCK_SECONDS", 0.05)
    held(tmp_path)
    with pytest.raises(AddressInUse, match=f"ipc://{tmp_path}/socket cannot be bound: another program keeps a lock"):
        ServerChannel(f"ipc://{tmp_path}/socket")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed_folder():
    """A directory that its user may enter and write to but not read. Root may read all, so it becomes another user."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o300)
    yield folder
    os.seteuid(user)
    shutil.rmtree(folder)


def test_an_unreadable_directory_can_hold_a_socket_file(closed_folder):
    with pytest.raises(PermissionError):
        os.listdir(closed_folder)
    first = ServerChannel(f"ipc://{closed_folder}/socket")
    with pytest.raises(AddressInUse, match="is in use"):
        ServerChannel(f"ipc://{closed_folder}/socket")
    first.close()


def test_the_socket_of_a_run_is_in_its_directory_or_in_memory_if_the_path_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.common.wire.socket_files._MEMORY", tmp_path)
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert socket_of(Path("/runs/demo")) == Path("/runs/demo/buffer.socket")
    short = socket_of(Path("/runs", "x" * 100))
    assert short.parent == tmp_path / "tba-7"
    assert short != socket_of(Path("/runs", "y" * 100))


def test_a_socket_directory_in_memory_that_others_can_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tba.common.wire.socket_files._MEMORY", tmp_path)
    address = f"ipc://{tmp_path}/tba-7/x.socket"
    make_socket_directory(address)
    (tmp_path / "tba-7").chmod(0o755)
    with pytest.raises(ConfigError, match="other users have access"):
        make_socket_directory(address)
