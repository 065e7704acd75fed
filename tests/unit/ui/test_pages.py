"""The pages of `tba ui` on a real database: all open, all links lead somewhere, hostile text stays text."""

import html
import json
import re
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tba.common.errors import UsageError
from tba.common.system.durable import exclusive_lock
from tba.common.wire import messages
from tba.tests.helpers.browser import client, copies, pages, select
from tba.tests.helpers.buffer import change
from tba.tests.helpers.puts import make_episode, numbers_of
from tba.ui.charts import histogram
from tba.ui.pages.run import describe, write_report
from tba.ui.runs import find_runs
from tba.ui.trajectory_filter import _plan, statements

HOSTILE = (
    "<script>alert(1)</script>",
    "\" onmouseover='alert(1)' </textarea></pre><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "nul \x00 bell \x07 escape \x1b[31m",
    "right to left \u202e mark \u200f end",
    "a" * 1_000_000,
)

EVALUATION = """INSERT INTO evaluation_rows (run, version, step, prompts, prompt_set, settings, evaluated_at, seconds,
    metrics, intervals, not_measured) VALUES (1, 0, 0, 2, 'a', 'b', 1.0, 1.0, '{metrics}', '{{}}', {not_measured})"""


def links(page):
    found = re.findall(r'(?:href|src|hx-get|data-source)="([^"]*)"', page.text)
    here = page.url.path
    return {here + link if link.startswith("?") else link for link in map(html.unescape, found)}


def listed(texts, kind="trajectories"):
    """Return the numbers of the rows to which pages of a list lead."""
    return [int(number) for number in re.findall(rf'href="/r/test/{kind}/(\d+)"', "".join(texts))]


@pytest.mark.slow
def test_every_page_opens_and_every_link_leads_to_one(filled):
    browser, opened, waiting = client(filled), {}, ["/"]
    while waiting:
        address = waiting.pop()
        if address not in opened:
            opened[address] = page = browser.get(address)
            if page.headers.get("content-type", "").startswith("text/html"):
                # Each saved query is a process: test_queries.py opens them.
                waiting += [link for link in links(page) if "?query=" not in link]
    assert {address: page.status_code for address, page in opened.items() if page.status_code not in {200, 204}} == {}
    kinds = {re.sub(r"\d+", "N", address.partition("?")[0]) for address in opened}
    assert {f"/r/test{part}" for part in ("", "/live", "/charts.json", "/config", "/steps", "/steps/N", "/prompts",
            "/prompts/N", "/trajectories", "/trajectories/N", "/held-out", "/compare", "/sql")} <= kinds  # fmt: skip
    # A page loads and names nothing outside the server.
    assert not [address for address in opened if not address.startswith("/")]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_as_text(harness, trajectory, text):
    buffer = harness(fill=(1, 0))
    lease = buffer.lease(1).visits[0].lease
    parts = {text[:50]: 0.5}
    good = trajectory("p0", lease, text=text, reward_parts=parts, metadata={"note": text[:1000]})
    bad = trajectory("p0", lease, text=text, error=text[:4000], stop_reason="error", tokens=[])
    buffer.put([good, bad], first_sequence=0)
    buffer.store.close()
    browser = client(buffer.store.path)
    addresses = ["/r/test/trajectories/1?full=1", "/r/test/trajectories/2", "/r/test/trajectories", "/r/test/prompts/1",
                 "/r/test/sql?sql=SELECT text, error FROM trajectories"]  # fmt: skip
    for page in map(browser.get, addresses):
        assert page.status_code == 200
        assert not [tag for tag in ("<script>alert", "<img", "onmouseover='") if tag in page.text]
        assert not {"\x00", "\x07", "\x1b", "\u202e", "\u200f"} & set(page.text)
        assert "script-src 'self';" in page.headers["content-security-policy"]
    whole = html.unescape(browser.get(addresses[0]).text)
    assert (text if text.isprintable() else text.split()[0]) in whole


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("", [7, 6, 5, 4, 3, 2, 1]),
        ("error=yes", [7]),
        ("trained=no", [7]),
        ("trained=yes", [6, 5, 4, 3, 2, 1]),
        ("stop=error", [7]),
        ("reward_min=0.5", [6, 3]),
        ("reward_min=0.25&sort=best", [6, 3, 5, 2]),
        ("part=correct&error=no&part_min=1&sort=oldest", [1, 2, 3, 4, 5, 6]),
        ("version=0&error=no", [1, 2, 3, 4, 5, 6]),
        ("version=3", []),
        ("prompt=2", [6, 5, 4]),
        ("searcher=1&length_max=0", [7]),
        ("step=0&reward_max=0", [1, 4]),
        ("step=5", []),
    ],
)
def test_filters_find_the_rows_that_sql_finds(filled, filters, expected):
    found = listed([client(filled).get(f"/r/test/trajectories?{filters}").text])
    assert (sorted(found) if "step" in filters else found) == (sorted(expected) if "step" in filters else expected)


@pytest.mark.parametrize("name", ["log_ratio", "advantage", "weight", "mismatch", "staleness", "reward"])
def test_the_slots_of_a_step_are_sorted_by_each_number_drawn_and_in_pages_below_its_numbers(filled, monkeypatch, name):
    monkeypatch.setattr("tba.ui.pages.steps._PAGE_ROWS", 4)
    change(filled, """UPDATE batches SET metrics = '{"loss": 0.5, "kl": 0.25}'""")
    slots = select(filled, f"SELECT slot, {name} FROM consumption ORDER BY {name} DESC NULLS LAST, slot")
    texts = [client(filled).get(f"/r/test/steps/0?sort=-{name}&from={first}").text for first in (0, 4)]
    found = re.findall(r'<tr>\s*<td class="n">(\d+)</td>', "".join(texts))
    assert [int(slot) for slot in found] == [slot for slot, _ in slots]
    for page in texts:
        assert page.index("<dt>loss</dt><dd>0.5") < page.index("<dt>kl</dt><dd>0.25") < page.index("Slots</h2>")
        assert f'aria-label="histogram of {name}"' in page


def test_a_histogram_has_a_bar_for_each_of_few_integers_or_twenty_with_the_largest_value_in_the_last():
    for values, bars in (
        ([3, 1, 3], ["1: 1", "3: 2"]),
        ([0.0, 0.25, 2.0], ["0.05: 1", "0.25: 1", "1.95: 1"]),
    ):
        assert re.findall("<title>([^<]*)</title>", histogram(values, "of values")) == bars


def test_the_page_of_a_trajectory_shows_the_numbers_of_each_step_that_trained_on_it(filled):
    ((trajectory, *numbers),) = select(
        filled, "SELECT trajectory, log_ratio, advantage FROM consumption WHERE slot = 5"
    )
    page = client(filled).get(f"/r/test/trajectories/{trajectory}").text
    row = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("Training</h2>") :])
    assert {f"{number:g}" for number in numbers} <= set(row)


def test_the_page_of_an_episode_shows_its_turns(harness, example_model):
    buffer = harness()
    buffer.store.open_run("test", seed=0, config={"model": {"path": str(example_model)}}, software={})
    buffer.fill(1, 0)
    buffer.put([make_episode()], 0)
    buffer.store.close()
    page = client(buffer.store.path).get("/r/test/trajectories/1").text
    turns = page[page.index("Turns</h2>") : page.index("Response</h2>")]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", turns)
    rows = [cells[n : n + 8] for n in range(0, len(cells), 8)]
    assert [(row[0], row[3], row[5], row[6]) for row in rows] == [
        ("1", "0.25", "2", "v0"), ("2", "-0.5", "1", "v0"), ("3", "0", "2", "v0"), ("4", "1", "1", "v0")
    ]  # fmt: skip
    assert [row[1].startswith("<small>a new context") for row in rows] == [False, False, True, True]
    assert all(row[2] == "on" for row in rows)


def test_huge_numbers_of_rows_are_drawn(harness):
    buffer = harness(fill=(1, 4))
    buffer.sample(0, prompts=1, samples=4)
    buffer.report(0, rows=numbers_of(4, advantage=[1.7e308, -1.7e308, 0.0, None], log_ratio=[1e300, None, 5e-324, 0.0]))
    buffer.store.close()
    page = client(buffer.store.path).get("/r/test/steps/0?sort=advantage")
    assert page.status_code == 200
    assert "nan" not in page.text
    assert "inf" not in page.text


def test_held_out_responses_have_their_references_and_wrong_ones_are_first(filled):
    response = "INSERT INTO held_out_rows VALUES (1, 1, ?, ?, ?, ?, ?, '{}', ?)"
    rows = [
        ["a", "1+1=", "2", "2", 1.0, None],
        ["b", "<b>", "5", "<i>", 0.0, None],
        ["c", "3+3=", "6", "", 0.0, "late"],
    ]
    change(filled, EVALUATION.format(metrics='{"accuracy": 0.5, "reward": 0.5}', not_measured="NULL"))
    change(filled, *((response, row) for row in rows))
    page = client(filled).get("/r/test/held-out").text
    cells = re.findall(r'<td class="text pre">(.*?)</td>', page)
    assert cells == ["&lt;b&gt;", "5", "&lt;i&gt;", "3+3=", "6", "late", "1+1=", "2", "2"]


@pytest.mark.parametrize(("sort", "expected"), [("hardest", [2, 1]), ("easiest", [1, 2]), ("", [1, 2])])
def test_prompts_are_sorted_by_their_pass_rate(filled, monkeypatch, sort, expected):
    monkeypatch.setattr("tba.ui.pages.prompts._PAGE_ROWS", 1)
    change(filled, "UPDATE trajectory_rows SET reward_parts = json_object('correct', prompt = 1)")
    assert listed(pages(client(filled), f"/r/test/prompts?sort={sort}"), "prompts") == expected


@pytest.mark.parametrize(("sort", "order"), [("worst", "reward, id DESC"), ("newest", "received_at DESC, id DESC")])
def test_pages_of_a_list_continue_where_the_last_one_ended(filled, monkeypatch, sort, order):
    monkeypatch.setattr("tba.ui.trajectory_filter.PAGE_ROWS", 2)
    monkeypatch.setattr("tba.ui.trajectory_filter._WINDOW_ROWS", 3)
    ids = select(filled, f"SELECT id FROM trajectory_rows ORDER BY {order}")
    assert listed(pages(client(filled), f"/r/test/trajectories?sort={sort}")) == [id_ for (id_,) in ids]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sort": "best", "reward_min": "0.1", "error": "yes"},
        {"version": "0"},
        {"sort": "worst", "reward_min": "0.1"},
        {"prompt": "1"},
        {"searcher": "1"},
        {"step": "0"},
    ],
    ids=str,
)
def test_every_window_of_a_list_follows_an_index(filled, given):
    (run,) = find_runs([filled], print)
    with run.rows() as rows:
        plan = _plan(rows, run, given)
        assert plan is not None
        for sql, values in statements(plan, (1.0, 5)):
            steps = [row["detail"] for row in rows.all(f"EXPLAIN QUERY PLAN {sql}", *values, 10)]
            assert steps[1].startswith("SEARCH")
            assert [step for step in steps if "TEMP B-TREE" in step] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("DELETE FROM prompts", "only reads"),
        ("ATTACH '/tmp/x.sqlite' AS x", "only reads"),
        ("SELECT load_extension('x')", "only reads"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n", "takes longer"),
    ],
)
def test_sql_reads_this_file_only_and_within_its_time(filled, monkeypatch, sql, sentence):
    monkeypatch.setattr("tba.ui.pages.sql.SECONDS", 0.2 if sentence == "takes longer" else 30)
    before = filled.read_bytes()
    browser = client(filled)
    for address in ("/r/test/sql", "/r/test/sql.csv"):
        page = browser.get(address, params={"sql": sql})
        assert (page.status_code, sentence in page.text) == (400, True)
    assert filled.read_bytes() == before


def test_numbers_of_sql_are_aligned_to_the_right_and_by_their_decimals(filled):
    sql = "SELECT 1 AS id, 0.5 AS share, 'a' AS word, NULL AS none UNION ALL SELECT 1000, NULL, 'b', 7"
    page = client(filled).get("/r/test/sql", params={"sql": sql}).text
    table = page[page.index("<thead>") :]
    assert re.findall(r'<th( class="n")?>(\w+)', table) == [(' class="n"', "id"), (' class="n"', "share"), ("", "word"),
                                                           (' class="n"', "none")]  # fmt: skip
    assert re.findall(r'<td class="n">(?:<span class="quiet">)?([\w.]*)', table) == [
        "1", "0.5000", "NULL", "1000", "NULL", "7"
    ]  # fmt: skip


def test_sql_returns_csv_in_which_no_text_is_a_formula(filled):
    reply = client(filled).get("/r/test/sql.csv", params={"sql": "SELECT id, text FROM trajectories WHERE id < 3"})
    assert reply.text == "id,text\n1,answer 00\n2,answer 01\n"
    texts = ("=1+1", "+a", "-a", "@a", "\t=a", "-12", "+1.5e3", "a=1")
    sql = "SELECT " + ", ".join(f"'{text}'" for text in texts) + ", -3, x'3d'"
    row = client(filled).get("/r/test/sql.csv", params={"sql": sql}).text.splitlines()[1]
    assert row == "'=1+1,'+a,'-a,'@a,'\t=a,-12,+1.5e3,a=1,-3,3d"


def test_an_address_of_nothing_says_so_and_a_number_of_thousands_of_digits_is_none(filled):
    browser, large = client(filled), "9" * 23
    nothing = ("no", "test/steps/7", "test/prompts/99", f"test/trajectories/{large}", "test/held-out?evaluation=999")
    for address in (*(f"/r/{one}" for one in nothing), "/r/test/compare?b=no", "/?b=no&b=test"):
        page = browser.get(address)
        assert page.status_code == 404, address
        assert "there is no run" in page.text or "the database has no" in page.text, address
    queries = ("steps?before=N", "trajectories?step=N", "trajectories/1?token=N", "held-out?from=N", "steps/0?from=N")
    for address in ("steps/N", "prompts/N", "trajectories/N", *queries):
        assert browser.get(f"/r/test/{address}".replace("N", "9" * 5000)).status_code in (400, 404), address


def test_the_changing_part_is_sent_only_after_a_change_and_when_the_run_has_ended(filled):
    browser, launch = client(filled), filled.with_name("launcher.lock")
    launch.write_text("pid 1 on h\nending\n")
    for changes in ([], ["UPDATE trajectory_rows SET id = id + 1 WHERE id = 7"]):
        with exclusive_lock(launch, "taken"):
            (address,) = (link for link in links(browser.get("/r/test")) if "/live" in link)
            assert browser.get(address).status_code == 204
            change(filled, *changes)
            assert browser.get(address).status_code == (200 if changes else 204)
        ended = browser.get(address)
        assert (ended.status_code, "badge stopped" in ended.text) == (200, True)


def test_the_list_of_runs_has_the_newest_first_and_what_one_asks_of_each(filled, tmp_path):
    config = json.dumps({"objective": {"name": "rloo"}, "model": {"path": "models/small"}, "train": {"steps": 9}})
    first, foreign, newest = copies(filled, tmp_path / "runs", *"abc")
    foreign.write_bytes(b"no database" * 100)
    for copy, trained_at in ((first, 5), (newest, 9)):
        change(copy, ("UPDATE batches SET trained_at = ?", [trained_at]), ("UPDATE starts SET config = ?", [config]))
    change(newest, EVALUATION.format(metrics='{"accuracy": 0.5}', not_measured="NULL"))
    said: list[str] = []
    browser = client(tmp_path / "runs", report=said.append)
    rows = browser.get("/").text.split("<tr>")[2:]
    # Runs of one name have addresses of their own, and a foreign file is left out.
    assert [re.findall(r'href="/r/([^"]*)"', row) for row in rows] == [["test~c"], ["test"]]
    assert [[word in row for word in (">rloo<", ">small<", "50 %")] for row in rows] == [
        [True] * 3,
        [True, True, False],
    ]
    assert browser.get("/r/test~c/trajectories/1").status_code == 200
    assert len(said) == 1


@pytest.mark.parametrize(
    "odd",
    [
        ("UPDATE starts SET config = ?", ['{"model": {"path": 5}}']),
        EVALUATION.format(metrics='{"accuracy": "high"}', not_measured="NULL"),
        "UPDATE batches SET metrics = '{'",
        "UPDATE starts SET config = '{nope'",
        ("UPDATE starts SET config = ?", ['{"objective": 5}']),
    ],
    ids=["model", "accuracy", "metrics", "no settings", "a section"],
)
def test_a_database_with_odd_values_hides_no_other_run_of_the_list(filled, tmp_path, odd):
    change(copies(filled, tmp_path / "runs", "a", "b")[1], odd)
    browser = client(tmp_path / "runs")
    listed = browser.get("/")
    assert (listed.status_code, listed.text.count('type="checkbox"')) == (200, 2)
    # Its own pages are there, or say what is wrong, with the way to the others.
    for address in ("/r/test~b", "/r/test~b/steps", "/r/test~b/config", "/r/test~b/compare?b=test"):
        page = browser.get(address)
        assert page.status_code in (200, 503), page.text
        assert page.status_code == 200 or "<h1>Run test cannot be read</h1>" in page.text
        assert 'href="/r/test~b/sql"' in page.text


@pytest.mark.slow
def test_a_server_is_asked_only_while_it_has_the_database_open(filled):
    with socket.create_server(("127.0.0.1", 0)) as server, closing(sqlite3.connect(filled)) as database:
        server.settimeout(0.2)
        config = {"buffer": {"address": f"tcp://127.0.0.1:{server.getsockname()[1]}"}}
        # The open connection leaves a write-ahead log, as a server does that was killed.
        database.execute("UPDATE starts SET config = ?", [json.dumps(config)])
        database.commit()
        assert filled.with_name(f"{filled.name}-wal").stat().st_size
        assert client(filled).get("/r/test").status_code == 200
        with pytest.raises(TimeoutError):
            server.accept()
        with exclusive_lock(filled.with_name(f"{filled.name}.lock"), "taken"):
            assert client(filled).get("/r/test").status_code == 200
            server.accept()[0].close()


@pytest.mark.slow
def test_a_run_that_has_ended_has_the_state_that_tba_runs_gives_it_and_its_reason(filled):
    def shown():
        badge = re.search(
            r'class="badge (\w+)">(\w+)</span>\s*<span.*?>(.*?)</span></p>', client(filled).get("/r/test").text
        )
        assert badge is not None
        assert badge[1] == badge[2]
        return badge[1], badge[3]

    launch = filled.with_name("launcher.lock")
    launch.write_text("pid 1 on h\nfailed: <b> the trainer failed\nending\n")
    assert shown() == ("crashed", "&lt;b&gt; the trainer failed")
    launch.write_text("pid 1 on h\nending\n")
    assert shown() == ("stopped", "continue it with --resume")
    with exclusive_lock(launch, "taken"):
        assert shown() == ("starting", "`tba run` is starting the buffer")
    change(filled, "UPDATE runs SET finished_step = 3")
    assert shown() == ("finished", "")
    with exclusive_lock(launch, "taken"):
        assert shown() == ("finished", "`tba run` is ending")


@pytest.mark.parametrize("recorded", [True, False])
def test_the_configuration_says_what_set_each_value_where_that_is_recorded(filled, tmp_path, recorded):
    origins = {"train.steps": "here/<b>.toml", "train.publish_every": "TBA_TRAIN__PUBLISH_EVERY"}
    config = {"train": {"steps": 7, "publish_every": 1, "warmup_steps": 3}, "buffer": {"address": ""}}
    values = [json.dumps(config), json.dumps(origins) if recorded else None]
    change(filled, ("UPDATE starts SET config = ?, origins = ?", values))
    report = write_report(filled, tmp_path / "r.html", name=None).read_text()
    texts = [client(filled).get("/r/test/config").text, report]
    cells = [dict(re.findall(r"<tr[^>]*><td>(train.\w+)</td>(.*?)</tr>", page)) for page in texts]
    wanted = {"train.steps": "here/&lt;b&gt;.toml", "train.publish_every": "TBA_TRAIN__PUBLISH_EVERY",
              "train.warmup_steps": "default"}  # fmt: skip
    # A report has only what differs from the defaults.
    for page, rows in zip(texts, cells, strict=True):
        assert "train.steps" in rows
        assert (">set by</th>" in page) == recorded
        assert [key for key in rows if rows[key].endswith(f">{wanted[key]}</td>")] == (list(rows) if recorded else [])


def test_settings_are_told_over_the_starts_and_each_start_with_what_it_changed(filled, tmp_path):
    again = """INSERT INTO starts (run, started_at, config, software)
        SELECT run, 1e10, json_set(config, '$.train.learning_rate', 3e-5), '{}' FROM starts"""
    config = json.dumps({"train": {"learning_rate": 1e-5, "steps": 9}})
    change(
        filled, "UPDATE batches SET trained_at = 5", ("UPDATE starts SET config = ?, started_at = 1", [config]), again
    )
    page = client(filled).get("/r/test/config").text
    report = write_report(filled, tmp_path / "r.html", name=None).read_text()
    for text in (page, report):
        assert re.search(r"<td>train.learning_rate</td><td[^>]*>1e-05 until step 1, then 3e-05</td>", text)
    starts = page[page.index("Starts</h2>") : page.index("Settings</h2>")]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row)[1:] for row in starts.split("<tr>")[2:]]
    assert rows == [["1", "train.learning_rate", "1e-05", "3e-05"], ["0", "the first start", "", ""]]


def test_a_mean_says_what_it_is_of_and_an_evaluation_why_it_measured_nothing(filled, tmp_path):
    evaluation = EVALUATION.format(metrics="{}", not_measured="'2 of 2 responses could not be scored: ConnectError'")
    change(filled, evaluation, "UPDATE prompts SET answer = '42'")
    browser, report = client(filled), write_report(filled, tmp_path / "r.html", name=None).read_text()
    for page in (browser.get("/r/test").text, report):
        assert "of the 6 of 7 without an error" in page
        assert "not measured: 2 of 2 responses could not be scored: ConnectError" in page
    for address in ("prompts/1", "trajectories/1"):
        assert "reference answer: 42" in browser.get(f"/r/test/{address}").text


def test_totals_count_every_client_and_the_trainer_is_listed(harness, trajectory, monkeypatch):
    monkeypatch.setattr("tba.ui.pages.run._CLIENTS", 2)
    buffer = harness(fill=(1, 0))
    buffer.ask(messages.Hello(host="h", pid=1), sender="t.1", role="trainer")
    for number in range(4):
        buffer.put([trajectory(lease=0, tokens=[number], reward=number)], 0, sender=f"s{number}.1")
    buffer.store.close()
    (run,) = find_runs([buffer.store.path], print)
    with run.rows() as rows:
        facts = describe(run, rows)
    assert facts["totals"] == {"trajectories": 4, "errors": 0, "response_tokens": 4, "mean_reward": 1.5}
    assert [client["role"] for client in facts["clients"]] == ["trainer", "searcher"]
    # Charts come first, and clients that are not connected are folded.
    text = client(buffer.store.path).get("/r/test").text
    parts = ('id="charts"', "Clients</h2>", '<details id="gone"><summary>2 not connected')
    assert [*map(text.index, parts)] == sorted(map(text.index, parts))


@pytest.mark.parametrize(
    ("folders", "recorded", "expected"),
    [
        (("again", "test"), "", {"test": "test", "test~again": "again"}),
        (("again", "target", "test"), "runs/target", {"test": "target", "test~test": "test", "test~again": "again"}),
    ],
    ids=["by its name", "by the directory of its last start"],
)
def test_a_copy_of_a_run_does_not_take_its_address(filled, tmp_path, folders, recorded, expected):
    if recorded:
        change(filled, ("UPDATE starts SET config = ?", [json.dumps({"run": {"dir": recorded}})]))
    copies(filled, tmp_path / "runs", *folders)
    assert {run.key: run.directory.name for run in find_runs([tmp_path / "runs"], print)} == expected


def test_settings_are_written_as_toml_and_runs_of_different_tasks_are_said_to_be_so(filled, tmp_path):
    copy = tmp_path / "other.sqlite"
    shutil.copyfile(filled, copy)
    task = {"name": "answers", "options": {"prompt": "frage", "several": True, "parts": ["a"]}}
    for file, own in ((filled, task | {"options": {}}), (copy, task)):
        change(file, ("UPDATE starts SET config = ?", [json.dumps({"task": own, "train": {"steps": 9}})]))
    both = client(filled, copy)
    other = next(run.key for run in find_runs([filled, copy], print) if run.key != "test")
    shown = '{ prompt = "frage", several = true, parts = ["a"] }'
    for address in (f"/r/{other}/config", f"/r/test/compare?b={other}"):
        assert shown in html.unescape(both.get(address).text)
    assert "The runs have different tasks (task.options)" in both.get(f"/r/test/compare?b={other}").text
    assert "different tasks" not in both.get("/r/test/compare?b=test").text


def test_the_bar_of_progress_goes_with_the_last_step_and_a_report_is_one_file_without_scripts(filled, tmp_path):
    config, metrics = json.dumps({"train": {"steps": 9}}), json.dumps({"kl": -0.1})
    settings, step = "UPDATE starts SET config = ?", "UPDATE batches SET metrics = ?, trained_at = 5"
    change(filled, (settings, [config]), (step, [metrics]))
    assert "<progress" in client(filled).get("/r/test").text
    report = write_report(filled, tmp_path / "r.html", name=None).read_text()
    assert "answer 12" in report
    assert "estimate from stale samples, may be negative" in report
    assert re.findall(r'<script|src="|href="', report) == []
    with pytest.raises(UsageError, match=r"/nowhere/x\.html cannot be written: No such file or directory"):
        write_report(filled, Path("/nowhere/x.html"), name=None)
    change(filled, "UPDATE runs SET finished_step = 9")
    assert "<progress" not in client(filled).get("/r/test").text
