"""`tba buffer ...`: declared here, done elsewhere. Every import that costs time stands in a command."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tba.common.errors import EXIT_FAILED, EXIT_OK
from tba.common.quantity import quantity
from tba.common.terminal import (
    Assignments,
    ConfigFile,
    Csv,
    File,
    Json,
    not_both,
    note,
    one_file,
    print_columns,
    print_csv,
    print_json,
    print_json_rows,
    print_table,
    resolve,
    start_process,
)

if TYPE_CHECKING:
    from tba.common.config import Config
    from tba.common.config_layers import Resolved

app = typer.Typer(no_args_is_help=True, help="The replay buffer: serve it, ask it, move it.")

Database = Annotated[
    Path | None, typer.Option("--buffer", "-b", help="The database file; by default that of the configuration.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl or parquet; by default the file's suffix.")]
_TABLE_ROWS = 100
_LARGEST_ID = (1 << 63) - 1  # that SQLite has


@app.command()
def serve(file: File = None, config: ConfigFile = None, sets: Assignments = None, buffer: Database = None) -> None:
    """Serve the replay buffer of a run until SIGTERM."""
    settings = _config(one_file(file, config), sets, buffer)
    from tba.buffer.run import serve as run_server

    run_server(settings, start_process("buffer"))


@app.command()
def stats(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Counts, sizes and rewards, read from the database file; works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(one_file(file, config), sets, buffer).database
    from tba.buffer.printing import print_fields
    from tba.buffer.stats import read_stats

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
    sql: Annotated[str, typer.Argument(help="One SELECT over the views and tables of docs/database.md.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    as_json: Json = False,
    as_csv: Csv = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Most rows; 0 is all. By default 100 in a table, all for machines.")
    ] = None,
) -> None:
    """Ask the database in SQL. Reads only, and works while the server runs."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(config, sets, buffer).database
    from itertools import islice

    from tba.buffer.printing import csv_value, jsonable, refuse_equal
    from tba.buffer.query import query as run_query

    if limit is None:
        limit = 0 if as_json or as_csv else _TABLE_ROWS
    with run_query(path, sql) as result:
        rows = islice(result.rows, limit) if limit else result.rows
        if as_json:
            refuse_equal(result.headings)
            print_json_rows(jsonable(result.headings, row) for row in rows)
        elif as_csv:
            print_csv(result.headings, (list(map(csv_value, row)) for row in rows))
        else:
            print_columns(result.headings, rows)
        if limit and next(result.rows, None) is not None:
            note(f"the first {quantity(limit, 'row')}: --limit 0 shows all")


@app.command()
def show(
    trajectory: Annotated[int, typer.Argument(min=1, max=_LARGEST_ID, help="The id of a trajectory.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    as_json: Json = False,
) -> None:
    """One trajectory: prompt, response, reward parts, versions, and the steps that trained on it."""
    settings = _config(config, sets, buffer)
    from tba.buffer.printing import print_trajectory
    from tba.buffer.show import describe, recorded_model
    from tba.buffer.texts import decoder_of

    model = recorded_model(settings.database, trajectory) or settings.model.path
    known = describe(settings.database, trajectory, decoder_of(model))
    if as_json:
        return print_json(known)
    return print_trajectory(known)


@app.command()
def tail(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest to begin with.")] = 10,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, for machines.")] = False,
    as_csv: Csv = False,
) -> None:
    """The newest trajectories, one per line, and with --follow each new one as it is committed."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(one_file(file, config), sets, buffer).database
    from tba.buffer.printing import print_csv_line, print_line
    from tba.buffer.show import TAIL_COLUMNS, follow, newest

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
    file: Annotated[Path, typer.Argument(help="The file to write: .jsonl or .parquet.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    format_: Format = None,
    where: Annotated[
        str, typer.Option(help="SQL expression over the view trajectories, such as 'reward > 0.5 AND error IS NULL'.")
    ] = "1",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write trajectories to a file, with all that an import needs; works while the server runs."""
    path = _config(config, sets, buffer).database
    from tba.buffer.export import export as run_export

    done = run_export(path, file, where=where, format_=format_, force=force)
    if as_json:
        return print_json(done)
    if done["without_tokens"]:
        more = quantity(done["without_tokens"], "more trajectory has", "more trajectories have")
        note(f"{more} no tokens left (compacted): left out")
    written = quantity(done["trajectories"], "trajectory", "trajectories")
    return typer.echo(f"{written}, {quantity(done['bytes'], 'byte')} in {file}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="jsonl, parquet, or the buffer database of another run.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    format_: Format = None,
    as_json: Json = False,
) -> None:
    """Add exported trajectories or demonstrations to the run; once more adds nothing. The server may run or not."""
    resolved = _resolved(config, sets, buffer)
    settings = resolved.config
    from tba.buffer.importing import import_file, read_rows
    from tba.buffer.origin import refuse_unnamed_run
    from tba.common.log import configure

    read_rows(file, settings, format_)  # a file that is not there makes no database
    if "run.name" not in resolved.origins:
        refuse_unnamed_run(settings.database, settings.run.name)
    configure("", level="WARNING")
    from tba.buffer.sinks import open_sink
    from tba.common.terminal import row_progress

    try:
        with open_sink(settings) as sink, row_progress() as tell:
            counts = import_file(file, sink, settings, format_, tell=tell)
    except KeyboardInterrupt:
        note("interrupted: what was imported stays, and the same command again adds the rest")
        raise
    if as_json:
        return print_json({"file": str(file), "run": settings.run.name, **counts})
    return typer.echo(
        f"{quantity(counts['rows'], 'row')} in {file}: {counts['new']} new in run {settings.run.name}, "
        f"{quantity(counts['there_already'], 'was', 'were')} there already"
    )


@app.command()
def compact(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    keep_steps: Annotated[
        int, typer.Option(min=0, help="Keep the tokens of the batches of so many newest steps, for resume.")
    ] = 1000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Drop the tokens of what has left sampling; rewards, texts and history stay. Needs the server stopped.

    What can be sampled follows from the configuration that the run was last served with; what is given here goes
    before it. Where the database is named, ./tba.toml is not read: it may be that of another run.
    """
    resolved = _resolved(one_file(file, config), sets, buffer, unless=("buffer.database", "run.dir"))
    path, given = resolved.config.database, resolved.config.run.name if "run.name" in resolved.origins else None
    from tba.buffer.compact import compact as run_compact
    from tba.buffer.origin import recorded_settings
    from tba.buffer.printing import print_fields
    from tba.common.clock import SystemClock

    recorded = {**recorded_settings(path, given), "buffer.database": path}
    settings = resolved.over(recorded, f"recorded in {path}", needs="buffer")
    done = run_compact(settings, SystemClock(), keep_steps=keep_steps, dry_run=dry_run)
    if as_json:
        return print_json(done)
    return print_fields({name.replace("_", " "): value for name, value in done.items()})


@app.command()
def check(
    file: File = None,
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not compare indexes with their tables.")] = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Examine the database, also while the server runs. Exit 1 if something is wrong."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = _config(one_file(file, config), sets, buffer).database
    from tba.buffer.check import check as run_check

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
    file: Annotated[Path, typer.Argument(help="The copy to write.")],
    config: ConfigFile = None,
    sets: Assignments = None,
    buffer: Database = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy the database as it is now, while the server runs; the copy is one checked file."""
    path = _config(config, sets, buffer).database
    from tba.buffer.backup import backup as run_backup
    from tba.common.terminal import byte_progress

    with byte_progress("copying", quiet=as_json) as progress:
        done = run_backup(path, file, force=force, progress=progress)
    if as_json:
        return print_json(done)
    return typer.echo(f"{quantity(done['bytes'], 'byte')} in {file}, integrity {done['integrity']}")


@app.command()
def migrate(file: File = None, config: ConfigFile = None, sets: Assignments = None, buffer: Database = None) -> None:
    """Bring the database of an older release up to date, as starting its server does."""
    settings = _config(one_file(file, config), sets, buffer)
    from tba.buffer.schema import schema_names
    from tba.buffer.store import Store
    from tba.common.errors import UsageError

    if not settings.database.exists():
        raise UsageError(f"{settings.database} does not exist")
    Store(settings.database, durability="power").close()
    typer.echo(f"{settings.database} has schema {schema_names()[-1]}")


# ---------------------------------------------------------------- helpers


def _resolved(
    file: Path | None, sets: Sequence[str] | None, buffer: Path | None, *, unless: Sequence[str] = ()
) -> "Resolved":
    return resolve(file, sets, {"buffer.database": None if buffer is None else str(buffer)}, unless=unless)


def _config(file: Path | None, sets: Sequence[str] | None, buffer: Path | None) -> "Config":
    return _resolved(file, sets, buffer).config
