"""The keys of a server are deleted, moved, replaced and made read-only under load: nothing is lost, and it goes on."""

import contextlib
import os
import shutil
from pathlib import Path

from tba.common.wire.keys import AUTHORIZED, OWN
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.faults import assert_all_is_stored_once, producing
from tba.tests.helpers.keyring import Keyring

KEY = "authorized/node1.pub"


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: Path) -> None:
    delete(path)
    path.mkdir()


def file(path: Path) -> None:
    delete(path)
    path.write_text("not what was there")


def fifo(path: Path) -> None:
    delete(path)
    os.mkfifo(path, 0o600)


def read_only(path: Path) -> None:
    path.chmod(0o500 if path.is_dir() else 0o400)


def writable_by_others(path: Path) -> None:
    path.chmod(0o666)


# What is done, to which path below the directory of keys, and whether the key is still admitted.
HANDS = [
    (delete, KEY, False),
    (file, KEY, False),
    (fifo, KEY, False),
    (writable_by_others, KEY, False),
    (read_only, KEY, True),
    (delete, AUTHORIZED, False),
    (empty, AUTHORIZED, False),
    (file, AUTHORIZED, False),
    (read_only, AUTHORIZED, True),
    # The server has read its own pair.
    (delete, OWN, True),
    (fifo, OWN, True),
    (delete, ".", False),
]


def test_a_server_whose_keys_change_hands_refuses_what_it_does_not_store_and_goes_on_after_the_repair(
    start_tba, make_config, tmp_path
):
    directory, kept = tmp_path / "keys", tmp_path / "kept"
    keyring = Keyring(directory)
    keys = keyring.client("node1", "searcher", "trainer")
    shutil.copytree(directory, kept)
    run = make_config(train={"prompts_per_step": 1}, security={"keys": str(directory)})
    server = start_tba("buffer", "serve", "--config", run.file)
    with producing(run.address, 2, tokens=64, keys=keys) as producers:
        acknowledged = [0, 0]

        def all_go_on() -> bool:
            return all(len(one.acknowledged) > n for one, n in zip(producers, acknowledged, strict=True))

        for hand, name, admitted in HANDS:
            acknowledged[:] = (len(one.acknowledged) for one in producers)
            wait_until(all_go_on, what=f"puts before {hand.__name__} {name}")
            for one in producers:
                one.troubles.clear()
            hand(directory / name)
            if not admitted:
                wait_until(lambda: all(one.troubles for one in producers), what=f"a refusal: {hand.__name__} {name}")
            acknowledged[:] = (len(one.acknowledged) for one in producers)
            if admitted:
                wait_until(all_go_on, what=f"puts in spite of {hand.__name__} {name}")
            # Only root deletes what is in a read-only directory.
            with contextlib.suppress(OSError):
                (directory / AUTHORIZED).chmod(0o700)
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(kept, directory)
        for one in producers:
            one.wait_until_all_is_answered(120)
    server.terminate()
    assert server.wait(60) == 0
    output = (tmp_path / "tba0.log").read_text()
    assert "request refused" in output
    assert "the key of this node is not authorised any more: run on the node of the buffer" in output
    assert "Traceback" not in output
    assert_all_is_stored_once(run.database, producers)
