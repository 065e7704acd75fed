"""Which run a place belongs to: one comparison for directories, databases, checkpoints and servers."""

import pytest

from tba.common.errors import ConfigError
from tba.common.run_identity import RunIdentity, refuse_other_run, refuse_other_server

TEST, OFFLINE = RunIdentity("test"), RunIdentity("test", "/other/buffer.sqlite")


@pytest.mark.parametrize(
    ("found", "asked"), [([], TEST), ([TEST], TEST), ([RunIdentity("a"), TEST], TEST), ([OFFLINE], OFFLINE)]
)
def test_a_new_place_and_that_of_the_same_run_are_used(found, asked):
    refuse_other_run("run/", found, asked)


@pytest.mark.parametrize(
    ("found", "asked", "sentence"),
    [
        ([RunIdentity("a"), RunIdentity("b")], TEST, 'to run a, b, and run.name is test: set run.name = "a", or set'),
        ([OFFLINE], TEST, "to run test, which was trained offline from .* continues it: set another run.dir"),
        ([TEST], OFFLINE, "to run test, which was not trained offline: set another run.dir"),
    ],
)
def test_the_place_of_another_run_is_refused_with_what_to_do(found, asked, sentence):
    with pytest.raises(ConfigError, match=f"^run/ belongs {sentence}"):
        refuse_other_run("run/", found, asked)


def test_the_server_of_another_run_is_refused():
    with pytest.raises(ConfigError, match="the buffer at ipc://x belongs to run a, and run.name is b"):
        refuse_other_server("ipc://x", "a", "b")
