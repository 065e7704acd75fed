"""Two trajectories, two prompts or two runs side by side."""

from starlette.requests import Request
from starlette.responses import Response

from tba.common.errors import UsageError
from tba.ui.pages import compare_runs
from tba.ui.pages.prompts import read_prompt
from tba.ui.pages.trajectories import read_trajectory
from tba.ui.site import is_number, run_of, site_of


def page(request: Request) -> Response:
    """Show two rows of `kind` (trajectories or prompts) with the ids `a` and `b`, or ask for them; or two runs."""
    run, query = run_of(request), request.query_params
    kind = query.get("kind", "trajectories")
    if kind == "runs":
        return compare_runs.page(request)
    if kind not in ("trajectories", "prompts"):
        raise UsageError(f"kind = {kind[:100]}: give trajectories, prompts or runs")
    given = [query.get(name, "").strip() for name in ("a", "b")]
    numbers = [int(text) for text in given if is_number(text)]
    if len(numbers) < len([text for text in given if text]):
        raise UsageError("a and b are ids: numbers, as the pages of trajectories and prompts show them")
    sides = []
    if len(numbers) == len(given):
        with run.rows() as rows:
            for number in numbers:
                one = read_prompt(rows, run, number) if kind == "prompts" else read_trajectory(run, number, query)
                sides.append({"id": number, **one})
    return site_of(request).page("compare.html", run=run, kind=kind, given=given, sides=sides)
