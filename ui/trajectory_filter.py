"""The list of trajectories: filters, and pages by key instead of by offset.

A page follows one index in its order (`_ORDERS`) and tests the other conditions on the rows that it meets, a window of
rows at a time. It stops when it is full or when its time is over, and the next page continues at the same row. The time
of a page therefore depends neither on the size of the table nor on how rare the wanted rows are.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.buffer.tools.query import PageRows
from tba.common.errors import UsageError
from tba.ui.runs import Run

PAGE_ROWS = 50
_WINDOW_ROWS = 1000
_BUDGET_SECONDS = 0.2
_MOST_INTEGER = (1 << 63) - 1


@dataclass(frozen=True)
class _Order:
    """An index to follow. `key` and `id` are its columns in the FROM clause `table`, which `where` restricts.

    `by_key`: keys ascend and ids descend, which no index does. A statement then reads the rows of one key.
    """

    table: str
    where: str
    key: str
    id: str = "t.id"
    descends: bool = True
    by_key: bool = False

    @property
    def by(self) -> str:
        direction = "DESC" if self.descends else "ASC"
        return f"{self.id} DESC" if self.by_key else f"{self.key} {direction}, {self.id} {direction}"


_ORDERS = {
    "newest": _Order("trajectory_rows t", "t.run = ?", "t.received_at"),
    "oldest": _Order("trajectory_rows t", "t.run = ?", "t.received_at", descends=False),
    "best": _Order("trajectory_rows t", "t.run = ?", "t.reward"),
    "worst": _Order("trajectory_rows t", "t.run = ?", "t.reward", descends=False, by_key=True),
    "prompt": _Order("trajectory_rows t", "t.prompt = ?", "t.policy_version"),
    "searcher": _Order("trajectory_rows t", "t.sender = ?", "t.sequence"),
    "step": _Order("consumption_rows c", "c.batch = ?", "c.slot", id="c.trajectory", descends=False),
}
SORTS = ("newest", "oldest", "best", "worst")
_CONDITIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "reward_min": ("t.reward >= ?", float),
    "reward_max": ("t.reward <= ?", float),
    "version": ("t.policy_version = ?", int),
    "stop": ("t.stop_reason = ?", str),
    "length_min": ("t.response_tokens >= ?", int),
    "length_max": ("t.response_tokens <= ?", int),
    "prompt": ("t.prompt = ?", int),
    "searcher": ("t.sender = ?", int),
}
_TRAINED = "EXISTS (SELECT 1 FROM consumption_rows u WHERE u.trajectory = t.id)"
_WORDS_CHARACTERS = 200
_CHOICES = {
    "error": {"yes": "t.error IS NOT NULL", "no": "t.error IS NULL"},
    "trained": {"yes": _TRAINED, "no": f"NOT {_TRAINED}"},
}


@dataclass(frozen=True)
class Page:
    """One page of ids. `after` continues the list, None at its end; `examined` rows were read to find these."""

    ids: list[int]
    after: str | None
    examined: int
    sort: str


@dataclass(frozen=True)
class _Plan:
    """How a page is read: an order with the value that restricts it, and conditions on its rows."""

    order: _Order
    start: Any
    bounds: Sequence[tuple[str, Any]]
    conditions: Sequence[tuple[str, Sequence[Any]]]
    sort: str


def find(rows: PageRows, run: Run, given: Mapping[str, str]) -> Page:
    """Return the page of trajectories that fulfil the filters in `given`. Raises UsageError for a wrong value."""
    plan = _plan(rows, run, given)
    if plan is None:
        return Page([], None, 0, "newest")
    deadline = time.monotonic() + _BUDGET_SECONDS
    ids: list[int] = []
    examined, cursor, size = 0, _cursor(given.get("after", "")), PAGE_ROWS
    while True:
        window = _window(rows, plan, cursor, size)
        for row in window:
            examined += 1
            if row["wanted"]:
                ids.append(row["id"])
            if len(ids) == PAGE_ROWS:
                return Page(ids, _text((row["key"], row["id"])), examined, plan.sort)
        if len(window) < (1 if plan.order.by_key else size):
            return Page(ids, None, examined, plan.sort)
        # A page of common rows reads few, a search for rare ones makes few statements.
        size = min(2 * size, _WINDOW_ROWS)
        cursor = (window[-1]["key"], window[-1]["id"])
        if time.monotonic() > deadline:
            return Page(ids, _text(cursor), examined, plan.sort)


def _window(rows: PageRows, plan: _Plan, cursor: tuple[float, int] | None, size: int) -> list[dict[str, Any]]:
    """Return the next `size` rows of an order, whether they are wanted or not."""
    window: list[dict[str, Any]] = []
    for sql, values in statements(plan, cursor):
        window += rows.all(sql, *values, size - len(window))
        if len(window) == size:
            break
    return window


def statements(plan: _Plan, cursor: tuple[float, int] | None) -> list[tuple[str, list[Any]]]:
    """Return the SELECTs of one window with their values, without that of the limit.

    After a cursor there are two: the rest of the rows with its key, then the next keys. One comparison of pairs would
    read all rows of that key again.
    """
    order = plan.order
    sign = "<" if order.descends else ">"
    ranges = [(" AND ".join(["1", *(text for text, _ in plan.bounds)]), [value for _, value in plan.bounds])]
    if cursor is not None:
        # The cursor is within the bounds, so only the bound at the far end still matters.
        far = [bound for bound in plan.bounds if (">=" in bound[0]) == order.descends]
        ranges = [
            (f"{order.key} = ? AND {order.id} {'<' if order.by_key else sign} ?", list(cursor)),
            (" AND ".join([f"{order.key} {sign} ?", *(text for text, _ in far)]), [cursor[0], *(v for _, v in far)]),
        ]
    if order.by_key:
        span, more = ranges[-1]
        least = f"(SELECT MIN({order.key}) FROM {order.table} WHERE {order.where} AND {span})"  # noqa: S608
        ranges[-1] = (f"{order.key} = {least}", [plan.start, *more])
    wanted = " AND ".join(f"({condition})" for condition, _ in plan.conditions)
    values = [*(value for _, several in plan.conditions for value in several), plan.start]
    return [
        (
            # CROSS JOIN keeps the order of the loops: the index first, then each row by its id.
            f"SELECT w.id, w.key, {wanted} AS wanted FROM (SELECT {order.id} AS id, {order.key} AS key "  # noqa: S608
            f"FROM {order.table} WHERE {order.where} AND {span} "
            f"ORDER BY {order.by} LIMIT ?) w "
            "CROSS JOIN trajectory_rows t ON t.id = w.id",
            [*values, *more],
        )
        for span, more in ranges
    ]


def _plan(rows: PageRows, run: Run, given: Mapping[str, str]) -> _Plan | None:
    """Return how to read the rows that `given` asks for; None if there can be none."""
    sort = given.get("sort") or ("oldest" if given.get("version") else "newest")
    if sort not in SORTS:
        raise UsageError(f"sort = {sort}: give one of {', '.join(SORTS)}")
    name = _order_name(given, sort)
    # An address may name a prompt or a searcher of another run of the same file.
    conditions: list[tuple[str, Sequence[Any]]] = [("t.run = ?", [run.id]), *_conditions(given)]
    start: Any = run.id
    if name == "step":
        of_step = "SELECT id FROM batches WHERE run = ? AND step = ?"
        start = rows.value(of_step, run.id, _value("step", given["step"], int))
    elif name in ("prompt", "searcher"):
        start = _value(name, given[name], int)
    if start is None:
        return None
    bounds: list[tuple[str, Any]] = []
    if name in ("newest", "oldest"):
        bounds += _version_bound(rows, run, given)
    elif name in SORTS:
        bounds += [(text, values[0]) for text, values in conditions if text.startswith("t.reward")]
    return _Plan(_ORDERS[name], start, bounds, conditions, name)


def _order_name(given: Mapping[str, str], sort: str) -> str:
    """Return the name of the order that leaves the fewest rows."""
    for name in ("step", "prompt"):
        if given.get(name):
            return name
    return "searcher" if given.get("searcher") and not given.get("sort") else sort


def _conditions(given: Mapping[str, str]) -> Iterator[tuple[str, Sequence[Any]]]:
    for name, (condition, kind) in _CONDITIONS.items():
        if given.get(name):
            yield condition, [_value(name, given[name], kind)]
    for name, choices in _CHOICES.items():
        if chosen := given.get(name):
            if chosen not in choices:
                raise UsageError(f"{name} = {chosen[:100]}: give yes or no")
            yield choices[chosen], []
    if given.get("text"):
        yield from ((has_word("t.text"), [word]) for word in words_of(given["text"]))
    yield from _part_conditions(given)


def words_of(text: str) -> list[str]:
    """Return the words of a filter. Raises UsageError without one."""
    words = text[:_WORDS_CHARACTERS].split()
    if not words:
        raise UsageError("text: name at least one word")
    return words


def has_word(column: str) -> str:
    """Return the condition that a text contains a word, in any case of ASCII letters, also after a NUL."""
    return f"instr(lower({column}), lower(?)) > 0"


def _version_bound(rows: PageRows, run: Run, given: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the time since which a policy version can have produced anything: that of its announcement."""
    if not given.get("version"):
        return []
    version = _value("version", given["version"], int)
    announced = "SELECT announced_at FROM snapshots WHERE run = ? AND version = ?"
    since = rows.value(announced, run.id, version)
    return [] if since is None else [("t.received_at >= ?", since)]


def _part_conditions(given: Mapping[str, str]) -> list[tuple[str, Sequence[Any]]]:
    part = given.get("part")
    if not part:
        return []
    if '"' in part or "\0" in part:
        raise UsageError("part: the name of a part of the reward has no quotation mark and no NUL")
    path = f'$."{part}"'
    conditions: list[tuple[str, Sequence[Any]]] = [("json_extract(t.reward_parts, ?) IS NOT NULL", [path])]
    for name, comparison in (("part_min", ">="), ("part_max", "<=")):
        if given.get(name):
            value = _value(name, given[name], float)
            conditions.append((f"json_extract(t.reward_parts, ?) {comparison} ?", [path, value]))
    return conditions


def _value(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{name} = {text[:100]}: give a number") from None
    if isinstance(value, int) and abs(value) > _MOST_INTEGER:
        raise UsageError(f"{name} = {text[:100]}: the number is too large")
    return value


def _cursor(text: str) -> tuple[float, int] | None:
    if not text:
        return None
    key, _, id_ = text.partition(":")
    number = _value("after", key, float)
    return number, _value("after", id_, int)


def _text(cursor: tuple[float, int]) -> str:
    # repr keeps every digit of a time, so that the next page starts exactly at the next row.
    return f"{cursor[0]!r}:{cursor[1]}"
