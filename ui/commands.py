"""The commands `tba ui` and `tba report`. Slow imports are inside them, so that `tba --help` stays fast."""

from pathlib import Path
from typing import Annotated

import typer

from tba.common.terminal import need, note

app = typer.Typer()
_Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Directories of runs, or database files; default: all in runs/."),
]


@app.command()
def ui(
    runs: _Runs = None,
    host: Annotated[str, typer.Option(help="Address to listen at. Others than loopback need --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 5780,
    token: Annotated[
        str | None,
        typer.Option(envvar="TBA_UI_TOKEN", help="Secret that every browser must give, of at least 16 characters."),
    ] = None,
) -> None:
    """Show runs in a browser: charts, steps, prompts, trajectories, SQL. Only reads, also while a run goes on."""
    need("starlette", "ui")
    from tba.ui.server import serve

    serve(runs or [], host=host, port=port, token=token, report=note)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, or a database file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; default: report.html there.")] = None,
    name: Annotated[str | None, typer.Option("--run", help="Name of the run, if the file holds several.")] = None,
) -> None:
    """Write a run as one HTML file: numbers, charts, best and worst responses."""
    need("jinja2", "ui")
    from tba.ui.report import write_report

    typer.echo(write_report(run, out, name=name))
