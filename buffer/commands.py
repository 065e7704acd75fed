"""The commands of `tba buffer`. Slow imports are inside the commands, so that `tba --help` stays fast."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tba.buffer.command_options import Database, Force, Insecure, existing, resolve
from tba.buffer.maintenance_commands import app as maintenance_app
from tba.common.errors import EXIT_OK
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
    refusing,
    row_progress,
    start_process,
    with_config,
)

# Commands of earlier builds, and what does their work now.
_REMOVED = {
    "migrate": "a database has one schema, and one of another build is refused with what to do",
    "serve-queries": "query the file on its own machine, with `ssh HOST tba buffer query SQL`",
}
app = typer.Typer(
    cls=refusing(_REMOVED),
    no_args_is_help=True,
    help="The replay buffer: serve, query, export, import and maintain it.",
)

Format = Annotated[str | None, typer.Option("--format", help="jsonl or parquet; default: by the file's suffix.")]
_TABLE_ROWS = 100
# The largest integer of SQLite.
_LARGEST_ID = (1 << 63) - 1


@app.command()
@with_config
def serve(options: ConfigOptions, buffer: Database = None, insecure: Insecure = False) -> None:
    """Serve the replay buffer of a run until SIGTERM."""
    resolved = resolve(options, buffer, insecure=insecure, starts=True)
    from tba.buffer.server.start import serve as run_server

    run_server(resolved.config, start_process("buffer"), resolved.origins)


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
    path = existing(options, buffer).database
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
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT over the views and tables of docs/database.md.")
    ],
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
    if limit is None:
        limit = 0 if as_json or as_csv else _TABLE_ROWS
    path = existing(options, buffer).database
    from itertools import islice

    from tba.buffer.tools.query import query as run_query

    with run_query(path, sql) as (headings, found):
        _print_rows(headings, islice(found, limit) if limit else found, as_json=as_json, as_csv=as_csv)
        if limit and next(found, None) is not None:
            note(f"first {quantity(limit, 'row')} only: --limit 0 shows all")


@app.command()
@with_config
def show(
    trajectory: Annotated[
        int, typer.Argument(metavar="TRAJECTORY", min=1, max=_LARGEST_ID, help="The id of a trajectory.")
    ],
    options: ConfigOptions,
    buffer: Database = None,
    as_json: Json = False,
) -> None:
    """Show one trajectory: prompt, response, reward parts, versions, and the steps that trained on it."""
    settings = existing(options, buffer)
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
def search(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD", help="Words that a prompt or a response must all have.")
    ],
    options: ConfigOptions,
    buffer: Database = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 20,
    index: Annotated[
        Path | None, typer.Option(help="The file of the index; default: the database's name and .search.")
    ] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Search prompts and responses for words. The first search builds an index in a file next to the database."""
    not_both(as_json, as_csv, "--json", "--csv")
    path = existing(options, buffer).database
    from tba.buffer.tools.search import COLUMNS
    from tba.buffer.tools.search import search as run_search

    found = run_search(path, " ".join(words), limit=limit, index=index)
    if as_json:
        print_json(found)
    else:
        _print_rows(COLUMNS, (list(row.values()) for row in found), as_json=False, as_csv=as_csv)


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
    path = existing(options, buffer).database
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .jsonl or .parquet.")],
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
    path = existing(options, buffer).database
    from tba.buffer.tools.export import export as run_export

    with row_progress() as on_progress:
        done = run_export(path, file, where=where, format_=format_, force=force, on_progress=on_progress)
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
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="jsonl, parquet, or the buffer database of another run.")
    ],
    options: ConfigOptions,
    buffer: Database = None,
    format_: Format = None,
    as_json: Json = False,
) -> None:
    """Add exported trajectories or demonstrations to the run. Works with and without a server; may be repeated."""
    resolved = resolve(options, buffer)
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


# The commands that change a file as a whole.
app.add_typer(maintenance_app)


def _print_rows(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, as_json: bool, as_csv: bool) -> None:
    from tba.buffer.tools.printing import csv_value, jsonable, refuse_equal

    if as_json:
        refuse_equal(headings)
        print_json_rows(jsonable(headings, row) for row in rows)
    elif as_csv:
        print_csv(headings, (list(map(csv_value, row)) for row in rows))
    else:
        found = list(rows)
        print_columns(headings, found)
        if not found:
            note("no rows")
