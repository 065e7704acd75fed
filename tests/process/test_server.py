"""A real buffer server process with real sockets: restarts, kills and a second server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tba.common.wire import messages
from tba.tests.helpers.puts import connected, prepare, put_message, status_of


@pytest.fixture
def server(start_tba, run_config):
    """A running server."""
    process = start_tba("buffer", "serve", "--config", run_config.file)
    status_of(run_config.address)
    return process


def put_of(trajectory, count: int, first: int):
    return put_message([trajectory(tokens=[first + k]) for k in range(count)], first)


def test_a_server_records_what_set_each_value(start_tba, run_config):
    arguments = ("buffer", "serve", Path(run_config.file).name, "--set", "train.steps=7", "--insecure")
    start_tba(*arguments, TBA_TRAIN__LEARNING_RATE="0.5")
    assert status_of(run_config.address).run_name == "test"
    ((origins,),) = run_config.query("SELECT origins FROM starts")
    keys = ("run.name", "train.learning_rate", "train.steps", "security.insecure", "train.warmup_steps")
    found = json.loads(origins)
    expected = ["run.toml", "TBA_TRAIN__LEARNING_RATE", "--set", "command line", None]
    assert [found.get(key) for key in keys] == expected


def test_a_parked_request_is_answered_when_the_data_arrives(server, run_config, trajectory):
    address = run_config.address
    with connected(address, "searcher") as searcher, connected(address, "trainer") as trainer:
        prepare(searcher)
        asked = trainer.post(messages.SampleBatch(step=0, prompts=1, samples=2, reference="r", wait_seconds=20.0))
        assert trainer.poll(0.3) == []
        searcher.post(*put_of(trajectory, 2, 0))
        (reply,) = trainer.poll(60)
        assert reply.header.id == asked
        assert isinstance(reply.message, messages.Batch)


def test_a_second_server_on_the_same_address_exits_with_code_1_and_one_sentence(server, run_config, tba_here):
    result = tba_here("buffer", "serve", "--config", run_config.file, "--set", "buffer.database=other.sqlite")
    assert result.exit_code == 1, "systemd should try again: the other server may be stopping"
    assert "is in use: a buffer serves run test there" in result.message
    everywhere = run_config.address.replace("127.0.0.1", "*")
    other = ("--insecure", "--set", f"buffer.address={everywhere}")
    result = tba_here("buffer", "serve", "--config", run_config.file, *other)
    assert (result.exit_code, f"{everywhere} is in use: another program" in result.message) == (1, True)


@pytest.fixture
def ipc_config(make_config, tmp_path):
    """A `run_config` with a socket file as address."""
    address = f"ipc://{tmp_path}/socket"
    return replace(make_config(buffer={"address": address}, train={"prompts_per_step": 1}), address=address)


def test_the_socket_file_of_a_killed_server_is_replaced(start_tba, ipc_config, tmp_path):
    for _ in range(2):
        server = start_tba("buffer", "serve", "--config", ipc_config.file)
        status_of(ipc_config.address)
        server.kill()
        server.wait()
        assert (tmp_path / "socket").is_socket()


def test_other_users_have_no_access_to_the_files_and_the_socket_of_a_run(start_tba, make_config, trajectory):
    config = make_config(buffer={"address": "auto"}, train={"prompts_per_step": 1})
    start_tba("buffer", "serve", "--config", config.file)
    with connected(f"ipc://{config.directory}/buffer.socket", "searcher") as client:
        prepare(client)
        client.post(*put_of(trajectory, 4, 0))
        assert client.poll(60)[0].message.stored == 4  # type: ignore[attr-defined]
        found = {path.name: path.stat().st_mode & 0o777 for path in (config.directory, *config.directory.rglob("*"))}
    assert found.keys() >= {"run", "buffer.sqlite", "buffer.sqlite-wal", "buffer.sqlite-shm", "buffer.socket"}
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
