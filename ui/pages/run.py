"""The page of a run: charts, what it does now, its clients, and its configuration; and its report.

The report is one HTML file, to be mailed or kept: without scripts, and without a request when it is opened.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tba.buffer.store.starts import Start, by_key, choose_run
from tba.buffer.tools.query import PageRows
from tba.common.config import Config
from tba.common.config.layers import DEFAULT_ORIGIN
from tba.common.errors import UsageError
from tba.common.evaluations import read_evaluations
from tba.common.system.durable import write_text
from tba.common.terminal import note
from tba.common.wire.messages import Status
from tba.deploy.run_directory import state_of
from tba.ui.charts import Metrics, line_chart
from tba.ui.runs import Run, find_runs, value_over_steps
from tba.ui.site import FOLDER, make_environment, run_of, site_of

_CLIENTS = 200
_MOST_CHOSEN = 100
# While a server answers, its words change without a new row.
_CLOCK_SECONDS = 10
# Trainers and evaluators deliver nothing, and are not to be cut off by many searchers.
_NEWEST_CLIENTS = """SELECT * FROM clients WHERE run = ? AND role IN ('searcher', 'trainer', 'evaluator', 'importer')
    ORDER BY role = 'trainer' DESC, role = 'evaluator' DESC, last_received_at DESC LIMIT ?"""
# What the clients have delivered, without reading the trajectories.
_TOTALS = """SELECT COALESCE(SUM(trajectories), 0) AS trajectories, COALESCE(SUM(errors), 0) AS errors,
    COALESCE(SUM(response_tokens), 0) AS response_tokens,
    SUM(reward_sum) / NULLIF(SUM(trajectories) - SUM(errors), 0) AS mean_reward FROM senders WHERE run = ?"""
_HELD_OUT = """SELECT version, accuracy, reward, not_measured FROM evaluations WHERE run = ?
    ORDER BY step DESC, evaluated_at DESC LIMIT 1"""
_NEWEST_BATCH = """SELECT step, trained_at, CASE WHEN json_valid(metrics) THEN json_extract(metrics, '$.reward_mean')
    END AS reward FROM batches WHERE run = ? AND trained_at IS NOT NULL ORDER BY step DESC LIMIT 1"""


def page(request: Request) -> Response:
    run, site = run_of(request), site_of(request)
    with run.rows() as rows:
        known = describe(run, rows) | {"starts": run.starts(rows), "names": site.metrics_of(run).names(rows)}
    return site.page("run.html", run=run, chosen=chosen_metrics(request), **known)


def live(request: Request) -> Response:
    """Return the part of the page that changes, or 204 if nothing has changed since the page was made."""
    run = run_of(request)
    with run.rows() as rows:
        known = describe(run, rows)
    if request.query_params.get("seen") == known["seen"]:
        return Response(status_code=204)
    return site_of(request).page("live.html", run=run, is_part=True, **known)


def charts(request: Request) -> Response:
    run = run_of(request)
    with run.rows() as rows:
        return JSONResponse(asdict(site_of(request).metrics_of(run).charts(rows, chosen_metrics(request))))


def chosen_metrics(request: Request) -> list[str]:
    return request.query_params.getlist("metric")[:_MOST_CHOSEN]


def config(request: Request) -> Response:
    """Show the configuration of the run over its starts, and what each start changed."""
    run = run_of(request)
    with run.rows() as rows:
        starts = run.starts(rows)
        keys = settings(starts)
    return site_of(request).page("config.html", run=run, keys=keys, starts=starts)


def describe(run: Run, rows: PageRows) -> dict[str, Any]:
    """Return the facts of a run: totals, clients, and what its server says if one answers."""
    recorded = run.config(rows)
    status = run.status(recorded)
    # Without a server, `tba eval` writes its results into the directory only.
    last = rows.all(_HELD_OUT, run.name) or read_evaluations(run.directory, run.name)[-1:]
    batch = rows.first(_NEWEST_BATCH, run.id)
    about = rows.first("SELECT created_at, prompts, task FROM runs WHERE id = ?", run.id)
    newest = rows.first("SELECT version, step, announced_at FROM snapshots WHERE run = ? ORDER BY version DESC", run.id)
    steps = batch["step"] + 1 if batch else 0
    finished = rows.value("SELECT finished_step FROM runs WHERE id = ?", run.id) is not None
    state, why = state_of(run.database, {"finished": finished, "steps": steps}, status)
    # What the server knows of those that are connected.
    connected = {client.sender: client for client in status.clients} if status else {}
    clients = rows.all(_NEWEST_CLIENTS, run.name, _CLIENTS)
    return {
        "about": about,
        "state": state,
        "why": why,
        "status": status,
        "steps_done": steps,
        "trained_at": batch["trained_at"] if batch else None,
        "reward": batch["reward"] if batch else None,
        "steps": recorded.get("train.steps"),
        "objective": recorded.get("objective.name"),
        "model": recorded.get("model.path"),
        "newest": newest,
        "totals": rows.first(_TOTALS, run.id),
        "held_out": {**dict.fromkeys(("accuracy", "reward", "not_measured")), **last[0]} if last else None,
        "clients": [{**client, "now": connected.get(client["sender"])} for client in clients],
        "seen": _version(rows, status, steps, state, why),
    }


def _version(rows: PageRows, status: Status | None, *shown: object) -> str:
    """Return a text that changes when the page does: what it has `shown`, newest rows, and a clock while it runs."""
    newest = rows.first("SELECT (SELECT MAX(id) FROM trajectory_rows), (SELECT MAX(evaluated_at) FROM evaluation_rows)")
    clock = int(time.time() / _CLOCK_SECONDS) if status is not None else 0
    return xxhash.xxh64_hexdigest(repr((newest, clock, *shown)).encode())


def settings(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return the recorded values by key, with their origins, and whether each differs from the default of this release.

    The value of a setting that a start changed is a sentence. The origin is None if origins were not recorded.
    """
    defaults = by_key(Config().model_dump(mode="json"))
    changed = {key for start in starts for key, _, _ in start.changes}
    newest = starts[-1] if starts else Start()
    keys = []
    for key, value in newest.settings.items():
        if key.startswith("software."):
            continue
        usual = defaults.get(key)
        is_set = key in changed or key not in defaults or str(value) != str(usual)
        origin = None if newest.origins is None else newest.origins.get(key, DEFAULT_ORIGIN)
        shown = value_over_steps(starts, key) if key in changed else value
        keys.append({"key": key, "value": shown, "default": usual, "is_set": is_set, "origin": origin})
    return keys


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
    run, template = next(run for run in runs if run.name == chosen), make_environment().get_template("report.html")
    with run.rows() as rows:
        found = Metrics(run).charts(rows)
        html = template.render(
            run=run,
            written_at=time.time(),
            charts=[(chart, line_chart(chart, found)) for chart in found.charts],
            best=rows.all(_SAMPLE % ("MAX", "DESC"), run.id),
            worst=rows.all(_SAMPLE % ("MIN", "ASC"), run.id),
            newest_count=_NEWEST,
            settings=[key for key in settings(run.starts(rows)) if key["is_set"]],
            # The project's own file.
            style=Markup((FOLDER / "static" / "style.css").read_text(encoding="utf-8")),  # noqa: S704
            **describe(run, rows),
        )
    target = output or run.directory / _FILE
    try:
        write_text(target, html)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}: name another file with --out") from error
    return target
