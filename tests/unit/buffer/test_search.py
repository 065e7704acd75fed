"""`tba buffer search`: full-text search in an index next to the database."""

import shutil

import pytest

from tba.common.wire import messages


@pytest.fixture
def searched(harness, trajectory, tba_buffer, tmp_path):
    """A database with two prompts, and `search(*words)`, which returns the ids of what it finds."""
    buffer = harness(tmp_path / "buffer.sqlite")
    texts: list[str | None] = ["How many apples does Ann have?", "How many pears?"]
    keys = ["apples", "pears"]
    buffer.ask(messages.RegisterPrompts(task="t", fingerprint="0" * 64, total=2, offset=0, keys=keys, texts=texts))
    buffer.announce(0, 0)
    rows = [("apples", "She has seven."), ("apples", 'Ann has "12" apples.'), ("pears", "Seven pears, so 7.")]
    buffer.put([trajectory(key, lease=0, tokens=[n], text=text) for n, (key, text) in enumerate(rows)], 0)
    buffer.service.state.store.log.sync()

    def search(*words: str) -> set[int]:
        found = tba_buffer("search", *words, "-b", buffer.store.path, "--json")
        assert found.exit_code == 0, found.message
        return {row["id"] for row in found.json}

    buffer.search = search
    return buffer


def test_words_are_found_in_responses_and_in_prompts(searched):
    assert searched.search("seven") == {1, 3}
    assert searched.search("apples") == {1, 2}
    assert searched.search("many pears") == {3}
    assert searched.search("seven pears") == {3}
    assert searched.search("bananas") == set()


@pytest.mark.parametrize("words", ['"', "AND", "a*b", "text:", "(", "NEAR(", '12"', "'"])
def test_words_are_no_syntax(searched, words):
    searched.search(f"{words} pears")


def test_a_search_shows_the_match_with_its_reward(searched, tba_buffer):
    found = tba_buffer("search", "twelve 12", "-b", searched.store.path, "--json").json
    assert found == []
    (row,) = tba_buffer("search", "12", "-b", searched.store.path, "--json").json
    assert (row["prompt"], row["reward"], row["match"]) == ("apples", 1.0, 'Ann has "[12]" apples.')


def test_a_search_finds_what_arrived_since_the_last_one(searched, trajectory):
    assert searched.search("thirteen") == set()
    searched.put([trajectory("pears", lease=0, tokens=[9], text="thirteen")], 3)
    assert searched.search("thirteen") == {4}


def test_a_replaced_database_gets_a_new_index(searched, trajectory, tmp_path, tba_buffer):
    assert searched.search("seven") == {1, 3}
    assert tba_buffer("backup", "b.sqlite", "-b", searched.store.path).exit_code == 0
    searched.put([trajectory("pears", lease=0, tokens=[9], text="seven")], 3)
    assert searched.search("seven") == {1, 3, 4}
    searched.store.close()
    assert tba_buffer("restore", "b.sqlite", "--to", searched.store.path).exit_code == 0
    assert searched.search("seven") == {1, 3}


def test_an_index_may_be_elsewhere(searched, tba_buffer, tmp_path):
    found = tba_buffer("search", "seven", "-b", searched.store.path, "--index", "here.search", "--json")
    assert (len(found.json), (tmp_path / "here.search").exists()) == (2, True)
    assert not (tmp_path / "buffer.sqlite.search").exists()
    shutil.copy(__file__, tmp_path / "here.search")
    assert "--index" in tba_buffer("search", "a", "-b", searched.store.path, "--index", "here.search").message


def test_a_search_needs_a_word(searched, tba_buffer):
    assert "at least one word" in tba_buffer("search", " ", "-b", searched.store.path).message


def test_a_trajectory_whose_prompt_and_response_match_is_found_once(searched, tba_buffer):
    found = tba_buffer("search", "apples", "-b", searched.store.path, "--json").json
    assert sorted(row["id"] for row in found) == [1, 2]


def test_a_new_database_under_a_number_of_a_deleted_one_gets_a_new_index(searched, trajectory, tba_buffer):
    assert searched.search("seven") == {1, 3}
    store = searched.store
    with store.transaction():
        # What a deleted file and a new run in one of the same inode look like.
        store.database.execute("UPDATE runs SET uuid = 'another'")
        store.database.execute("UPDATE trajectory_rows SET text = 'eight'")
    assert searched.search("seven") == set()
    assert searched.search("eight") == {1, 2, 3}
