"""Filters by words of the texts."""

import re

import pytest

from tba.common.wire import messages
from tba.tests.helpers.browser import client

pytestmark = pytest.mark.slow

TEXTS = ["seven apples", "seven\x00pears <script>alert(1)</script>", "eight \u202eapples", "seven apples again"]


@pytest.fixture
def database(harness, trajectory):
    buffer = harness()
    keys = ["p0", "p1"]
    texts: list[str | None] = ["How many apples?", "How many pears?"]
    buffer.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=2, offset=0, keys=keys, texts=texts))
    buffer.announce(0, 0)
    buffer.put([trajectory(f"p{n % 2}", lease=0, tokens=[n], text=text) for n, text in enumerate(TEXTS)], 0)
    buffer.store.close()
    return buffer.store.path


def found(database, kind="trajectories", **filters):
    page = client(database).get(f"/r/test/{kind}", params=filters)
    assert page.status_code == 200, page.text
    return [int(number) for number in re.findall(rf'href="/r/test/{kind}/(\d+)"', page.text)]


def test_words_filter_the_trajectories_and_the_prompts(database):
    assert found(database, text="seven") == [4, 2, 1]
    assert found(database, text="apples seven") == [4, 1]
    assert found(database, text="seven", prompt="1") == [1]
    assert found(database, text="seven", searcher="1", error="yes") == []
    assert found(database, text="alert(1)") == [2]
    assert found(database, text="APPLES", sort="best") == [4, 3, 1]
    assert found(database, text="bananas") == []
    assert found(database, "prompts", text="pears") == [2]
    assert found(database, "prompts", text="many p0") == [1]


@pytest.mark.parametrize("page", ["trajectories", "prompts"])
def test_words_are_neither_syntax_nor_markup(database, page):
    browser = client(database)
    for text in ('"', "AND", "a*b", "text:", "(", "NEAR(", '12"', "'", "\x00", "</input><script>", "\u202e"):
        reply = browser.get(f"/r/test/{page}", params={"text": text})
        assert reply.status_code in {200, 400}, text
        assert not [mark for mark in ("<script>alert", "</input><script>", "\x00", "\u202e") if mark in reply.text]
