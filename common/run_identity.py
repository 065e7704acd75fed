"""Which run a directory, a database, a checkpoint or a server belongs to, and the one sentence if it is another."""

from collections.abc import Sequence
from dataclasses import dataclass

from tba.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run by its name, and for an offline run the buffer file that it trains from."""

    name: str
    source: str = ""


def refuse_other_run(
    place: object, found: Sequence[RunIdentity], asked: RunIdentity, otherwise: str = "set another run.dir"
) -> None:
    """Raise ConfigError if a place belongs to runs other than the one asked for; `otherwise` says what to do.

    An offline run is another one than a run of its name with a server. Its source is not compared: it may have moved.
    """
    if not found:
        return
    own = next((run for run in found if run.name == asked.name), found[0])
    if bool(own.source) != bool(asked.source):
        continues = f"was trained offline from {own.source}, and `tba train --offline` continues it"
        how = continues if own.source else "was not trained offline"
        raise ConfigError(f"{place} belongs to run {own.name}, which {how}: {otherwise}")
    if own.name != asked.name:
        names = ", ".join(run.name for run in found)
        raise ConfigError(
            f'{place} belongs to run {names}, and run.name is {asked.name}: set run.name = "{own.name}", or {otherwise}'
        )


def refuse_other_server(address: str, found: str, asked: str) -> None:
    """Raise ConfigError if the server at an address serves another run than the one that was asked for."""
    server = f"the buffer at {address}"
    refuse_other_run(server, [RunIdentity(found)], RunIdentity(asked), "set buffer.address to that of the run")
