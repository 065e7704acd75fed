"""`tba ui` in headless Chromium, on a finished run and on one that goes on: pages, links, filters, keys, no overflow.

Needs the extra `browser` and a Chromium: that of the system, or what `playwright install chromium` downloads.
"""

import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tba.tests.helpers.checks import wait_until
from tba.tests.process.conftest import arithmetic, free_port
from tba.tests.runner import size

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: `pip install playwright`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    # Of Playwright's own event loop, which ends with the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_PATIENCE_SECONDS = 60.0
_WIDTHS = (1280, 400)
# Pages of a kind that are opened: the first ones that links lead to.
_PER_KIND = size(1, 2)
# The live run plays episodes: a second sum after the first answer.
TWICE = """
from tba.searcher.tasks.arithmetic import ArithmeticTask
from tba.searcher.tasks.task import Environment, Turn

class Twice(ArithmeticTask):
    def environment(self, prompt):
        return Asked()

class Asked(Environment):
    turns = 0

    def step(self, reply, finished):
        self.turns += 1
        return Turn([("user", "1+1=")], 0.25, self.turns == 2, {"correct": 0.0})
"""


@dataclass
class Watched:
    """A page of a browser, with what went wrong on it."""

    page: Any
    base: str
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", self._requested)
        self.page.on("response", lambda reply: self._note(reply.status >= 400, f"{reply.status} {reply.url}"))
        self.page.on("console", lambda said: self._note(said.type in ("error", "warning"), f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self._note(True, f"script: {error}"))
        self.page.on("dialog", lambda dialog: (self._note(True, f"dialog: {dialog.message}"), dialog.dismiss()))

    def _note(self, is_wrong: bool, sentence: str) -> None:
        if is_wrong:
            self.wrong.append(f"{self.page.url}: {sentence}")

    def _requested(self, request: Any) -> None:
        self._note(not request.url.startswith((f"{self.base}/", "data:")), f"a request to {request.url}")

    def open(self, address: str) -> None:
        """Open an address of the server, and check that the page is not wider than the window."""
        self.page.goto(self.base + address)
        wide, window = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        self._note(wide > window, f"{wide} pixels wide in a window of {window}")

    def links(self) -> list[str]:
        """Return the addresses of the links of the page, without the server."""
        found = self.page.eval_on_selector_all(
            "a[href]", "all => all.map(one => new URL(one.getAttribute('href'), location).href)"
        )
        return [link.removeprefix(self.base) for link in found]

    def column(self, heading: str) -> list[str]:
        """Return the cells of a column of the table, [] if the list is empty."""
        headings = self.page.locator("table.rows thead th").all_inner_texts()
        if not headings:
            return []
        return self.page.locator(f"table.rows tbody td:nth-child({headings.index(heading) + 1})").all_inner_texts()

    def filter(self, address: str, chosen: dict[str, str]) -> None:
        """Open a list, and fill in and send the form of its filter."""
        self.open(address)
        for name, value in chosen.items():
            field = self.page.locator(f"form.filter [name={name}]")
            is_choice = field.evaluate("field => field.tagName") == "SELECT"
            field.select_option(value) if is_choice else field.fill(value)
        self.page.click("form.filter button")
        self.page.wait_for_url(lambda url: all(f"{name}={value}" in url for name, value in chosen.items()))

    def press(self, key: str, url: str | Callable[[str], bool]) -> None:
        """Press a key, and wait until the page has this address."""
        self.page.keyboard.press(key)
        self.page.wait_for_url(url)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium without a network beyond this machine."""
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if path is None and not Path(own).exists():
            pytest.skip("no Chromium is installed: `apt install chromium`, or `playwright install chromium`")
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def runs(make_config_in, tba, start_tba, tmp_path) -> tuple[Path, Path]:
    """The directories of a finished run with an index of its texts, `done`, and of one that goes on, `live`."""
    for name, steps in (("done", 6), ("live", 100_000)):
        (tmp_path / name).mkdir()
        sections = arithmetic(run={"name": name}, train={"steps": steps, "keep_snapshot_every": 3})
        if name == "live":
            (tmp_path / "twice.py").write_text(TWICE)
            sections["task"] |= {"name": str(tmp_path / "twice.py")}
            sections["search"] |= {"max_turns": 2, "turn_tokens": 6, "max_tokens": 24}
        config = make_config_in(tmp_path / name, **sections | {"eval": {"at_end": name == "done"}})
        if name == "done":
            finished = tba("run", config.file)
            assert finished.returncode == 0, finished.stderr
        else:
            start_tba("run", config.file)
    return tmp_path / "done/run", tmp_path / "live/run"


@pytest.fixture
def visit(chromium, runs, start_tba) -> Iterator[Callable[[int], Watched]]:
    """A function that opens a page of a width on `tba ui` over both runs, and notes what goes wrong on it."""
    base, opened = f"http://127.0.0.1:{free_port()}", []
    wait_until((runs[1] / "buffer.sqlite").exists, what="the live run has no database")
    server = start_tba("ui", *map(str, runs), "--port", base.rpartition(":")[2])
    wait_until(lambda: answers(base, server), what="`tba ui` does not answer")

    def open_page(width: int) -> Watched:
        context = chromium.new_context(viewport={"width": width, "height": 800})
        context.set_default_timeout(1000 * _PATIENCE_SECONDS)
        opened.append(context)
        return Watched(context.new_page(), base)

    yield open_page
    for context in opened:
        context.close()


def answers(base: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "`tba ui` has ended"
    try:
        return bool(urllib.request.urlopen(base, timeout=5).status == 200)
    except (urllib.error.URLError, OSError):
        return False


def kind(address: str) -> str:
    """Return what is the same in the addresses of like pages."""
    return re.sub(r"\d+", "N", re.sub(r"=[^&]*", "", address))


def crawl(browser: Watched, start: str) -> set[str]:
    """Open pages of every kind that links lead to. Returns the kinds."""
    waiting, opened = [start], dict[str, int]()
    while waiting:
        address = waiting.pop(0)
        opened[kind(address)] = opened.get(kind(address), 0) + 1
        if opened[kind(address)] > _PER_KIND or ".csv" in address:
            continue
        if not address.startswith("/"):
            browser.wrong.append(f"a link to {address}")
            continue
        browser.open(address)
        waiting += [link for link in browser.links() if link not in waiting]
    return set(opened)


def test_the_pages_in_a_browser(visit):
    wide, narrow = map(visit, _WIDTHS)
    live_page_follows_the_run(wide)
    kinds = [crawl(browser, "/") for browser in (wide, narrow)]
    expected = {"", "/steps", "/steps/N", "/prompts", "/prompts/N", "/trajectories", "/trajectories/N",
                "/held-out", "/compare", "/sql", "/sql?query", "/config"}  # fmt: skip
    for run in ("done", "live"):
        assert {f"/r/{run}{part}" for part in expected} <= kinds[0] & kinds[1]
    charts_lead_to_steps(wide)
    charts_are_smoothed_and_have_another_axis(wide)
    keys_move(wide)
    tokens_have_the_colour_of_their_mismatch(wide)
    an_episode_shows_its_turns(wide)
    two_runs(wide)
    assert [*wide.wrong, *narrow.wrong] == []


def live_page_follows_the_run(browser: Watched) -> None:
    browser.open("/r/live")
    browser.page.wait_for_selector(".badge.running")
    before = browser.page.inner_text("#live .facts")
    # The page changes without a reload; its policy forbids `wait_for_function`.
    wait_until(lambda: browser.page.inner_text("#live .facts") != before, what="the page does not follow the run")
    browser.page.wait_for_selector(".u-over")


def charts_lead_to_steps(browser: Watched) -> None:
    browser.open("/r/done")
    browser.page.locator(".u-over").first.click()
    browser.page.wait_for_url("**/r/done/steps/*")
    # After the last step there are only evaluations.
    browser.open("/r/done")
    chart = browser.page.locator(".u-over").first
    chart.click(position={"x": chart.evaluate("one => one.clientWidth") - 2, "y": 20})
    browser.page.wait_for_url("**/r/done/held-out")


def keys_move(browser: Watched) -> None:
    page = browser.page
    browser.open("/r/done/trajectories")
    page.keyboard.press("/")
    page.keyboard.type("1")
    browser.press("Enter", "**/trajectories?reward_min=1")
    second = browser.column("id")[1]
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    browser.press("Enter", f"**/trajectories/{second}")
    browser.press("[", f"**/trajectories/{int(second) - 1}")
    browser.press("]", f"**/trajectories/{second}")


def tokens_have_the_colour_of_their_mismatch(browser: Watched) -> None:
    browser.filter("/r/done/trajectories", {"step": "0", "error": "no"})
    browser.open(f"/r/done/trajectories/{browser.column('id')[0]}")
    browser.page.click("text=mismatch >> nth=0")
    browser.page.wait_for_url("**?colour=mismatch")
    tokens = browser.page.locator(".strip span")
    assert tokens.count() > 0
    for token in tokens.all():
        assert "log-ratio " in (token.get_attribute("title") or "")
        assert token.evaluate("one => getComputedStyle(one).backgroundColor") != "rgba(0, 0, 0, 0)"


def an_episode_shows_its_turns(browser: Watched) -> None:
    browser.filter("/r/live/trajectories", {"stop": "completed"})
    browser.open(f"/r/live/trajectories/{browser.column('id')[0]}?colour=version")
    rows = browser.page.locator("h2:text-is('Turns') + .scroll tbody tr")
    first, second = (row.locator("td").all_inner_texts() for row in rows.all())
    assert ([first[0], first[2], first[3]], second[0], second[3]) == (["1", "1+1=", "0.25"], "2", "0.25")
    tokens = browser.page.locator(".strip span")
    masked = [token for token in tokens.all() if "masked" in (token.get_attribute("class") or "")]
    assert "".join(token.inner_text() for token in masked).endswith("1+1=")
    assert all("not trained on" in (token.get_attribute("title") or "") for token in masked)
    # All others were sampled, by the versions that the turns name.
    assert tokens.count() - len(masked) == int(first[5]) + int(second[5])
    versions = {re.search(r"version (\d+)", token.get_attribute("title") or "")[1] for token in tokens.all()}  # type: ignore[index]
    assert {f"v{version}" for version in versions} == {*first[6].split(", "), *second[6].split(", ")}


def charts_are_smoothed_and_have_another_axis(browser: Watched) -> None:
    page = browser.page
    browser.open("/r/done?metric=seconds_wait")
    page.wait_for_selector("text=seconds_wait >> nth=0")
    page.locator("#smoothing").fill("0.5")
    page.wait_for_selector(".u-legend .raw", state="attached")
    page.select_option("#axis", "hours")
    page.wait_for_selector(".u-legend >> text=hour")


def two_runs(browser: Watched) -> None:
    page = browser.page
    browser.open("/")
    page.check("input[value=done]")
    page.check("input[value=live]")
    page.locator("form:has(input[value=live]) button").click()
    page.wait_for_url("**/compare**")
    page.wait_for_selector(".u-over")
    assert "done" in page.locator(".u-legend").first.inner_text()
    assert "train.steps" in page.inner_text("main")
