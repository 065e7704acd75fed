"""A key that is not admitted for a while: every role of a run waits, says so, and goes on after the repair."""

from pathlib import Path

import pytest

from tba.common.wire.keys import AUTHORIZED, KEY_ROLES, own_pair, write_public
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.keyring import Keyring
from tba.tests.process.conftest import arithmetic, free_port

ROLES = {
    "buffer": ("buffer", "serve"),
    "search": ("search", "--cpu", "1"),
    "eval": ("search", "--eval", "--cpu", "1"),
    "train": ("train", "--cpu", "--resume"),
}


@pytest.fixture
def key(tmp_path) -> Path:
    """The file that admits the key of this node, to the buffer and to the trainer's server of snapshots."""
    keyring = Keyring(tmp_path / "keys")
    keyring.authorize("node0", own_pair(keyring.directory).public, *KEY_ROLES)
    return keyring.directory / AUTHORIZED / "node0.pub"


class Run:
    """The roles as processes, each with its log."""

    def __init__(self, config, start_tba, tmp_path):
        self.config = config
        self.logs = {role: tmp_path / f"tba{number}.log" for number, role in enumerate(ROLES)}
        self.processes = {role: start_tba(*command, "--config", config.file) for role, command in ROLES.items()}

    def counts(self, sentence: str) -> dict[str, int]:
        """How often the log of each client has a sentence."""
        return {role: log.read_text().count(sentence) for role, log in self.logs.items() if role != "buffer"}

    def wait_for(self, sentence: str, *roles: str) -> None:
        """Wait until these clients have said it, by default all."""
        wait_until(
            lambda: all(self.counts(sentence)[role] for role in roles or ("search", "eval", "train")), what=sentence
        )

    def wait_for_steps(self) -> None:
        """Wait for steps on new trajectories, with the processes that were started."""
        newest = "SELECT COALESCE(MAX(id), 0) FROM trajectories"
        before, known = self.config.steps_trained(), self.config.query(newest)[0][0]
        wait_until(lambda: self.config.steps_trained() > before + 1 and self.config.query(newest)[0][0] > known)
        assert {role: process.poll() for role, process in self.processes.items()} == dict.fromkeys(ROLES)


@pytest.fixture
def run(make_config, start_tba, key, tmp_path):
    config = make_config(
        **arithmetic(
            security={"keys": str(key.parents[1])},
            train={"steps": 100_000, "serve_snapshots": f"tcp://127.0.0.1:{free_port()}"},
            # When it is full the searcher pauses: it need not generate while it waits.
            search={"weights_from": "trainer", "spool_mib": 0.1},
        )
    )
    run = Run(config, start_tba, tmp_path)
    wait_until(lambda: config.steps_trained() >= 2)
    return run


def test_all_roles_outlive_a_key_that_others_may_write_that_has_another_role_and_that_is_refused_at_the_door(
    run, key, start_tba
):
    key.chmod(0o664)
    run.wait_for("the key of this node is not authorised any more")
    key.chmod(0o644)
    run.wait_for_steps()

    own = own_pair(key.parents[1]).public
    write_public(key, public=own, roles=["monitor"])
    run.wait_for("the key of node0 is for monitor only")
    write_public(key, public=own, roles=list(KEY_ROLES))
    run.wait_for_steps()

    # A buffer that starts meanwhile lets none of them connect.
    run.processes["buffer"].terminate()
    assert run.processes["buffer"].wait(60) == 0
    key.rename(key.with_suffix(".aside"))
    run.processes["buffer"] = start_tba(*ROLES["buffer"], "--config", run.config.file)
    run.wait_for("it does not admit the key of node0", "search", "train")
    key.with_suffix(".aside").rename(key)
    run.wait_for_steps()
    assert run.counts("Traceback") == dict.fromkeys(run.counts(""), 0)
