"""The commands of `tba buffer`. Slow imports are inside the commands, so that `tba --help` stays fast."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tba.common import run_files
from tba.common.errors import EXIT_FAILED, EXIT_OK, UsageError, quantity
from tba.common.terminal import (
    ConfigFile,
    ConfigOptions,
    Csv,
    FileArgument,
    Json,
    Sets,
    need,
    not_both,
    note,
    print_csv,
    print_json,
    print_table,
    row_progress,
    start_process,
)

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.config.layers import Resolved

app = typer.Typer(no_args_is_help=True, help="The replay buffer: serve, query, export, import and maintain it.")

Database = Annotated[
    Path | None, typer.Option("--buffer", "-b", help="The database file; default: that of the configuration.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen without keys where other machines can connect.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Report what would be deleted, and change nothing.")]
KeepSteps = Annotated[int, typer.Option(min=0, help="Newest trained steps that stay, for resume.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl, parquet or openenv; default: by the suffix.")]
Where = Annotated[
    str, typer.Option(help="SQL expression over the view trajectories, such as 'reward > 0.5 AND error IS NULL'.")
]
_TABLE_ROWS = 100
# The largest integer of SQLite.
_LARGEST_ID = (1 << 63) - 1


@app.command()
def serve(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    insecure: Insecure = False,
) -> None:
    """Serve the replay buffer of a run until SIGTERM."""
    resolved = resolve(ConfigOptions.of(file, config, sets), buffer, insecure=insecure, starts=True)
    from tba.buffer.server.start import serve as run_server

    run_server(resolved.config, start_process("buffer"), resolved.origins)


@app.command()
def stats(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show counts, sizes and rewards from the database file. Works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = existing(ConfigOptions.of(file, config, sets), buffer).database
    from tba.buffer.tools.printing import print_fields
    from tba.buffer.tools.stats import read_stats

    runs = read_stats(path)
    if as_json:
        return print_json(runs)
    if as_csv:
        return print_csv(list(runs[0]) if runs else [], [list(numbers.values()) for numbers in runs])
    for numbers in runs:
        print_fields({name.replace("_", " "): value for name, value in numbers.items()})
    return None


@app.command()
def query(
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT over the views and tables of docs/database.md.")
    ],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Most rows; 0: all. Default: 100 in a table, all with --json or --csv.")
    ] = None,
) -> None:
    """Run an SQL query on the database. Only reads, and works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    if limit is None:
        limit = 0 if as_json or as_csv else _TABLE_ROWS
    path = existing(ConfigOptions.next_to(sql, config, sets, has_database=True), buffer).database
    from itertools import islice

    from tba.buffer.tools.printing import print_rows
    from tba.buffer.tools.query import query as run_query

    with run_query(path, sql) as (headings, found):
        print_rows(headings, islice(found, limit) if limit else found, as_json=as_json, as_csv=as_csv)
        if limit and next(found, None) is not None:
            note(f"first {quantity(limit, 'row')} only: --limit 0 shows all")


@app.command()
def show(
    trajectory: Annotated[
        int, typer.Argument(metavar="TRAJECTORY", min=1, max=_LARGEST_ID, help="The id of a trajectory.")
    ],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    as_json: Json = False,
) -> None:
    """Show one trajectory: prompt, response, reward parts, versions, and the steps that trained on it."""
    settings = existing(ConfigOptions.of(None, config, sets), buffer)
    from tba.buffer.tools.printing import print_trajectory
    from tba.buffer.tools.show import describe, recorded_model
    from tba.buffer.tools.tokenizer import decoder_of

    model = recorded_model(settings.database, trajectory) or settings.model.path
    known = describe(settings.database, trajectory, decoder_of(model))
    return print_json(known) if as_json else print_trajectory(known)


@app.command()
def tail(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of trajectories to start with.")] = 10,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Print new trajectories until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    as_csv: Csv = False,
) -> None:
    """Show the newest trajectories, one per line; with --follow, also new ones as they are committed."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = existing(ConfigOptions.of(file, config, sets), buffer).database
    from tba.buffer.tools.printing import print_csv_line, print_line
    from tba.buffer.tools.show import TAIL_COLUMNS, follow, newest

    write = print_json if as_json else print_csv_line if as_csv else print_line
    rows = newest(path, max(1, lines))
    if as_csv:
        print_csv(TAIL_COLUMNS, ())
    for row in rows[len(rows) - min(lines, len(rows)) :]:
        write(row)
    if not following:
        return
    try:
        for row in follow(path, after=rows[-1]["id"] if rows else 0):
            write(row)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_OK) from None


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .jsonl or .parquet.")],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    format_: Format = None,
    where: Where = "1",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write trajectories to a file, with everything that an import needs. Works while the server runs."""
    path = existing(ConfigOptions.next_to(file, config, sets, has_database=True), buffer).database
    from tba.buffer.tools.export import export as run_export

    with row_progress() as on_progress:
        done = run_export(path, file, where=where, format_=format_, force=force, on_progress=on_progress)
    if as_json:
        return print_json(done)
    if done["without_tokens"]:
        more = quantity(done["without_tokens"], "more trajectory has", "more trajectories have")
        why = "sampled tokens with log-probabilities" if format_ == "openenv" else "tokens, since they were pruned"
        note(f"left out: {more} no {why}")
    written = quantity(done["trajectories"], "trajectory", "trajectories")
    return typer.echo(f"{written}, {quantity(done['bytes'], 'byte')} in {file}")


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="jsonl, also of traces, parquet, or another run's database.")
    ],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    format_: Format = None,
    as_json: Json = False,
) -> None:
    """Add exported trajectories or demonstrations to the run. Works with and without a server; may be repeated."""
    resolved = resolve(ConfigOptions.next_to(file, config, sets, has_database=True), buffer)
    settings = resolved.config
    from tba.buffer.tools.import_file import import_file, open_target, read_rows
    from tba.common.log import configure

    # Checked first, so that a wrong file name creates no database.
    read_rows(file, settings, format_)
    configure("", level="WARNING")

    try:
        with open_target(settings, named="run.name" in resolved.origins) as target, row_progress() as on_progress:
            counts = import_file(file, target, settings, format_, on_progress=on_progress)
    except KeyboardInterrupt:
        note("interrupted: imported rows stay, and the same command adds the rest")
        raise
    if as_json:
        return print_json({"file": str(file), "run": settings.run.name, **counts})
    for check, traces in counts["warnings"].items():
        note(f"{check}: {quantity(traces, 'trace')}")
    return typer.echo(
        f"{quantity(counts['rows'], 'row')} in {file}: {counts['new']} new in run {settings.run.name}, "
        f"{counts['there_already']} already present"
    )


@app.command()
def prune(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Drop the tokens of trajectories that can no longer be sampled.")
    ] = False,
    before_step: Annotated[
        int | None, typer.Option(min=1, help="Delete trajectories that only steps before this one used, or none.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Delete this whole run; with another option, of this run.")] = None,
    archive: Annotated[
        Path | None, typer.Option("--export", help="Write what is deleted to this file first: .jsonl or .parquet.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete rows without an export.")] = False,
    keep_steps: KeepSteps = 1000,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Delete tokens, old trajectories with the batches that used them, or a whole run, and shrink the file.

    The server must be stopped. Steps that a checkpoint next to the database may repeat are never deleted. With --tokens
    rewards, texts and history stay, and the settings that the run was last served with determine what can be sampled;
    options of this command take precedence, and ./tba.toml is not read if the database is named.
    """
    options = ConfigOptions.of(file, config, sets)
    not_both(tokens, before_step is not None or archive is not None, "--tokens", "--before-step or --export")
    from tba.buffer.tools.prune import prune_rows, prune_tokens

    if tokens:
        done = prune_tokens(_as_served(options, buffer, run), keep_steps=keep_steps, dry_run=dry_run)
        return print_json(done) if as_json else _print_dropped(done)
    if before_step is None and run is None:
        raise UsageError("name what to delete: --tokens, --before-step N, --run NAME, or the last two")
    if not (yes or dry_run or archive):
        raise UsageError("--export FILE keeps what is deleted in a file; --yes deletes it for good")
    path = existing(options, buffer).database
    done = prune_rows(path, run, before_step, keep_steps=keep_steps, archive=archive, dry_run=dry_run)
    return print_json(done) if as_json else _print_pruned(path, done, archive)


@app.command()
def archive(
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A directory, or a URL of fsspec such as s3://bucket/tba.")
    ],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    keep_steps: KeepSteps = 1000,
    as_json: Json = False,
) -> None:
    """Move tokens of trajectories that can no longer be sampled to Parquet files. Works while the server runs.

    Rewards, texts and history stay in the database, and what needs old tokens reads the files. Steps that a checkpoint
    next to the database may repeat keep their tokens. Settings count as for `prune --tokens`. May be killed at any
    moment.
    """
    need("fsspec", "archive")
    settings = _as_served(ConfigOptions.next_to(destination, config, sets, has_database=True), buffer, None)
    from tba.buffer.tools.archive import archive as run_archive
    from tba.buffer.tools.printing import print_fields

    with row_progress() as on_progress:
        done = run_archive(settings, destination, keep_steps=keep_steps, on_progress=on_progress)
    if as_json:
        return print_json(done)
    return print_fields({name.replace("_", " "): value for name, value in done.items()} | {"files": len(done["files"])})


@app.command()
def check(
    file: FileArgument = None,
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the comparison of indexes with their tables, and archives.")
    ] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Check the database. Works while the server runs. The exit code is 1 if a check fails."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = existing(ConfigOptions.of(file, config, sets), buffer).database
    from tba.buffer.tools.check import check as run_check

    findings = run_check(path, quick=quick)
    if as_json:
        print_json(findings)
    elif as_csv:
        print_csv(["check", "result", "detail"], (list(finding.values()) for finding in findings))
    else:
        print_table(["check", "result", "detail"], findings)
    if any(finding["result"] == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    config: ConfigFile = None,
    sets: Sets = None,
    buffer: Database = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy the database as it is now into one checked file. Works while the server runs."""
    path = existing(ConfigOptions.next_to(file, config, sets, has_database=True), buffer).database
    from tba.buffer.tools.backup import backup as run_backup
    from tba.common.terminal import byte_progress

    with byte_progress(quiet=as_json) as progress:
        done = run_backup(path, file, force=force, progress=progress)
    text = f"{quantity(done['bytes'], 'byte')} in {file}, integrity {done['integrity']}"
    return print_json(done) if as_json else typer.echo(text)


def resolve(
    options: ConfigOptions,
    buffer: Path | None,
    *,
    unless: Sequence[str] = (),
    run: str | None = None,
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
    database = None if buffer is None else str(buffer)
    flags = {"buffer.database": database, "run.name": run, "security.insecure": insecure or None}
    if starts:
        from tba.buffer.store.starts import resolve_start

        return resolve_start(options, flags)
    return (options.resolve_run if exists else options.resolve)(flags, unless=unless)


def existing(options: ConfigOptions, buffer: Path | None) -> "Config":
    """Return the configuration of a database that is there already."""
    return resolve(options, buffer, exists=True).config


def _as_served(options: ConfigOptions, buffer: Path | None, run: str | None) -> "Config":
    """Return the settings that a run was last served with, and above them those that are given."""
    resolved = resolve(options, buffer, unless=("buffer.database", "run.dir"), run=run, exists=True)
    path = resolved.config.database
    given = resolved.config.run.name if "run.name" in resolved.origins else None
    from tba.buffer.store.starts import recorded_start
    from tba.common.config.layers import secret_keys

    served = recorded_start(path, given).settings_here()
    # A secret is not recorded. These commands need none, but an address that is served must have one.
    hidden = {key: "*" * 16 for key in secret_keys() if served.get(key)}
    return resolved.over({**served, **hidden, "buffer.database": path}, f"recorded in {path}", needs="buffer")


def _print_dropped(done: dict[str, Any]) -> None:
    from tba.buffer.tools.printing import print_fields

    if not done["dry_run"]:
        return print_fields({name.replace("_", " "): value for name, value in done.items()})
    return typer.echo(
        f"would drop the tokens of {quantity(done['trajectories_compacted'], 'trajectory', 'trajectories')} of run "
        f"{done['run']}, {quantity(done['token_bytes'], 'byte')}, and keep those of {done['trajectories_kept']}; "
        "nothing was changed"
    )


def _print_pruned(path: Path, done: dict[str, Any], archive: Path | None) -> None:
    if archive and not done["dry_run"] and (lost := done["trajectories"] - done["exported"]):
        note(
            f"not in {archive}: {quantity(lost, 'trajectory', 'trajectories')} without tokens, since those were pruned"
        )
    rows = quantity(done["trajectories"], "trajectory", "trajectories")
    typer.echo(
        f"{'would delete' if done['dry_run'] else 'deleted'} {rows} and "
        f"{quantity(done['batches'], 'batch', 'batches')} of run {done['run']}, {done['trajectories_kept']} stay; "
        f"{path} has {quantity(done['file_bytes_after'], 'byte')}, {done['file_bytes_before']} before"
    )
