"""`tba task new | check`, as a person types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.process.conftest import clean_environment

UNSTEADY = '''
from tba.searcher.tasks.task import Prompt, Reward

class Unsteady:
    """Prompts in the order of a set, and a scorer that fails on an empty response."""

    name = "unsteady"

    def prompts(self):
        return [Prompt(word, word, word) for word in {"stone", "river", "cloud", "maple"}]

    def held_out(self):
        return [Prompt("held", "stone", "stone")]

    def score(self, prompt, response, finished):
        return Reward(float(response[0] == prompt.answer[0]) - 1, {})
'''


SHARING = """
from tba.searcher.tasks.task import Prompt, Turn

class Sharing:
    name = "sharing"
    steps = 0

    def prompts(self):
        return [Prompt(key, "say", key) for key in "ab"]

    def held_out(self):
        return self.prompts()

    def environment(self, prompt):
        return self

    def reset(self, prompt):
        return []

    def step(self, reply, finished):
        self.steps += 1
        return Turn([("user", str(self.steps))], 1.0 if reply else 1 / 0, parts={"correct": 1.0})

    def close(self):
        pass
"""


@pytest.fixture
def checked(tba_here, capfd):
    """Run `tba task check` and return its exit code, the findings by check, and the log of its workers."""

    def run(*arguments):
        result = tba_here("task", "check", *arguments, "--json")
        assert result.output, result.message
        return result.exit_code, {one["check"]: one for one in result.json}, capfd.readouterr().err

    return run


@pytest.fixture
def doubling(tba_here, tmp_path):
    """The file that `tba task new` writes."""
    assert tba_here("task", "new", "doubling", "--dir", tmp_path).exit_code == 0
    return tmp_path / "doubling.py"


def test_a_new_task_passes_its_check_and_scores(tba_here, checked, doubling, tmp_path):
    code, findings, _ = checked(doubling, "--set", f"model.path={EXAMPLE_MODEL}")
    assert (code, {one["result"] for one in findings.values()}) == (0, {"ok"})
    assert "reads the first prompt as '10+10='" in findings["rendering"]["detail"]
    shown = tba_here("task", "check", doubling, "--key", "10", "-r", "20", "-r", "21", "--json")
    assert [(row["reward"], row["parts"]) for row in shown.json] == [
        (1.0, "correct 1, is_number 1"),
        (0.0, "correct 0, is_number 1"),
    ]
    again = tba_here("task", "new", "doubling", "--dir", tmp_path)
    assert (again.exit_code, "exists: choose another name" in again.message) == (2, True)


def test_a_check_shows_what_the_ids_of_a_prompt_spell_and_not_its_text(checked, doubling):
    """The example's tokenizer knows digits and signs: each other character is an unknown token."""
    doubling.write_text(doubling.read_text().replace('+{number}="', '+{number} is?"'))
    _, findings, _ = checked(doubling, "--set", f"model.path={EXAMPLE_MODEL}")
    assert findings["rendering"]["result"] == "warn"
    assert findings["rendering"]["detail"].endswith("reads the first prompt as '10+10<unk><unk><unk><unk>'")


def test_the_example_of_a_custom_task_passes_its_check(checked):
    code, findings, _ = checked(EXAMPLE_MODEL.parents[1] / "own_task.py")
    # Without a model, prompts are not rendered.
    assert (code, {one["result"] for one in findings.values()}) == (0, {"ok", "unchecked"})
    assert findings["prompts"]["detail"] == "5 for training, 1 held out"


def test_a_check_warns_of_an_accuracy_that_is_neither_0_nor_1(checked, doubling):
    doubling.write_text(doubling.read_text().replace("{CORRECT: correct,", "{CORRECT: correct / 4,"))
    code, findings, _ = checked(doubling)
    assert (code, findings["rewards"]["result"]) == (0, "warn")
    assert findings["rewards"]["detail"].endswith("; the part 'correct' is 0.25, and accuracy needs 1 or 0")


def test_a_check_names_what_is_wrong_with_a_task(checked, tmp_path):
    file = tmp_path / "unsteady.py"
    file.write_text(UNSTEADY)
    code, findings, log = checked(file)
    assert code == 1
    assert findings["prompts"]["detail"].endswith("1 of these are training prompts: accuracy would be too high")
    assert "training prompts" in findings["same in every process"]["detail"]
    assert "IndexError" in findings["errors"]["detail"]
    assert findings["rewards"]["detail"].startswith("-1 is below least_reward = 0")
    workers = 2
    assert 1 <= log.count("reward failed") <= workers, "equal errors of a worker are counted"
    assert f"at={file}:16" in log
    assert "IndexError" in log
    assert "Traceback" not in log


def test_a_check_plays_the_episodes_of_a_task(checked):
    code, findings, _ = checked("guess")
    assert (code, {one["result"] for one in findings.values()}) == (0, {"ok", "unchecked"})
    assert findings["same in every process"]["detail"].endswith("load the same prompts and give the same observations")
    assert findings["errors"]["detail"] == "0 of 24 episodes"
    assert findings["speed"]["detail"].endswith(" turns per second, resets included")


def test_a_check_finds_episodes_that_share_state_and_the_call_that_fails(checked, tmp_path):
    file = tmp_path / "sharing.py"
    file.write_text(SHARING)
    code, findings, _ = checked(file)
    assert (code, findings["same in every process"]["result"]) == (1, "fail")
    assert "observations differ between two processes" in findings["same in every process"]["detail"]
    assert "2 of 6 episodes: prompt 'a' after 1 answers" in findings["errors"]["detail"]
    assert "environment of sharing: step(): ZeroDivisionError" in findings["errors"]["detail"]
    # Of the turns of an episode rewards are added up, and the last value of `correct` counts.
    assert findings["rewards"]["result"] == "ok"
    assert findings["rewards"]["detail"].startswith("1 to 3, parts correct; the environment ended 0 of 4 episodes")


@pytest.mark.parametrize(("when", "failed"), [("True", "1 of 1"), ("response == 'nan'", "8 of 40")])
def test_a_scorer_that_never_ends_is_found_within_its_time_limit(checked, tmp_path, when, failed):
    """The processes that compare rewards and measure the speed have no limit, so they score nothing then."""
    file = tmp_path / "endless.py"
    file.write_text(UNSTEADY.replace("return Reward", f"while {when}: pass\n        return Reward"))
    code, findings, _ = checked(file, "--set", "task.reward_seconds=1")
    assert code == 1
    assert findings["errors"]["detail"].startswith(f"{failed} responses: ")
    assert "timed out after 1 s" in findings["errors"]["detail"]
    assert "training prompts" in findings["same in every process"]["detail"]
    assert "speed" not in findings


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ('["a", "b"]', "'a' is not a Prompt"),
        ('[Prompt("a", "a", None)]', "is not a Prompt whose key, text and answer are texts"),
        ("[]", "no prompts"),
    ],
)
def test_prompts_that_are_none_end_the_check(checked, tmp_path, prompts, sentence):
    file = tmp_path / "wrong.py"
    file.write_text(
        UNSTEADY.replace('[Prompt(word, word, word) for word in {"stone", "river", "cloud", "maple"}]', prompts)
    )
    code, findings, _ = checked(file)
    assert (code, list(findings)) == (1, ["load", "prompts"])
    assert sentence in findings["prompts"]["detail"]


HIDING = ("random", "threading", "socket", "json", "math", "numbers", "numpy", "msgpack", "tempfile", "sitecustomize")


@pytest.mark.parametrize("program", [["-m", "tba"], [Path(sys.executable).with_name("tba")]], ids=["module", "script"])
def test_no_module_of_the_working_directory_runs_in_any_process(tmp_path, program):
    """Of an unpacked archive, for example. The task file still imports its neighbours."""
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text(f"import os; os.close(os.open('{tmp_path}/ran', os.O_CREAT)); 1 / 0")
    (tmp_path / "words.py").write_text('WORDS = ["river", "stone", "cloud"]')
    ordered = UNSTEADY.replace('{"stone", "river", "cloud", "maple"}', "WORDS").replace("response[0]", "response[:1]")
    (tmp_path / "mine.py").write_text(f"from words import WORDS\n{ordered}")
    command = [*program, "task", "check", "mine.py", "--json"]
    command = [sys.executable, *command] if program[0] == "-m" else command
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, check=False)
    found = {one["check"]: one["result"] for one in json.loads(done.stdout)}
    assert (found["same in every process"], found["speed"]) == ("ok", "ok"), done.stdout
    assert not (tmp_path / "ran").exists()


def test_a_new_task_does_not_hide_a_module(tba_here):
    for name in ("math", "numpy"):
        refused = tba_here("task", "new", name)
        assert f"{name} is a module of Python or of a package, which {name}.py would hide" in refused.message
