"""An attacker at the port of a server with keys: without one, with a foreign, a revoked, or another's."""

import os
import random
import socket
import stat
import tomllib
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock
from urllib.parse import urlsplit

import psutil
import pytest

from tba.common.clock import SystemClock
from tba.common.config import Config
from tba.common.errors import BufferUnavailable, ConfigError, Refused, SnapshotError
from tba.common.weights.snapshot_server import SnapshotServer
from tba.common.wire import messages
from tba.common.wire.channels import new_pair
from tba.common.wire.client import BufferClient
from tba.common.wire.keys import BUFFER, OWN, KeyPair, own_pair, server_keys, write_pair, write_public
from tba.common.wire.messages import GetStatus, Status
from tba.searcher.weights.fetch import Fetcher, Progress
from tba.tests.helpers.buffer import BufferThread
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.keyring import Keyring
from tba.tests.helpers.puts import reference
from tba.tests.runner import size

PATIENCE_SECONDS = 90
# How long a client waits that is not told of its refusal.
REFUSED_SECONDS = 0.3
HANDSHAKES = size(200, 100_000)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


@pytest.fixture
def keyring(tmp_path, monkeypatch):
    # A change of the keys is seen at once.
    monkeypatch.setattr("tba.common.wire.keys._RELOAD_SECONDS", 0.0)
    return Keyring(tmp_path / "keys")


@pytest.fixture
def buffer(tmp_path, keyring):
    thread = BufferThread(Config.model_validate({"run": {"dir": str(tmp_path), "name": "test"}}), keys=keyring.server())
    yield thread
    thread.stop()


def connect(buffer, keys, role="searcher", **names):
    return closing(BufferClient(buffer.address, role=role, name="n", keys=keys, **names))


def status(client, stop=lambda: False) -> Status:
    return client.call(GetStatus(), Status, deadline_seconds=PATIENCE_SECONDS, stop=stop)[0]


def status_or_obstacle(client) -> Status:
    """The status, or the error of a client that gives up as soon as it knows why it is not answered."""
    return status(client, lambda: bool(client.obstacle))


def lines(caplog, event):
    return [record.fields for record in caplog.records if record.getMessage() == event]


def test_no_client_gets_in_without_a_key_that_is_authorised_or_to_a_server_with_another(buffer, keyring, caplog):
    with connect(buffer, None) as client:
        with pytest.raises(BufferUnavailable, match="does it need keys"):
            status_or_obstacle(client)
        wait_until(lambda: lines(caplog, "connection refused"), PATIENCE_SECONDS, "a line in the log")
        assert lines(caplog, "connection refused")[0]["reason"] == "it did not prove a key"
    caplog.clear()
    keys = keyring.client("node1")
    with connect(buffer, keys) as client:
        with pytest.raises(BufferUnavailable, match=f"tba keys authorize NAME {keys.own.public}"):
            status_or_obstacle(client)
        assert lines(caplog, "connection refused")[0] == {
            "by": "127.0.0.1", "key": keys.own.public, "reason": "the key is not authorised"
        }  # fmt: skip
        keyring.authorize("node1", keys.own.public, "searcher")
        assert status(client).clients[0].sender == client.sender, "without a restart"
    other = replace(keys, server=new_pair("other").public)
    with connect(buffer, other) as client, pytest.raises(BufferUnavailable, match="is not set up"):
        status_or_obstacle(client)


def test_a_key_is_for_its_roles_and_when_revoked_is_refused_on_an_open_connection(buffer, keyring, caplog):
    announcement = messages.AnnounceSnapshot(weights=reference(0, 0), bytes=1)
    sentence, keys = "the key of node1 is for searcher, importer only", keyring.client("node1", "searcher", "importer")
    with connect(buffer, keys, "publisher") as client, pytest.raises(BufferUnavailable, match=sentence):
        client.call(announcement, messages.Done, stop=lambda: bool(client.obstacle))
    assert lines(caplog, "request refused")[0]["by"] == "node1 at 127.0.0.1"
    caplog.clear()
    with connect(buffer, keys) as client:
        status(client)
        keyring.revoke("node1")
        with pytest.raises(BufferUnavailable, match="not authorised any more"):
            status_or_obstacle(client)
        assert lines(caplog, "request refused")[0]["role"] == "searcher"


def test_a_key_does_not_speak_in_the_name_of_a_client_with_another(buffer, keyring):
    with connect(buffer, keyring.client("node1", "searcher")) as victim:
        status(victim)
        # Also with the secret that would do without keys.
        names = {"sender": victim.sender, "secret": victim.secret}
        keys, sentence = keyring.client("node2", "searcher"), f"the sender {victim.sender} is another client"
        with connect(buffer, keys, **names) as other, pytest.raises(Refused, match=sentence):
            other.call(messages.Goodbye(), messages.Done, deadline_seconds=PATIENCE_SECONDS)
        assert status(victim).clients[0].activity == "connected"


def test_snapshots_are_for_authorised_searchers(keyring, tmp_path):
    (tmp_path / "snapshots").mkdir()
    server = SnapshotServer("tcp://127.0.0.1:*", tmp_path / "snapshots", keys=keyring.server())
    refused = {
        "no manifest names it": keyring.client("searching", "searcher").own,
        "the key of watching is for monitor, not for searcher": keyring.client("watching", "monitor").own,
    }
    with closing(server):
        for sentence, own in refused.items():
            fetcher = Fetcher(server.address, SystemClock(), Progress(), own=own)
            with closing(fetcher), pytest.raises(SnapshotError, match=sentence):
                fetcher.fetch(1, "manifest.json", tmp_path / "fetched")
        fetcher = Fetcher(server.address, SystemClock(), Progress(), REFUSED_SECONDS, keyring.client("foreign").own)
        with closing(fetcher), pytest.raises(SnapshotError, match="did not send"):
            fetcher.fetch(1, "manifest.json", tmp_path / "fetched")
        with pytest.raises(ConfigError, match=r"needs keys: set security\.keys"):
            Fetcher(server.address, SystemClock(), Progress())


def test_a_server_that_others_can_reach_needs_keys_and_a_private_file(keyring):
    with pytest.raises(ConfigError, match="any program there may read and change the run"):
        server_keys(None, "tcp://*:5757", "buffer.address", insecure=False)
    assert server_keys(None, "tcp://*:5757", "buffer.address", insecure=True) is None
    assert server_keys(None, "tcp://127.0.0.1:5757", "buffer.address", insecure=False) is None
    with pytest.raises(ConfigError, match="every user of this machine can connect"):
        server_keys(keyring.directory, "ipc://@tba", "buffer.address", insecure=False)
    (keyring.directory / OWN).chmod(0o640)
    with pytest.raises(ConfigError, match="is open to other users"):
        own_pair(keyring.directory)


def test_the_key_that_systemd_passes_is_used_before_that_of_the_directory(keyring, tmp_path, monkeypatch):
    passed, own = tmp_path / "credentials" / OWN, keyring.directory / OWN
    other = write_pair(passed.parent, new_pair("node0"))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(passed.parent))
    # With an access control list systemd leaves the file to root, and the mode shows that another user reads it.
    other.chmod(0o440)
    assert own_pair(keyring.directory) == own_pair(passed.parent) != read_pair(own)
    other.chmod(0o444)
    with pytest.raises(ConfigError, match="is open to other users"):
        own_pair(keyring.directory)
    # As the units pass it where there is none.
    passed.unlink()
    passed.write_text("# Without that file, the one in security.keys is used")
    passed.chmod(0o400)
    assert own_pair(keyring.directory) == read_pair(own)


def read_pair(file):
    values = tomllib.loads(file.read_text())
    return KeyPair(values["name"], values["public"], values["secret"])


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_root_makes_keys_whose_public_part_other_users_read_and_none_writes(tmp_path, mask):
    before = os.umask(mask)
    try:
        keyring = Keyring(tmp_path / "keys")
        keyring.client("node1", "searcher")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    }
    assert modes == {"keys": 0o755, "node.key": 0o600, "authorized": 0o755, "node1.pub": 0o644}


def test_a_client_waits_while_the_buffer_serves_another_database_and_takes_no_state_from_it(buffer, keyring, tmp_path):
    # `stop` closes the database, and the file is the whole of it.
    path, aside = buffer.config.database, tmp_path / "aside.sqlite"
    with connect(buffer, keyring.client("node1", "searcher")) as client:
        run, state = status(client).run_name, client.state
        buffer.stop()
        path.rename(aside)
        buffer.start()
        with pytest.raises(BufferUnavailable, match="put the database back, or restart this process"):
            status_or_obstacle(client)
        assert client.state is state
        buffer.stop()
        aside.replace(path)
        buffer.start()
        assert status(client).run_name == run


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_malformed_handshakes_leave_the_server_well(buffer, keyring):
    parts, rng = urlsplit(buffer.address), random.Random(0)
    keys = keyring.client("node1", "monitor")
    process = psutil.Process()
    with connect(buffer, keys, "monitor") as client:
        status(client)
        before = process.memory_info().rss
        for _ in range(HANDSHAKES):
            with socket.create_connection((parts.hostname, parts.port), PATIENCE_SECONDS) as attacker:
                attacker.sendall(malformed(rng))
        status(client)
        assert process.memory_info().rss - before < 256 << 20
    with connect(buffer, keys, "monitor") as late:
        status(late)


def malformed(rng: random.Random) -> bytes:
    """Return the bytes of a handshake: noise, a greeting of some mechanism, or a CURVE command with noise in it."""
    noise = rng.randbytes(rng.choice((1, 10, 64, 500)))
    mechanism = rng.choice((b"CURVE", b"NULL", b"PLAIN", noise[:20]))
    greeting = GREETING + mechanism.ljust(20, b"\0") + bytes(32)
    name = rng.choice((b"HELLO", b"INITIATE", b"READY", b"ERROR", noise[:5]))
    body = bytes([len(name)]) + name + rng.randbytes(rng.choice((0, 1, 194, 240)))
    command = b"\x04" + bytes([min(255, len(body) + rng.choice((0, 0, 0, 1)))]) + body
    long_command = b"\x06" + (1 << rng.choice((20, 40, 62))).to_bytes(8, "big") + body
    return rng.choice(
        (noise, greeting[: rng.randrange(64)], greeting + noise, greeting + command, greeting + long_command)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        (("searcher",), "the key of node1 is for searcher only, not for importer: run on the node of the buffer "
         "`tba keys authorize node1 {public} --role searcher --role importer`"),
        ((), "it does not admit the key of node1: run there `tba keys authorize NAME {public} --role ROLE`"),
        (None, "does it need keys (security.keys)?"),
    ],
    ids=["another role", "not authorised", "no key"],
)  # fmt: skip
def test_a_command_whose_key_is_refused_says_so_at_once(
    buffer, keyring, tmp_path, tba_here, monkeypatch, roles, sentence
):
    """It waits for nothing: with these times it would not end."""
    monkeypatch.setattr("tba.buffer.tools.import_file._REPLY_SECONDS", 1e9)
    # The display is repeated until Ctrl-C.
    monkeypatch.setattr("tba.cli.inspection.time", Mock(sleep=Mock(side_effect=KeyboardInterrupt)))
    settings, public = [f"run.dir={tmp_path}", "run.name=test", f"buffer.address={buffer.address}"], ""
    if roles is not None:
        keys = keyring.client("node1", *roles)
        write_pair(tmp_path / "node1", keys.own)
        write_public(tmp_path / "node1" / BUFFER, public=keys.server)
        settings, public = [*settings, f"security.keys={tmp_path}/node1"], keys.own.public
    options = [part for one in settings for part in ("--set", one)]
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [1], "response_ids": [2], "prompt_key": "p"}\n')
    for command in (("import", "rows.jsonl"), ("archive", "archive")):
        refused = tba_here("buffer", *command, *options)
        assert (refused.exit_code, sentence.format(public=public) in refused.message) == (1, True), refused.message
    if not roles:
        said = tba_here("status", *options).message
        shown = tba_here("status", "--watch", "--json", *options).json["explanation"]
        found = tba_here("doctor", "--only", "buffer address", *options).message
        for text in (said, shown, found):
            assert sentence.format(public=public) in text
