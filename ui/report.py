"""A run as one HTML file, to be mailed or kept: without scripts, and without a request when it is opened."""

from pathlib import Path

from markupsafe import Markup

from tba.buffer.store.starts import choose_run
from tba.buffer.tools.query import PageRows
from tba.common.clock import SystemClock
from tba.common.errors import UsageError
from tba.common.system.durable import write_text
from tba.common.terminal import note
from tba.ui.charts import Metrics, line_chart
from tba.ui.pages.run import describe, settings
from tba.ui.runs import Run, find_runs
from tba.ui.site import FOLDER, make_environment

_FILE = "report.html"
_NEWEST = 2000
_SAMPLES = 10
# Of a text; a report stays small enough for a mail.
_CHARACTERS = 2000
# One response per prompt: with MAX() or MIN(), SQLite takes the other columns from its row.
_SAMPLE = f"""SELECT t.id, %s(t.reward) AS reward, t.policy_version, t.stop_reason, t.response_tokens, p.key,
    substr(p.text, 1, {_CHARACTERS}) AS prompt, substr(t.text, 1, {_CHARACTERS}) AS text,
    length(t.text) > {_CHARACTERS} AS is_cut
    FROM (SELECT id FROM trajectory_rows WHERE run = ? ORDER BY received_at DESC, id DESC LIMIT {_NEWEST}) w
    CROSS JOIN trajectory_rows t ON t.id = w.id LEFT JOIN prompts p ON p.id = t.prompt
    WHERE t.error IS NULL GROUP BY t.prompt ORDER BY reward %s, t.id DESC LIMIT {_SAMPLES}"""  # noqa: S608


def write_report(path: Path, output: Path | None, *, name: str | None) -> Path:
    """Write the report of a run. Raises UsageError if there is no such run, or it cannot be written."""
    runs = find_runs([path], note)
    chosen = choose_run(path, (run.name for run in runs), name, "--run, or name one directory")
    run = next(run for run in runs if run.name == chosen)
    with run.rows() as rows:
        html = render(run, rows)
    target = output or run.directory / _FILE
    try:
        write_text(target, html)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}: name another file with --out") from error
    return target


def render(run: Run, rows: PageRows) -> str:
    found = Metrics(run).charts(rows)
    return (
        make_environment()
        .get_template("report.html")
        .render(
            run=run,
            written_at=SystemClock().wall(),
            charts=[(chart, line_chart(chart, found)) for chart in found.charts],
            best=rows.all(_SAMPLE % ("MAX", "DESC"), run.id),
            worst=rows.all(_SAMPLE % ("MIN", "ASC"), run.id),
            newest_count=_NEWEST,
            settings=[key for key in settings(run.starts(rows)) if key["is_set"]],
            # The project's own file.
            style=Markup((FOLDER / "static" / "style.css").read_text(encoding="utf-8")),  # noqa: S704
            **describe(run, rows),
        )
    )
