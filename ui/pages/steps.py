"""The optimiser steps of a run, and one step: what it trained on, slot by slot."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tba.buffer.store.storage_errors import stored_object
from tba.common.errors import UsageError
from tba.ui.charts import histogram
from tba.ui.site import LARGEST_NUMBER, missing, number_in, run_of, site_of

_PAGE_ROWS = 100
_REUSE = "(SELECT json_extract(metrics, '$.reuse_mean') FROM batches WHERE run = ? AND step = s.step) AS reuse"
_STEPS = f"SELECT s.*, {_REUSE} FROM staleness s WHERE run = ? AND step < ? ORDER BY step DESC LIMIT ?"  # noqa: S608
_SLOTS = """SELECT c.*, t.prompt AS prompt_id, substr(t.text, 1, 500) AS text, t.error FROM consumption c
    LEFT JOIN trajectory_rows t ON t.id = c.trajectory WHERE c.run = ? AND c.step = ? ORDER BY c.slot LIMIT ?"""
# Shown by the page's own columns or the same in all rows.
_HIDDEN = {"run", "step", "handed_out_at", "trained_at", "trained_at_text", "trajectory", "prompt"}
_HIDDEN |= {"prompt_id", "text", "error"}
_UNITS = {"staleness": "steps", "logprob": "nats", "log_ratio": "nats", "mismatch": "nats/token"}
# Others only if they differ: weights are all 1 with many objectives.
_ALWAYS_DRAWN = {"staleness", "log_ratio", "advantage"}
# A batch of this many slots is more than a browser sorts with ease.
_MOST_SLOTS = 5000
# What a reader of a step looks for first.
_FIRST = {"loss": "", "grad_norm": "", "kl": "nats", "entropy": "nats/token", "learning_rate": ""}


def listing(request: Request) -> Response:
    run = run_of(request)
    with run.rows() as rows:
        steps = rows.all(_STEPS, run.id, run.name, number_in(request, "before", LARGEST_NUMBER), _PAGE_ROWS)
    after = steps[-1]["step"] if len(steps) == _PAGE_ROWS else None
    return site_of(request).page("steps.html", run=run, steps=steps, after=after)


def page(request: Request) -> Response:
    """Show one step: its numbers, its slots in any order, and histograms of the numbers per slot."""
    run, step, first = run_of(request), request.path_params["step"], number_in(request, "from")
    with run.rows() as rows:
        about = rows.first("SELECT * FROM staleness WHERE run = ? AND step = ?", run.name, step)
        if about is None:
            raise missing(f"step {step} of run {run.name}")
        metrics = rows.value("SELECT metrics FROM batches WHERE run = ? AND step = ?", run.id, step)
        slots = rows.all(_SLOTS, run.name, step, _MOST_SLOTS)
        around = {
            "previous": rows.value("SELECT MAX(step) FROM batches WHERE run = ? AND step < ?", run.id, step),
            "following": rows.value("SELECT MIN(step) FROM batches WHERE run = ? AND step > ?", run.id, step),
        }
    # The columns of the view: a later release adds numbers to it, and the page shows them.
    columns = [name for name in (slots[0] if slots else {}) if name not in _HIDDEN and name != "slot"]
    numeric = [name for name in columns if all(isinstance(slot[name], int | float | None) for slot in slots)]
    order = request.query_params.get("sort", "slot")
    slots = _sorted(slots, order, ["slot", *numeric])
    all_known = {name: [slot[name] for slot in slots if slot[name] is not None] for name in numeric}
    known = {name: values for name, values in all_known.items() if values}
    drawn = {name: values for name, values in known.items() if name in _ALWAYS_DRAWN or len(set(values)) > 1}
    pictures = [(name, histogram(values, f"histogram of {name}")) for name, values in drawn.items()]
    return site_of(request).page(
        "step.html",
        run=run,
        step=step,
        about=about,
        slots=slots[first : first + _PAGE_ROWS],
        first=first,
        total=len(slots),
        page_rows=_PAGE_ROWS,
        columns=columns,
        units=_UNITS,
        order=order,
        pictures=pictures,
        metrics=stored_object(metrics),
        shown=_FIRST,
        **around,
    )


def _sorted(slots: list[dict[str, Any]], order: str, names: list[str]) -> list[dict[str, Any]]:
    """Return the slots by a column, descending if `order` starts with a minus; rows without a value come last."""
    name = order.removeprefix("-")
    if name not in names:
        raise UsageError(f"sort = {order[:100]}: give one of {', '.join(names)}")
    known = [slot for slot in slots if slot[name] is not None]
    known.sort(key=lambda slot: slot[name], reverse=order.startswith("-"))
    return known + [slot for slot in slots if slot[name] is None]
