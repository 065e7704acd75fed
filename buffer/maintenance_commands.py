"""The commands of `tba buffer` that check, copy, shrink and replace a database file. Slow imports are inside them."""

from pathlib import Path
from typing import Annotated

import typer

from tba.buffer.command_options import Database, Force, existing, resolve, resolve_config
from tba.common.errors import EXIT_FAILED, UsageError
from tba.common.quantity import quantity
from tba.common.terminal import (
    ConfigOptions,
    Csv,
    Json,
    not_both,
    note,
    print_csv,
    print_json,
    print_table,
    with_config,
)

app = typer.Typer()


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
    resolved = resolve(options, buffer, unless=("buffer.database", "run.dir"), exists=True)
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
def prune(
    options: ConfigOptions,
    buffer: Database = None,
    before_step: Annotated[
        int | None, typer.Option(min=1, help="Delete trajectories that only steps before this one used, or none.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Delete this whole run; with --before-step, its old rows.")] = None,
    archive: Annotated[
        Path | None, typer.Option("--export", help="Write what is deleted to this file first: .jsonl or .parquet.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without an export.")] = False,
    keep_steps: Annotated[int, typer.Option(min=0, help="Newest trained steps that stay, for resume.")] = 1000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what would be deleted, and change nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete old trajectories with the batches that used them, or a whole run, and shrink the file.

    The server must be stopped. Steps that a checkpoint next to the database may repeat are never deleted.
    """
    if before_step is None and run is None:
        raise UsageError("name what to delete: --before-step N, --run NAME, or both")
    if not (yes or dry_run or archive):
        raise UsageError("--export FILE keeps what is deleted in a file; --yes deletes it for good")
    path = existing(options, buffer).database
    from tba.buffer.tools.prune import prune_run, prune_steps

    if before_step is None:
        done = prune_run(path, run or "", archive=archive, dry_run=dry_run)
    else:
        done = prune_steps(path, run, before_step, keep_steps=keep_steps, archive=archive, dry_run=dry_run)
    if as_json:
        return print_json(done)
    if archive and not dry_run and (lost := done["trajectories"] - done["exported"]):
        note(f"not in {archive}: {quantity(lost, 'trajectory', 'trajectories')} without tokens, since compacted")
    rows = quantity(done["trajectories"], "trajectory", "trajectories")
    return typer.echo(
        f"{'would delete' if dry_run else 'deleted'} {rows} and "
        f"{quantity(done['batches'], 'batch', 'batches')} of run {done['run']}, {done['trajectories_kept']} stay; "
        f"{path} has {quantity(done['file_bytes_after'], 'byte')}, {done['file_bytes_before']} before"
    )


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
    path = existing(options, buffer).database
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    options: ConfigOptions,
    buffer: Database = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy the database as it is now into one checked file. Works while the server runs."""
    path = existing(options, buffer).database
    from tba.buffer.tools.backup import backup as run_backup
    from tba.common.terminal import byte_progress

    with byte_progress(quiet=as_json) as progress:
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
    """Put a backup in the place of the database, and keep what it replaces next to it. The server must be stopped."""
    path = resolve_config(options, to).database
    from tba.buffer.tools.restore import restore as run_restore
    from tba.common.terminal import byte_progress

    with byte_progress(quiet=as_json) as progress:
        done = run_restore(file, path, progress=progress)
    if as_json:
        return print_json(done)
    replaced = f"; what was there is now {done['replaced']}" if done["replaced"] else ""
    return typer.echo(f"restored {path} from {file}: {quantity(done['bytes'], 'byte')}{replaced}")
