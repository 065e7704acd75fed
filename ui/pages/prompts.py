"""The prompts of a run, and one prompt: all answers ever given to it, by group and policy version."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.query import PageRows
from tba.common.errors import UsageError
from tba.ui.charts import points_chart, sparkline
from tba.ui.runs import Run
from tba.ui.site import is_number, missing, run_of, site_of
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
_PASSED = "COALESCE(json_extract(t.reward_parts, '$.correct') >= 1, t.reward > 0)"
_RESPONSES = f"""SELECT t.id, t.visit, t.policy_version, t.reward, t.response_tokens, t.stop_reason, t.error,
    {_PASSED} AS passed FROM trajectory_rows t WHERE t.prompt = ? ORDER BY t.policy_version DESC, t.id DESC LIMIT ?"""  # noqa: S608
# A list needs no texts, and they are on pages of their own.
_WITH_TEXT = _RESPONSES.replace("t.error,", "t.error, substr(t.text, 1, 200) AS text,")
# The plus keeps SQLite from sorting by an index on the run: ids are in the order of registration.
_COLUMNS = "p.id, p.key, p.position, substr(p.text, 1, 500) AS text"
_PROMPTS = f"SELECT {_COLUMNS}, %s AS fits FROM prompts p WHERE +p.run = ? AND p.id > ? %s ORDER BY p.id LIMIT ?"  # noqa: S608
_BY_KEY = f"""SELECT {_COLUMNS}, %s AS fits FROM prompts p
    WHERE p.run = ? AND p.key >= ? AND p.key < ? AND p.key > ? %s ORDER BY p.key LIMIT ?"""  # noqa: S608
_ANSWERED = "AND EXISTS (SELECT 1 FROM trajectory_rows t WHERE t.prompt = p.id)"
_LAST_CHARACTER = "\U0010ffff"


@dataclass(frozen=True)
class _Wanted:
    """What a list of prompts shows: those of a kind, with a prefix of the key, with words in the text."""

    kind: str
    prefix: str
    words: list[str]

    def window(self, rows: PageRows, run: Run, after: str) -> list[dict[str, Any]]:
        """Return the next prompts after a key (with a prefix alone) or an id."""
        parts = (" AND ".join([has_word("p.text")] * len(self.words)) or "1", "" if self.kind == "all" else _ANSWERED)
        if self.prefix:
            span = (self.prefix, self.prefix + _LAST_CHARACTER)
            return rows.all(_BY_KEY % parts, *self.words, run.id, *span, after, _PAGE_ROWS)
        if after and not is_number(after):
            raise UsageError(f"after = {after[:100]}: give the id of a prompt")
        return rows.all(_PROMPTS % parts, *self.words, run.id, int(after or 0), _PAGE_ROWS)

    def continue_after(self, prompt: dict[str, Any]) -> str:
        """Return what the window after a prompt continues after."""
        return str(prompt["key"] if self.prefix else prompt["id"])


def listing(request: Request) -> Response:
    """List prompts with their pass rates, optionally only those of one kind, with a prefix of the key or with words."""
    run, query = run_of(request), request.query_params
    given = {name: query.get(name, "").strip() for name in ("kind", "key", "text")}
    if given["kind"] not in KINDS:
        raise UsageError(f"kind = {given['kind'][:100]}: give all, never, solved or flat")
    with run.rows() as rows:
        words = words_of(given["text"]) if given["text"] else []
        wanted = _Wanted(given["kind"], given["key"], words)
        found, following, examined = _find(rows, run, wanted, query.get("after", ""))
    return site_of(request).page(
        "prompts.html",
        run=run,
        prompts=found,
        kinds=KINDS,
        given=given,
        following=urlencode({**given, "after": following}) if following is not None else None,
        examined=examined,
    )


def _find(rows: PageRows, run: Run, wanted: _Wanted, after: str) -> tuple[list[dict[str, Any]], str | None, int]:
    """Return a page of prompts, what the next page continues after (None at the end), and how many were examined."""
    deadline, found, examined = time.monotonic() + _BUDGET_SECONDS, [], 0
    while True:
        window = wanted.window(rows, run, after)
        for prompt in window:
            examined += 1
            after = wanted.continue_after(prompt)
            if prompt["fits"]:
                prompt.update(summary(rows.all(_RESPONSES, prompt["id"], _MOST_RESPONSES)))
            if prompt["fits"] and (wanted.kind in ("", "all") or prompt[wanted.kind]):
                found.append(prompt)
            if len(found) == _PAGE_ROWS or time.monotonic() > deadline:
                return found, after, examined
        if len(window) < _PAGE_ROWS:
            return found, None, examined


def summary(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the pass rates of a prompt and its kinds. `responses` are its newest ones first, errors included."""
    good = [response for response in responses if response["error"] is None]
    rates = pass_rates(good)
    # The newest group: the responses of the newest visit, or of the newest version without one.
    same = "visit" if good and good[0]["visit"] else "policy_version"
    newest = [r for r in good if (r["visit"], r[same]) == (good[0]["visit"], good[0][same])]
    rewards = {response["reward"] for response in newest}
    return {
        "responses": len(responses),
        "errors": len(responses) - len(good),
        "pass_rate": sum(r["passed"] for r in good) / len(good) if good else None,
        "newest_rate": sum(r["passed"] for r in newest) / len(newest) if newest else None,
        "newest_version": good[0]["policy_version"] if good else None,
        "spark": sparkline([rate for _, rate in rates]),
        "never": bool(good) and not any(response["passed"] for response in good),
        "solved": bool(newest) and all(response["passed"] for response in newest),
        "flat": len(newest) > 1 and len(rewards) == 1,
    }


def pass_rates(responses: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (policy version, fraction that passed), by version."""
    by_version: dict[int, list[bool]] = {}
    for response in responses:
        by_version.setdefault(response["policy_version"], []).append(bool(response["passed"]))
    return [(version, sum(passed) / len(passed)) for version, passed in sorted(by_version.items())]


def page(request: Request) -> Response:
    """Show a prompt with its groups over time."""
    run = run_of(request)
    with run.rows() as rows:
        known = read_prompt(rows, run, request.path_params["prompt"])
    return site_of(request).page("prompt.html", run=run, **known)


def read_prompt(rows: PageRows, run: Run, number: int) -> dict[str, Any]:
    """Return everything about a prompt. Raises HTTPException if the run has none of this id."""
    prompt = rows.first("SELECT id, key, text, answer, position FROM prompts WHERE id = ? AND run = ?", number, run.id)
    if prompt is None:
        raise missing(f"prompt {number} of run {run.name}")
    responses = rows.all(_WITH_TEXT, number, _MOST_RESPONSES)
    visits = "SELECT id, epoch, leased_at, done_at FROM visits WHERE id = ?"
    numbers = dict.fromkeys(response["visit"] for response in responses)
    groups = [
        {
            **(rows.first(visits, visit) or {"id": None, "epoch": None, "leased_at": None, "done_at": None}),
            "responses": [response for response in responses if response["visit"] == visit],
        }
        for visit in numbers
    ]
    good = [response for response in responses if response["error"] is None]
    points = [(r["policy_version"], r["reward"], f"/r/{run.key}/trajectories/{r['id']}") for r in good[:500]]
    rewards: dict[int, list[float]] = {}
    for response in good:
        rewards.setdefault(response["policy_version"], []).append(response["reward"])
    mean = [(version, sum(own) / len(own)) for version, own in sorted(rewards.items())]
    return {
        "prompt": prompt,
        "groups": groups,
        "rates": pass_rates(good),
        "is_cut": len(responses) == _MOST_RESPONSES,
        "picture": points_chart(points, mean, "reward by policy version") if points else None,
        **{key: value for key, value in summary(responses).items() if key != "spark"},
    }
