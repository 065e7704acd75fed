"""The trajectories of a run by filters, and one trajectory with its tokens and training history."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.page_rows import PageRows
from tba.buffer.tools.show import describe, recorded_model
from tba.buffer.tools.tokenizer import decoder_of
from tba.common.errors import UsageError
from tba.common.wire.row_numbers import QUANTITIES
from tba.ui.runs import Run
from tba.ui.site import missing, run_of, site_of
from tba.ui.tokens import COLOURS, STRIP_TOKENS, strip
from tba.ui.trajectory_filter import SORTS, find

_COLUMNS = """id, received_at, prompt, prompt_text, reward, policy_version, stop_reason, response_tokens, searcher,
    substr(error, 1, 500) AS error, substr(text, 1, 500) AS text, times_trained, last_step"""
_SEARCHERS = "SELECT id, sender FROM clients WHERE run = ? AND trajectories > 0 ORDER BY id DESC LIMIT 200"
# A longer text is shown in full only if asked for: browsers lay out a line of a megabyte slowly.
TEXT_CHARACTERS = 20_000


def listing(request: Request) -> Response:
    """List trajectories."""
    run = run_of(request)
    given = {key: value.strip() for key, value in request.query_params.items() if value.strip()}
    with run.rows() as rows:
        found = find(rows, run, given)
        known = read_rows(rows, found.ids)
        searchers = rows.all(_SEARCHERS, run.name)
        indexed = rows.value("SELECT MAX(id) FROM search.responses") if rows.has_text_index else None
    following = urlencode({**given, "after": found.after}) if found.after else None
    return site_of(request).page(
        "trajectories.html",
        run=run,
        given=given,
        rows=known,
        found=found,
        following=following,
        searchers=searchers,
        sorts=SORTS,
        indexed=indexed,
    )


def read_rows(rows: PageRows, ids: list[int]) -> list[dict[str, Any]]:
    """Return the rows of trajectories for a table, in the order of their ids in `ids`."""
    marks = ", ".join("?" * len(ids))
    known = rows.all(f"SELECT {_COLUMNS} FROM trajectories WHERE id IN ({marks})", *ids)  # noqa: S608
    by_id = {row["id"]: row for row in known}
    return [by_id[id_] for id_ in ids if id_ in by_id]


def page(request: Request) -> Response:
    """Show one trajectory."""
    run, number = run_of(request), request.path_params["trajectory"]
    with run.rows() as rows:
        around = _neighbours(rows, run, number)
    known = read_trajectory(run, number, request.query_params)
    return site_of(request).page("trajectory.html", run=run, **known, **around)


def _neighbours(rows: PageRows, run: Run, number: int) -> dict[str, Any]:
    """Return the trajectories before and after one, and its prompt and sender. Raises HTTPException without the row."""
    sql = "SELECT prompt AS prompt_id, sender AS sender_id, visit FROM trajectory_rows WHERE id = ? AND run = ?"
    about = rows.first(sql, number, run.id) if number < 1 << 63 else None
    if about is None:
        raise missing(f"trajectory {number} of run {run.name}")
    before = "SELECT id FROM trajectory_rows WHERE id < ? AND +run = ? ORDER BY id DESC LIMIT 1"
    after = "SELECT id FROM trajectory_rows WHERE id > ? AND +run = ? ORDER BY id LIMIT 1"
    return {
        **about,
        "previous": rows.value(before, number, run.id),
        "following": rows.value(after, number, run.id),
    }


def read_trajectory(run: Run, number: int, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a trajectory with its tokens; `query` has the colour and the first token of the strip."""
    colour, first = query.get("colour", COLOURS[0]), query.get("token", "0")
    if colour not in COLOURS or not (first.isascii() and first.isdigit() and len(first) < 10):
        raise UsageError("colour is logprob or version, and token a position")
    decode = _decoder(recorded_model(run.database, number))
    known = describe(run.database, number, decode)
    limit = None if query.get("full") else TEXT_CHARACTERS
    response = known["text"] if known["text"] is not None else known.get("response_text")
    prompt = known["prompt_text"]
    total = len(known["response_ids"] or [])
    return {
        "known": known,
        "prompt": (prompt or "")[:limit],
        "response": (response or "")[:limit],
        "error": (known["error"] or "")[:limit],
        "is_cut": limit is not None and any(len(text or "") > limit for text in (prompt, response, known["error"])),
        "has_prompt": prompt is not None,
        "tokens": strip(known, decode, colour=colour, first=int(first)),
        "is_decoded": decode is not None,
        "first": int(first),
        "total": total,
        "next_token": int(first) + STRIP_TOKENS if int(first) + STRIP_TOKENS < total else None,
        "logprob_sum": sum(known["logprobs"]) if known["logprobs"] else None,
        "colour": colour,
        "quantities": QUANTITIES,
    }


@lru_cache(maxsize=4)
def _decoder(model: str) -> Callable[[list[int]], str] | None:
    """Return the decoder of a model. A large vocabulary takes half a second to load."""
    return decoder_of(model)
