"""`tba task new | check | show`, as a person types them."""

import json

import pytest

from tba.tests.conftest import EXAMPLE_MODEL

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


@pytest.fixture
def checked(tba):
    """Run `tba task check` and return its exit code and the findings by check."""

    def run(*arguments):
        result = tba("task", "check", *map(str, arguments), "--json", timeout=200)
        assert result.stdout, result.stderr
        return result.returncode, {one["check"]: one for one in json.loads(result.stdout)}

    return run


def test_a_new_task_passes_its_check_and_scores(tba, checked, tmp_path):
    assert tba("task", "new", "doubling", "--dir", str(tmp_path)).returncode == 0
    file = tmp_path / "doubling.py"
    code, findings = checked(file, "--set", f"model.path={EXAMPLE_MODEL}")
    assert code == 0
    assert {one["result"] for one in findings.values()} == {"ok"}
    assert "'10+10='" in findings["rendering"]["detail"]
    shown = tba("task", "show", str(file), "--key", "10", "-r", "20", "-r", "21", "--json")
    assert [(row["reward"], row["parts"]) for row in json.loads(shown.stdout)] == [
        (1.0, "correct 1, is_number 1"),
        (0.0, "correct 0, is_number 1"),
    ]
    again = tba("task", "new", "doubling", "--dir", str(tmp_path))
    assert again.returncode == 2
    assert "exists: choose another name" in again.stderr


def test_a_check_names_what_is_wrong_with_a_task(checked, tmp_path):
    file = tmp_path / "unsteady.py"
    file.write_text(UNSTEADY)
    code, findings = checked(file)
    assert code == 1
    assert findings["prompts"]["detail"].endswith("1 of these are training prompts too: accuracy would be too high")
    assert "training prompts" in findings["same in every process"]["detail"]
    assert "IndexError" in findings["errors"]["detail"]
    assert findings["rewards"]["detail"].startswith("-1 is below least_reward = 0")
