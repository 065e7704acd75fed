"""The trajectories of a run by filters, and one trajectory with its tokens and training history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.tools.query import PageRows
from tba.buffer.tools.show import describe, recorded_model
from tba.buffer.tools.tokenizer import decoder_of
from tba.common.errors import UsageError, quantity
from tba.common.wire.fields import StopReason
from tba.common.wire.trajectory import QUANTITIES
from tba.ui.runs import Run
from tba.ui.site import is_number, missing, run_of, site_of
from tba.ui.trajectory_filter import SORTS, find

_COLUMNS = """id, received_at, prompt, prompt_text, reward, policy_version, stop_reason, response_tokens, searcher,
    substr(error, 1, 500) AS error, substr(text, 1, 500) AS text, times_trained, last_step"""
_SEARCHERS = "SELECT id, sender FROM clients WHERE run = ? AND trajectories > 0 ORDER BY id DESC LIMIT 200"
# A longer text is shown in full only if asked for: browsers lay out a line of a megabyte slowly.
TEXT_CHARACTERS = 20_000
STRIP_TOKENS = 2000
# Upper ends of the classes of log-probabilities, in nats: e^-0.1 is 90 %, e^-7 is 0.1 %.
_LOGPROB_LIMITS = (-7.0, -4.0, -2.0, -1.0, -0.3, -0.05)
# The classes of log-ratios that lead away from 0 on either side, in nats: e^0.1 is a factor of 1.1, e^1 of 2.7.
_RATIO_LIMITS = (0.01, 0.1, 1.0)
COLOURS = ("logprob", "version", "mismatch")


@dataclass(frozen=True)
class LogRatios:
    """log pi - log mu of each token of a response in nats, as a `step` reported them; no `values` if it did not.

    `steps` are all that reported them, `about` is a sentence for the page.
    """

    steps: list[int]
    step: int | None
    values: list[float]
    about: str


def listing(request: Request) -> Response:
    run = run_of(request)
    given = {key: value.strip() for key, value in request.query_params.items() if value.strip()}
    with run.rows() as rows:
        found = find(rows, run, given)
        known = read_rows(rows, found.ids)
        searchers = rows.all(_SEARCHERS, run.name)
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
        stops=get_args(StopReason),
    )


def read_rows(rows: PageRows, ids: list[int]) -> list[dict[str, Any]]:
    """Return the rows of trajectories for a table, in the order of their ids in `ids`."""
    marks = ", ".join("?" * len(ids))
    known = rows.all(f"SELECT {_COLUMNS} FROM trajectories WHERE id IN ({marks})", *ids)  # noqa: S608
    by_id = {row["id"]: row for row in known}
    return [by_id[id_] for id_ in ids if id_ in by_id]


def page(request: Request) -> Response:
    run, number = run_of(request), request.path_params["trajectory"]
    with run.rows() as rows:
        around = _neighbours(rows, run, number)
    query = request.query_params
    colour, first = query.get("colour", COLOURS[0]), query.get("token", "0")
    if colour not in COLOURS or not all(is_number(text) for text in (first, query.get("step", "0"))):
        raise UsageError("colour is logprob, version or mismatch, step and token are numbers")
    decode = _decoder(recorded_model(run.database, number))
    known = describe(run.database, number, decode)
    limit = None if query.get("full") else TEXT_CHARACTERS
    texts = [known["prompt_text"], known["text"] or known.get("response_text"), known["error"]]
    ratios = _log_ratios(known, query.get("step")) if colour == "mismatch" else None
    return site_of(request).page(
        "trajectory.html",
        run=run,
        known=known,
        texts=[text and text[:limit] for text in texts],
        is_cut=limit is not None and any(len(text or "") > limit for text in texts),
        turns=turns_of(known),
        tokens=strip(known, decode, colour=colour, first=int(first), log_ratios=ratios.values if ratios else ()),
        ratios=ratios,
        is_decoded=decode is not None,
        first=int(first),
        total=len(known["response_ids"] or []),
        next_token=int(first) + STRIP_TOKENS,
        colour=colour,
        colours=COLOURS,
        quantities=QUANTITIES,
        **around,
    )


def _neighbours(rows: PageRows, run: Run, number: int) -> dict[str, Any]:
    """Return the trajectories before and after one, and its prompt and sender. Raises HTTPException without the row."""
    sql = "SELECT prompt AS prompt_id, sender AS sender_id, visit FROM trajectory_rows WHERE id = ? AND run = ?"
    about = rows.first(sql, number, run.id)
    if about is None:
        raise missing(f"trajectory {number} of run {run.name}")
    before = "SELECT id FROM trajectory_rows WHERE id < ? AND +run = ? ORDER BY id DESC LIMIT 1"
    after = "SELECT id FROM trajectory_rows WHERE id > ? AND +run = ? ORDER BY id LIMIT 1"
    return {**about, "previous": rows.value(before, number, run.id), "following": rows.value(after, number, run.id)}


def turns_of(known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of an episode, [] of a single response: the turn table with `reply`, `versions`, `restarts`.

    It `restarts` if its context does not continue the one before.
    """
    pieces = known.get("pieces") or []
    replies = {piece["start"]: piece["text"] or "" for piece in pieces}
    restarts = {piece["start"] + piece["tokens"] for piece in pieces if piece["new_context"]}
    versions = [version for version, count in known["version_runs"] or [] for _ in range(count)]
    turns = []
    for turn in known["turns"]:
        start, end = turn["start"], turn["start"] + turn["tokens"]
        made_by = ", ".join(f"v{version}" for version in dict.fromkeys(versions[start:end]))
        turns.append(
            turn
            | {"reply": replies.get(start, "")[:TEXT_CHARACTERS], "versions": made_by, "restarts": start in restarts}
        )
    return turns


def _log_ratios(known: dict[str, Any], asked: str | None) -> LogRatios:
    """Return the log-ratios of the tokens of a trajectory as a step reported them, by default the newest that did."""
    steps = sorted(known["log_ratios"])
    step = int(asked) if asked else max(steps, default=None)
    if step is None:
        why = "" if known["trained_by"] else ": no step has trained on them"
        return LogRatios(steps, step, [], f"No trainer has reported log-ratios of these tokens{why}.")
    values = known["log_ratios"].get(step, [])
    if len(values) != len(known["response_ids"] or []) or not values:
        return LogRatios(steps, step, [], f"Step {step} has reported no log-ratios of these tokens.")
    found = next(one for one in known["trained_by"] if one["step"] == step)
    what = "the mismatch of trainer and engine"
    # A row has the number `mismatch` if the weights that were trained sampled it.
    if found["mismatch"] is not None:
        what += ", which had the same weights"
    elif found["staleness"]:
        what += f", and what training changed in the {quantity(found['staleness'], 'step')} since it was sampled"
    return LogRatios(steps, step, values, f"log π of the trainer at step {step} − log μ of the searcher: {what}.")


@lru_cache(maxsize=4)
def _decoder(model: str) -> Callable[..., str] | None:
    """Return the decoder of a model. A large vocabulary takes half a second to load."""
    return decoder_of(model)


@dataclass(frozen=True)
class Token:
    """One token as a page shows it: its text, the CSS class of its colour, and a sentence about it."""

    text: str
    style: str
    about: str


def strip(
    known: dict[str, Any],
    decode: Callable[..., str] | None,
    *,
    colour: str,
    first: int = 0,
    log_ratios: Sequence[float] = (),
) -> list[Token]:
    """Return the tokens of a response from the position `first` on, STRIP_TOKENS at most; [] if they were dropped.

    `known` is from `describe`. Without `decode` a token is shown by its id. `log_ratios`, in nats per token, may be
    none.
    """
    ids = known["response_ids"] or []
    versions = [version for version, count in known["version_runs"] or [] for _ in range(count)]
    distinct = {version: position for position, version in enumerate(dict.fromkeys(versions))}
    mask, logprobs = known["loss_mask"] or [], known["logprobs"]
    tokens = []
    for position in range(first, min(len(ids), first + STRIP_TOKENS)):
        counts = not mask or mask[position]
        about = f"token {position}, id {ids[position]}, {logprobs[position]:.3f} nats, version {versions[position]}"
        if colour == "version":
            style = f"v{distinct[versions[position]] % 6}"
        elif colour == "logprob":
            style = f"p{sum(logprobs[position] > limit for limit in _LOGPROB_LIMITS)}"
        elif log_ratios and counts:
            # r0 (far below 0) to r6 (far above), r3 in between.
            away = sum(abs(log_ratios[position]) > limit for limit in _RATIO_LIMITS)
            style = f"r{3 + (away if log_ratios[position] > 0 else -away)}"
            about = f"{about}, log-ratio {log_ratios[position]:+.3g} nats"
        else:
            style = ""
        tokens.append(
            Token(
                text=_piece(ids, position, decode),
                style=style if counts else f"{style} masked".strip(),
                about=about if counts else f"{about}, masked: not trained on",
            )
        )
    return tokens


def _piece(ids: list[int], position: int, decode: Callable[..., str] | None) -> str:
    """Return the text that a token adds to those before it: some tokenizers drop the space before a single token."""
    if decode is None:
        return str(ids[position])
    before = ids[max(0, position - 3) : position]
    prefix, whole = decode(before), decode([*before, ids[position]])
    text = whole[len(prefix) :] if whole.startswith(prefix) else decode([ids[position]])
    # A token with no text of its own, such as the end of the response.
    return text or decode([ids[position]], False) or f"‹{ids[position]}›"
