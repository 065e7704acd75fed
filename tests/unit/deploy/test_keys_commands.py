"""`tba keys`, and what `tba doctor` says of keys."""

import json

import pytest
from typer.testing import CliRunner

from tba.common.config import Config
from tba.common.errors import ConfigError, TbaError, UsageError
from tba.common.wire.keys import AUTHORIZED, BUFFER, OWN, AuthorizedKeys, buffer_key, own_pair
from tba.deploy.doctor import check_keys
from tba.deploy.keys_commands import app
from tba.tests.helpers.checks import wait_until


@pytest.fixture
def keys(tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--set", f"security.keys={tmp_path}/keys"])
        if isinstance(result.exception, TbaError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_keys_are_created_authorised_listed_and_revoked(keys, tmp_path):
    here, there = tmp_path / "keys", tmp_path / "node1"
    assert f'keys = "{here}" in [security]' in keys("new", "node0", "--role", "trainer", "--role", "searcher")
    keys("new", "node1", "--role", "searcher", "--folder", str(there))
    keys("authorize", "laptop", "0f" * 32, "--role", "monitor")
    assert (there / OWN).stat().st_mode & 0o777 == 0o600
    assert buffer_key(there) == own_pair(here).public == buffer_key(here)
    listed = {row["name"]: row["roles"] for row in json.loads(keys("list", "--json"))}
    assert listed == {"laptop": "monitor", "node0": "trainer, searcher", "node1": "searcher"}
    node1 = AuthorizedKeys(here / AUTHORIZED).find(own_pair(there).public)
    assert node1 is not None
    assert (node1.speaks_as("evaluator"), node1.speaks_as("trainer")) == (True, False)
    keys("revoke", "node1")
    assert AuthorizedKeys(here / AUTHORIZED).find(own_pair(there).public) is None


def test_mistakes_with_keys_are_refused(keys, tmp_path):
    keys("new", "node0")
    keys("authorize", "laptop", "1f" * 32, "--role", "monitor")
    secret = (tmp_path / "keys" / OWN).read_text()
    with pytest.raises(ConfigError, match="this node has a key"):
        keys("new", "node0")
    assert (tmp_path / "keys" / OWN).read_text() == secret
    for arguments, error in {
        ("new", "../x"): "cannot be the name of a key",
        ("authorize", "x", "0f", "--role", "monitor"): "64 hexadecimal digits",
        ("authorize", "x", "1f" * 32, "--role", "trainer"): "the key is that of laptop",
        ("authorize", "x", "0f" * 32): "name what x may do",
        ("authorize", "x", "0f" * 32, "--role", "king"): "a key is for searcher, trainer, importer, monitor",
        ("new", "node1", "--folder", "there"): "with --role",
        ("revoke", "x"): "does not exist",
    }.items():
        with pytest.raises((ConfigError, UsageError), match=error):
            keys(*arguments)


def test_a_file_in_authorized_that_others_can_write_or_that_is_not_valid_admits_no_key(keys, tmp_path):
    keys("new", "node0", "--role", "searcher")
    public = own_pair(tmp_path / "keys").public
    path = tmp_path / "keys" / AUTHORIZED / "node0.pub"
    path.chmod(0o622)
    assert AuthorizedKeys(path.parent).find(public) is None
    path.chmod(0o600)
    path.write_text(path.read_text().replace('"searcher"', '["searcher"]'))
    assert AuthorizedKeys(path.parent).find(public) is None


def test_the_last_keys_hold_while_the_directory_cannot_be_read(keys, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("tba.common.wire.keys._RELOAD_SECONDS", 0.0)
    keys("new", "node0", "--role", "trainer")
    directory, public = tmp_path / "keys" / AUTHORIZED, own_pair(tmp_path / "keys").public
    admitted = AuthorizedKeys(directory)
    assert admitted.find(public) is not None
    directory.rename(tmp_path / "moved")
    # A loop, which no process can read.
    directory.symlink_to(directory)
    wait_until(lambda: admitted.find(public) is None or caplog.messages, 60, "a warning")
    assert admitted.find(public) is not None
    directory.unlink()
    wait_until(lambda: admitted.find(public) is None, 60, "the end of the key")


def test_the_doctor_tells_who_may_connect(keys, tmp_path):
    def told(address: str, **security):
        return check_keys(Config.model_validate({"buffer": {"address": address}, "security": security}))

    keys("new", "node0", "--role", "searcher")
    assert told("auto") == ("ok", "none: the sockets are files of this user")
    assert told("tcp://127.0.0.1:5757")[0] == "warn"
    assert told("tcp://*:5757")[0] == "fail"
    assert told("tcp://*:5757", insecure=True)[0] == "warn"
    assert told("tcp://*:5757", keys=tmp_path / "keys") == ("ok", "node0; its servers admit 1 key")
    (tmp_path / "keys" / OWN).chmod(0o604)
    assert told("tcp://*:5757", keys=tmp_path / "keys")[0] == "fail"
    assert not (tmp_path / "keys" / BUFFER).exists()
