"""The prompts of a run, and one prompt: all responses ever given to it, by group and policy version."""

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.query import PageRows
from tba.common.errors import UsageError
from tba.common.rewards import are_equal
from tba.ui.charts import sparkline
from tba.ui.runs import Run
from tba.ui.site import missing, number_in, run_of, site_of
from tba.ui.trajectory_filter import has_word, words_of

# A prompt of a run whose prompts have many responses each is read up to this number of its newest ones.
_MOST_RESPONSES = 2000
_PAGE_ROWS = 50
_BUDGET_SECONDS = 0.2
KINDS = {
    "": "with responses",
    "all": "all prompts",
    "never": "never solved",
    "solved": "solved: all of the newest group pass",
    "flat": "flat: equal rewards in the newest group",
}
# The part `correct` says what passes; without it, a reward above 0 does.
_PASSED = "COALESCE(json_extract(t.reward_parts, '$.correct') > 1 - 1e-9, t.reward > 1e-9)"
_RESPONSES = f"""SELECT t.id, t.visit, t.policy_version, t.reward, t.response_tokens, t.stop_reason, t.error,
    {_PASSED} AS passed, json_extract(t.sampling, '$.guided') AS guided
    FROM trajectory_rows t WHERE t.prompt = ? ORDER BY t.policy_version DESC, t.id DESC LIMIT ?"""  # noqa: S608
_VISIT = "SELECT id, epoch, leased_at, done_at FROM visits WHERE id = ?"
# A list needs no texts, and they are on pages of their own.
_WITH_TEXT = _RESPONSES.replace("t.error,", "t.error, substr(t.text, 1, 200) AS text,")
_COLUMNS = "p.id, p.key, substr(p.text, 1, 500) AS text"
# The plus keeps SQLite from sorting by an index on the run: ids are in the order of registration.
_PROMPTS = f"""SELECT {_COLUMNS}, p.id AS place, {{fits}} AS fits FROM prompts p
    WHERE +p.run = ? AND p.id > ? {{answered}} ORDER BY p.id LIMIT ?"""  # noqa: S608
_ANSWERED = "AND EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = p.id)"
_NEWEST = 20_000
_BY_RATE = f"""SELECT * FROM (SELECT {_COLUMNS}, ROW_NUMBER() OVER (ORDER BY w.rate {{order}}, p.id) AS place,
    {{fits}} AS fits FROM (SELECT t.prompt, AVG({_PASSED}) AS rate FROM (SELECT id FROM trajectory_rows WHERE run = ?
    ORDER BY received_at DESC LIMIT {_NEWEST}) n CROSS JOIN trajectory_rows t ON t.id = n.id
    WHERE t.error IS NULL AND json_extract(t.sampling, '$.guided') IS NULL GROUP BY t.prompt) w
    JOIN prompts p ON p.id = w.prompt)
    WHERE place > ? ORDER BY place LIMIT ?"""  # noqa: S608
# By their pass rate over the newest responses of the run.
SORTS = {"": "as registered", "hardest": "hardest first", "easiest": "easiest first"}
_HELD_OUT = """SELECT id, step, version, prompts, json_extract(metrics, '$.accuracy') AS accuracy,
    json_extract(metrics, '$.reward') AS reward, json_extract(intervals, '$.accuracy[0]') AS low,
    json_extract(intervals, '$.accuracy[1]') AS high, not_measured,
    (SELECT COUNT(*) FROM held_out_rows h WHERE h.evaluation = e.id) AS responses
    FROM evaluation_rows e WHERE run = ? ORDER BY step DESC, evaluated_at DESC LIMIT 1000"""
_HELD_OUT_RESPONSES = """SELECT prompt, prompt_text, answer, response, reward, error, passed FROM held_out h
    WHERE evaluation = ? ORDER BY passed, h.prompt LIMIT ? OFFSET ?"""


def listing(request: Request) -> Response:
    """List prompts with their pass rates, optionally only those of one kind, or with words in the key or the text."""
    run, query = run_of(request), request.query_params
    given = {name: query.get(name, "").strip() for name in ("kind", "sort", "text")}
    if given["kind"] not in KINDS or given["sort"] not in SORTS:
        raise UsageError("kind is all, never, solved or flat, sort is hardest or easiest")
    with run.rows() as rows:
        found, following, examined = _find(rows, run, given, number_in(request, "after"))
    return site_of(request).page(
        "prompts.html",
        run=run,
        prompts=found,
        kinds=KINDS,
        sorts=SORTS,
        given=given,
        following=urlencode({**given, "after": following}) if following is not None else None,
        examined=examined,
    )


def _find(rows: PageRows, run: Run, given: dict[str, str], after: int) -> tuple[list[dict[str, Any]], int | None, int]:
    """Return a page of prompts, what the next page continues after (None at the end), and how many were examined."""
    words = words_of(given["text"]) if given["text"] else []
    sql = (_BY_RATE if given["sort"] else _PROMPTS).format(
        fits=" AND ".join([has_word("p.key || ' ' || COALESCE(p.text, '')")] * len(words)) or "1",
        answered="" if given["kind"] == "all" else _ANSWERED,
        order="DESC" if given["sort"] == "easiest" else "ASC",
    )
    deadline, found, examined = time.monotonic() + _BUDGET_SECONDS, [], 0
    while True:
        window = rows.all(sql, *words, run.id, after, _PAGE_ROWS)
        for prompt in window:
            examined += 1
            after = prompt["place"]
            if prompt["fits"]:
                prompt.update(summary(rows.all(_RESPONSES, prompt["id"], _MOST_RESPONSES)))
            if prompt["fits"] and (given["kind"] in ("", "all") or prompt[given["kind"]]):
                found.append(prompt)
            if len(found) == _PAGE_ROWS or time.monotonic() > deadline:
                return found, after, examined
        if len(window) < _PAGE_ROWS:
            return found, None, examined


def held_out(request: Request) -> Response:
    """Show the evaluations of a run, and the responses of one with the references, wrong ones first."""
    run, wanted, first = run_of(request), number_in(request, "evaluation"), number_in(request, "from")
    with run.rows() as rows:
        evaluations = rows.all(_HELD_OUT, run.id)
        chosen = next((one for one in evaluations if wanted in (0, one["id"])), None)
        if chosen is None and wanted:
            raise missing(f"evaluation {wanted} of run {run.name}")
        responses = rows.all(_HELD_OUT_RESPONSES, chosen["id"], _PAGE_ROWS, first) if chosen else []
    return site_of(request).page(
        "held_out.html", run=run, evaluations=evaluations, chosen=chosen, responses=responses, first=first
    )


def summary(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the pass rates of a prompt and its kinds. `responses` are its newest ones first, errors included.

    Guided ones are left out of the rates: a part of them was given.
    """
    good = [response for response in responses if response["error"] is None and response["guided"] is None]
    by_version: dict[int, list[bool]] = {}
    for response in reversed(good):
        by_version.setdefault(response["policy_version"], []).append(bool(response["passed"]))
    # The newest group: the responses of the newest visit, or of the newest version without one.
    same = "visit" if good and good[0]["visit"] else "policy_version"
    newest = [r for r in good if (r["visit"], r[same]) == (good[0]["visit"], good[0][same])]
    rewards = [response["reward"] for response in newest]
    return {
        "responses": len(responses),
        "errors": sum(response["error"] is not None for response in responses),
        "pass_rate": sum(r["passed"] for r in good) / len(good) if good else None,
        "newest_rate": sum(r["passed"] for r in newest) / len(newest) if newest else None,
        "newest_version": good[0]["policy_version"] if good else None,
        "spark": sparkline([sum(passed) / len(passed) for passed in by_version.values()]),
        "never": bool(good) and not any(response["passed"] for response in good),
        "solved": bool(newest) and all(response["passed"] for response in newest),
        "flat": len(newest) > 1 and bool(are_equal(min(rewards), max(rewards))),
    }


def page(request: Request) -> Response:
    run, number = run_of(request), request.path_params["prompt"]
    with run.rows() as rows:
        prompt = rows.first("SELECT id, key, text, answer FROM prompts WHERE id = ? AND run = ?", number, run.id)
        if prompt is None:
            raise missing(f"prompt {number} of run {run.name}")
        responses = rows.all(_WITH_TEXT, number, _MOST_RESPONSES)
        groups = [
            {
                **(rows.first(_VISIT, visit) or {"id": None, "epoch": None, "leased_at": None, "done_at": None}),
                "responses": [response for response in responses if response["visit"] == visit],
            }
            for visit in dict.fromkeys(response["visit"] for response in responses)
        ]
    is_cut = len(responses) == _MOST_RESPONSES
    return site_of(request).page(
        "prompt.html", run=run, prompt=prompt, groups=groups, is_cut=is_cut, **summary(responses)
    )
