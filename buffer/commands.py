"""The commands of `tba buffer`. Slow imports are inside the commands, so that `tba --help` stays fast."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common.errors import EXIT_FAILED, EXIT_OK
from tba.common.quantity import quantity
from tba.common.terminal import (
    ConfigOptions,
    Csv,
    Json,
    not_both,
    note,
    print_columns,
    print_csv,
    print_json,
    print_json_rows,
    print_table,
    start_process,
    with_config,
)

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.config.layers import Resolved

app = typer.Typer(no_args_is_help=True, help="The replay buffer: serve, query, export, import and maintain it.")

Database = Annotated[
    Path | None, typer.Option("--buffer", "-b", help="The database file; default: that of the configuration.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl or parquet; default: by the file's suffix.")]
_TABLE_ROWS = 100
# The largest integer of SQLite.
_LARGEST_ID = (1 << 63) - 1


@app.command()
@with_config
def serve(options: ConfigOptions, buffer: Database = None) -> None:
    """Serve the replay buffer of a run until SIGTERM."""
    settings = _config(options, buffer)
    from tba.buffer.server.start import serve as run_server

    run_server(settings, start_process("buffer"))


@app.command()
@with_config
def stats(
    options: ConfigOptions,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Show counts, sizes and rewards from the database file. Works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(options, buffer).database
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
@with_config
def query(
    sql: Annotated[str, typer.Argument(help="One SELECT over the views and tables of docs/database.md.")],
    options: ConfigOptions,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum number of rows; 0 means all. Default: 100 in a table, all with --json or --csv."
        ),
    ] = None,
) -> None:
    """Run an SQL query on the database. Only reads, and works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(options, buffer).database
    from itertools import islice

    from tba.buffer.tools.printing import csv_value, jsonable, refuse_equal
    from tba.buffer.tools.query import query as run_query

    if limit is None:
        limit = 0 if as_json or as_csv else _TABLE_ROWS
    with run_query(path, sql) as (headings, found):
        rows = islice(found, limit) if limit else found
        if as_json:
            refuse_equal(headings)
            print_json_rows(jsonable(headings, row) for row in rows)
        elif as_csv:
            print_csv(headings, (list(map(csv_value, row)) for row in rows))
        else:
            print_columns(headings, rows)
        if limit and next(found, None) is not None:
            note(f"first {quantity(limit, 'row')} only: --limit 0 shows all")


@app.command()
@with_config
def show(
    trajectory: Annotated[int, typer.Argument(min=1, max=_LARGEST_ID, help="The id of a trajectory.")],
    options: ConfigOptions,
    buffer: Database = None,
    as_json: Json = False,
) -> None:
    """Show one trajectory: prompt, response, reward parts, versions, and the steps that trained on it."""
    settings = _config(options, buffer)
    from tba.buffer.tools.printing import print_trajectory
    from tba.buffer.tools.show import describe, recorded_model
    from tba.buffer.tools.tokenizer import decoder_of

    model = recorded_model(settings.database, trajectory) or settings.model.path
    known = describe(settings.database, trajectory, decoder_of(model))
    if as_json:
        return print_json(known)
    return print_trajectory(known)


@app.command()
@with_config
def tail(
    options: ConfigOptions,
    buffer: Database = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of trajectories to start with.")] = 10,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Print new trajectories until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, for machines.")] = False,
    as_csv: Csv = False,
) -> None:
    """Show the newest trajectories, one per line; with --follow, also new ones as they are committed."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(options, buffer).database
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
@with_config
def export(
    file: Annotated[Path, typer.Argument(help="The file to write: .jsonl or .parquet.")],
    options: ConfigOptions,
    buffer: Database = None,
    format_: Format = None,
    where: Annotated[
        str, typer.Option(help="SQL expression over the view trajectories, such as 'reward > 0.5 AND error IS NULL'.")
    ] = "1",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write trajectories to a file, with everything that an import needs. Works while the server runs."""
    path = _config(options, buffer).database
    from tba.buffer.tools.export import export as run_export

    done = run_export(path, file, where=where, format_=format_, force=force)
    if as_json:
        return print_json(done)
    if done["without_tokens"]:
        more = quantity(done["without_tokens"], "more trajectory has", "more trajectories have")
        note(f"left out: {more} no tokens, since they were compacted")
    written = quantity(done["trajectories"], "trajectory", "trajectories")
    return typer.echo(f"{written}, {quantity(done['bytes'], 'byte')} in {file}")


@app.command("import")
@with_config
def import_(
    file: Annotated[Path, typer.Argument(help="jsonl, parquet, or the buffer database of another run.")],
    options: ConfigOptions,
    buffer: Database = None,
    format_: Format = None,
    as_json: Json = False,
) -> None:
    """Add exported trajectories or demonstrations to the run. Works with and without a server; may be repeated."""
    resolved = _resolved(options, buffer)
    settings = resolved.config
    from tba.buffer.store.starts import refuse_unnamed_run
    from tba.buffer.tools.import_file import import_file, read_rows
    from tba.common.log import configure

    # Checked first, so that a wrong file name creates no database.
    read_rows(file, settings, format_)
    if "run.name" not in resolved.origins:
        refuse_unnamed_run(settings.database, settings.run.name)
    configure("", level="WARNING")
    from tba.buffer.tools.import_target import open_target
    from tba.common.terminal import row_progress

    try:
        with open_target(settings) as target, row_progress() as on_progress:
            counts = import_file(file, target, settings, format_, on_progress=on_progress)
    except KeyboardInterrupt:
        note("interrupted: imported rows stay, and the same command adds the rest")
        raise
    if as_json:
        return print_json({"file": str(file), "run": settings.run.name, **counts})
    return typer.echo(
        f"{quantity(counts['rows'], 'row')} in {file}: {counts['new']} new in run {settings.run.name}, "
        f"{counts['there_already']} already present"
    )


@app.command()
@with_config
def compact(
    options: ConfigOptions,
    buffer: Database = None,
    keep_steps: Annotated[
        int, typer.Option(min=0, help="Keep the tokens of the batches of the newest steps, for resume.")
    ] = 1000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be dropped, and change nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Drop the tokens of trajectories that can no longer be sampled; rewards, texts and history stay.

    The server must be stopped. The settings that the run was last served with determine what can be sampled; options
    of this command take precedence. If the database is named explicitly, ./tba.toml is not read, because it may belong
    to another run.
    """
    resolved = _resolved(options, buffer, unless=("buffer.database", "run.dir"))
    path, given = resolved.config.database, resolved.config.run.name if "run.name" in resolved.origins else None
    from tba.buffer.store.starts import recorded_settings
    from tba.buffer.tools.compact import compact as run_compact
    from tba.buffer.tools.printing import print_fields
    from tba.common.clock import SystemClock

    recorded = {**recorded_settings(path, given), "buffer.database": path}
    settings = resolved.over(recorded, f"recorded in {path}", needs="buffer")
    done = run_compact(settings, SystemClock(), keep_steps=keep_steps, dry_run=dry_run)
    if as_json:
        return print_json(done)
    if dry_run:
        return typer.echo(
            f"would drop the tokens of {quantity(done['trajectories_compacted'], 'trajectory', 'trajectories')} of run "
            f"{done['run']}, {quantity(done['token_bytes'], 'byte')}, and keep those of {done['trajectories_kept']}; "
            "nothing was changed"
        )
    return print_fields({name.replace("_", " "): value for name, value in done.items()})


@app.command()
@with_config
def check(
    options: ConfigOptions,
    buffer: Database = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the comparison of indexes with their tables.")] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Check the database. Works while the server runs. The exit code is 1 if a check fails."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(options, buffer).database
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
@with_config
def backup(
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    options: ConfigOptions,
    buffer: Database = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy the database as it is now into one checked file. Works while the server runs."""
    path = _config(options, buffer).database
    from tba.buffer.tools.backup import backup as run_backup
    from tba.common.terminal import byte_progress

    with byte_progress("copying", quiet=as_json) as progress:
        done = run_backup(path, file, force=force, progress=progress)
    if as_json:
        return print_json(done)
    return typer.echo(f"{quantity(done['bytes'], 'byte')} in {file}, integrity {done['integrity']}")


@app.command()
@with_config
def restore(
    file: Annotated[Path, typer.Argument(metavar="BACKUP", help="A backup, or any other buffer database.")],
    options: ConfigOptions,
    to: Annotated[
        Path | None, typer.Option("--to", "-b", help="The database to replace; default: that of the configuration.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a backup in the place of the database, and keep what it replaces beside it. The server must be stopped."""
    path = _config(options, to).database
    from tba.buffer.tools.restore import restore as run_restore
    from tba.common.terminal import byte_progress

    with byte_progress("copying", quiet=as_json) as progress:
        done = run_restore(file, path, progress=progress)
    if as_json:
        return print_json(done)
    replaced = f"; what was there is now {done['replaced']}" if done["replaced"] else ""
    return typer.echo(f"restored {path} from {file}: {quantity(done['bytes'], 'byte')}{replaced}")


@app.command()
@with_config
def migrate(options: ConfigOptions, buffer: Database = None) -> None:
    """Migrate the database of an older release to the current schema, as starting its server does."""
    settings = _config(options, buffer)
    from tba.buffer.store.schema import schema_names
    from tba.buffer.store.store import Store
    from tba.common.errors import UsageError

    if not settings.database.exists():
        raise UsageError(f"{settings.database} does not exist")
    Store(settings.database, durability="power").close()
    typer.echo(f"{settings.database} has schema {schema_names()[-1]}")


# ---------------------------------------------------------------- helpers


def _resolved(options: ConfigOptions, buffer: Path | None, *, unless: Sequence[str] = ()) -> "Resolved":
    from tba.common.config.layers import is_database

    # What people type first: `tba buffer stats runs/demo/buffer.sqlite`.
    if options.file is not None and is_database(options.file):
        not_both(True, buffer is not None, f"FILE {options.file}", f"--buffer {buffer}")
        options, buffer = replace(options, file=None), options.file
    return options.resolve({"buffer.database": None if buffer is None else str(buffer)}, unless=unless)


def _config(options: ConfigOptions, buffer: Path | None) -> "Config":
    return _resolved(options, buffer).config
