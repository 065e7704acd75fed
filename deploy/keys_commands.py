"""`tba keys`: key pairs of nodes, and who may connect. Slow imports are inside the commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common.errors import UsageError
from tba.common.terminal import ConfigFile, ConfigOptions, FileArgument, Json, Sets, print_json, print_table

if TYPE_CHECKING:
    from tba.common.config import Config

app = typer.Typer(no_args_is_help=True, help="Keys of nodes: create them, and decide who may connect.")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a node.")]
_Roles = Annotated[
    list[str] | None,
    typer.Option("--role", help="searcher, trainer, importer or monitor (status only); may be repeated."),
]


@app.command()
def new(
    name: _Name,
    config: ConfigFile = None,
    sets: Sets = None,
    role: _Roles = None,
    folder: Annotated[
        Path | None, typer.Option(help="Create the directory of another node here, to be copied there.")
    ] = None,
) -> None:
    """Create the key pair of this node in security.keys, or that of another one; --role authorises it here."""
    options = ConfigOptions.next_to(name, config, sets)
    directory = _directory(options.resolve().config)
    from tba.common.wire.channels import new_pair
    from tba.common.wire.keys import BUFFER, buffer_key, check_name, write_pair, write_public

    roles = _checked(role)
    if folder is not None and not roles:
        raise UsageError(f"the key of {name} would not get in: name what it may do with --role")
    # Read first: without a key of this node there is nothing that another one could expect of the buffer.
    expected = None if folder is None else buffer_key(directory)
    pair = new_pair(check_name(name))
    path = write_pair(folder or directory, pair)
    if folder is not None and expected is not None:
        write_public(folder / BUFFER, public=expected)
    if roles:
        _authorize(directory, name, pair.public, roles)
    typer.echo(f"key pair of {name} in {path}, public key {pair.public}")
    if folder is None:
        typer.echo(f'keys = "{directory}" in [security] of tba.toml makes the programs of this node use it')
    else:
        typer.echo(f"copy {folder} to security.keys of that node, keep its mode (scp -pr), and delete it here")


@app.command()
def authorize(
    name: _Name,
    public: Annotated[str, typer.Argument(metavar="PUBLIC_KEY", help="Its public key, as `tba keys new` printed it.")],
    config: ConfigFile = None,
    sets: Sets = None,
    role: _Roles = None,
) -> None:
    """Admit a key to the servers of this node, within a second and without a restart."""
    options = ConfigOptions.next_to(name, config, sets)
    from tba.common.wire.keys import check_name, check_public

    if not (roles := _checked(role)):
        raise UsageError(f"name what {name} may do with --role")
    _authorize(_directory(options.resolve().config), check_name(name), check_public(public), roles)
    typer.echo(f"{name} is authorised: {', '.join(roles)}")


@app.command()
def revoke(name: _Name, config: ConfigFile = None, sets: Sets = None) -> None:
    """Refuse a key from now on, also on the connections that it has opened. Takes a second, without a restart."""
    options = ConfigOptions.next_to(name, config, sets)
    from tba.common.wire.keys import AUTHORIZED, check_name

    path = _directory(options.resolve().config) / AUTHORIZED / f"{check_name(name)}.pub"
    try:
        path.unlink()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: `tba keys list` shows who is authorised") from None
    typer.echo(f"{name} is revoked")


@app.command("list")
def list_(file: FileArgument = None, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show the keys that the servers of this node admit."""
    options = ConfigOptions.of(file, config, sets)
    from tba.common.wire.keys import AUTHORIZED, read_authorized

    found = read_authorized(_directory(options.resolve().config) / AUTHORIZED)
    rows = [{"name": known.name, "roles": ", ".join(known.roles), "public key": public} for known, public in found]
    if as_json:
        return print_json(rows)
    return print_table(["name", "roles", "public key"], rows)


def _directory(config: "Config") -> Path:
    if config.security.keys is None:
        raise UsageError(
            "security.keys is not set: name the directory of the keys in tba.toml, the same on all nodes ([security], "
            'keys = "/etc/tba/keys"), or for this command alone with --set security.keys=DIRECTORY'
        )
    return config.security.keys


def _checked(roles: list[str] | None) -> list[str]:
    from tba.common.wire.keys import KEY_ROLES

    for role in roles or ():
        if role not in KEY_ROLES:
            raise UsageError(f"--role {role}: a key is for {', '.join(KEY_ROLES)}")
    return roles or []


def _authorize(directory: Path, name: str, public: str, roles: list[str]) -> None:
    from tba.common.wire.keys import AUTHORIZED, read_authorized, write_public

    # Otherwise `revoke` of one name would leave the key admitted under the other.
    for known, other in read_authorized(directory / AUTHORIZED):
        if other == public and known.name != name:
            raise UsageError(f"the key is that of {known.name}: `tba keys revoke {known.name}` first")
    write_public(directory / AUTHORIZED / f"{name}.pub", public=public, roles=roles)
