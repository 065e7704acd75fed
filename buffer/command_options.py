"""Options that the commands of `tba buffer` share."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common import run_files
from tba.common.terminal import ConfigOptions, not_both

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.config.layers import Resolved

Database = Annotated[
    Path | None, typer.Option("--buffer", "-b", help="The database file; default: that of the configuration.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen without keys where other machines can connect.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]


def resolve(
    options: ConfigOptions,
    buffer: Path | None,
    *,
    unless: Sequence[str] = (),
    insecure: bool = False,
    exists: bool = False,
    starts: bool = False,
) -> "Resolved":
    """Return the configuration with the database of --buffer, or of a database in the place of the TOML file.

    If it `exists` or its server `starts`, something must say which one it is: else UsageError is raised.
    """
    from tba.common.config.layers import is_database

    # What people type first: `tba buffer stats runs/demo/buffer.sqlite`.
    if options.file is not None and is_database(options.file):
        not_both(True, buffer is not None, f"FILE {options.file}", f"--buffer {buffer}")
        options, buffer = replace(options, file=None), options.file
    # The directory of a run stands for its database.
    if buffer is not None and os.path.isdir(buffer):
        buffer = buffer / run_files.DATABASE
    flags = {"buffer.database": None if buffer is None else str(buffer), "security.insecure": insecure or None}
    how = options.resolve_run if exists else options.resolve_start if starts else options.resolve
    return how(flags, unless=unless)


def resolve_config(options: ConfigOptions, buffer: Path | None, *, insecure: bool = False) -> "Config":
    """As `resolve`, without the origins."""
    return resolve(options, buffer, insecure=insecure).config


def existing(options: ConfigOptions, buffer: Path | None) -> "Config":
    """Return the configuration of a database that is there already."""
    return resolve(options, buffer, exists=True).config
