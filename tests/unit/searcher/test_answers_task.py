"""The task `answers`: columns of any names, and which responses are right; and the reasoning-gym task."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.common.config import Config
from tba.common.errors import TaskError
from tba.searcher.scoring.scoring import score
from tba.searcher.tasks import load_task
from tba.searcher.tasks.answers_task import AnswersTask
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.reasoning import Items, decode_entry, encode_entry
from tba.searcher.tasks.task import Prompt, Reward

DOCS = Path(__file__).parents[3] / "docs/tasks.md"
THOUGHT = "<think>Is it (A)? Answer: 7. \\boxed{1}</think>"
# (grade, right answer, response, whether it is right)
VERDICTS = [
    ("exact", "Paris", "Paris", True),
    ("exact", "New  York", "New York", True),
    ("exact", "Paris", "paris", False),
    ("exact", "Paris", "Paris is large", False),
    ("exact", "Paris", "I thought of Rome.\nAnswer: Paris", True),
    ("exact", "Paris", "**Answer:** Paris", True),
    ("exact", "Paris", "**Final Answer: Paris**\nI hope it is right.", True),
    ("exact", "Paris", "Answer: Paris\nAnswer: Rome", False),
    ("exact", "Paris", r"It is \boxed{Paris}, not Rome", True),
    ("exact", "Paris", r"It is \boxed{\text{Paris}}", True),
    ("exact", "Paris", r"It is \boxed{\mathrm{Rome}}", False),
    ("exact", "Paris", "<think>Rome</think> <answer> Paris </answer>", True),
    ("exact", "Paris", "<answer>Rome</answer>\nParis", False),
    ("exact", "Paris", THOUGHT + "Paris", True),
    ("exact", "7", THOUGHT, False),
    ("exact", "", "", None),
    ("exact", " ** ", "", None),
    ("exact", "caf\u00e9", "cafe\u0301", True),
    ("exact", "Answer: 9", "Answer: 9", None),
    ("number", "34", "There are 34 apples.", True),
    ("number", "34", "34 of 35", False),
    ("number", "1,234", "1234", True),
    ("number", "-5", "\N{MINUS SIGN}5", True),
    ("number", "$12", "12 dollars", True),
    ("number", "34", "Answer: 34\nI counted 2 times.", True),
    ("number", "34", THOUGHT, False),
    ("number", "2", r"\boxed{\frac{1}{2}}", False),
    ("number", "2", r"\boxed{x \ge 2}", False),
    ("number", "2", r"\boxed{1, 2}", False),
    ("number", "5", r"\boxed{10^5}", False),
    ("number", "5", r"\boxed{x = 5}", True),
    ("number", "-1234.5", r"\boxed{-\$1{,}234.50}", True),
    ("number", "34", r"\boxed{34 \text{ apples}}", True),
    ("number", "0", "none", False),
    ("number", "3/4", "4", None),
    ("number", "34 apples", "34", None),
    ("number", "nan", "nan", None),
    ("number", "0.1", "0.1000000000000000000001", False),
    ("choice", "B", "B", True),
    ("choice", "B", "(B)", True),
    ("choice", "B", "B) Paris", True),
    ("choice", "(B)", "The answer is B", True),
    ("choice", "B.", "The correct option is (B), not (A).", True),
    ("choice", "b", "**Answer: B**", True),
    ("choice", "B", r"\boxed{\text{(B)}}", True),
    ("choice", "B", r"\textbf{(B)}\ 12", True),
    ("choice", "B", "A is wrong, since Rome is in Italy.\nB", True),
    ("choice", "B", "Either (A) or (B).", False),
    ("choice", "A", "A cat", False),
    ("choice", "A", THOUGHT, False),
    ("choice", "B", "(B) or (C)", False),
    ("choice", "C", "B or (C)", False),
    ("choice", "B", "Answer: (B) or (C)", False),
    ("choice", "B", r"\boxed{(B)(C)}", False),
    ("choice", "B", r"\boxed{(B) \text{ or } (C)}", False),
    ("choice", "B", "The answer is B or C", False),
    ("choice", "B", "The answer is B, I think.", True),
    ("choice", "B", "B. A city of France", True),
    ("choice", "B", "(B) Vitamins A and C", True),
    ("choice", "AB", "A", None),
    ("choice", "Paris", "Paris", None),
    ("regex", r"(?i)\bparis\b", "It is PARIS!", True),
    ("regex", r"^\d+$", "12", True),
    ("regex", r"paris", THOUGHT.replace("7", "paris"), False),
    ("regex", ".*", "anything", None),
    ("regex", "(", "(", None),
]


@pytest.fixture
def make(tmp_path):
    """Make a task of rows; keyword arguments are its options."""

    def of(*rows, **options) -> AnswersTask:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return AnswersTask(str(tmp_path / "rows.jsonl"), **options)

    return of


SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]


@pytest.mark.parametrize("column", ["prompt", "messages", "question"])
def test_messages_as_the_text_of_json_are_messages(make, column):
    (prompt,), (flat,) = (make({column: said, "answer": "5"}).prompts() for said in (SAID, f" {json.dumps(SAID)}\n"))
    assert flat == prompt
    assert flat.messages == (("system", "Be brief."), ("user", "2+3?"))


ASKED = SAID[1:]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
ANSWERED = {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "2+3?", "system": "Be brief."}, (("system", "Be brief."), ("user", "2+3?"))),
        ({"prompt": ASKED, "system": "Be brief."}, (("system", "Be brief."), ("user", "2+3?"))),
        ({"prompt": json.dumps(ASKED), "system": "Be brief."}, (("system", "Be brief."), ("user", "2+3?"))),
        ({"prompt": SAID, "system": "Be brief."}, (("system", "Be brief."), ("user", "2+3?"))),
        ({"prompt": SAID, "system": ""}, (("system", "Be brief."), ("user", "2+3?"))),
        ({"prompt": "2+3?", "system": None}, ()),
        ({"prompt": "2+3?", "system": ""}, ()),
    ],
)
def test_the_system_of_a_row_is_the_first_message(make, row, messages):
    (prompt,) = make(row | {"answer": "5"}).prompts()
    assert prompt.messages == messages
    assert prompt.text == ("" if messages else "2+3?")


def test_the_input_of_an_instruction_is_refused_rather_than_dropped(make):
    row = {"instruction": "Add.", "answer": "5"}
    with pytest.raises(TaskError, match="rows.jsonl:1: its `input` would be ignored"):
        make(row | {"input": "2+3"}, prompt="instruction")
    assert [one.text for one in make(row | {"input": ""}, prompt="instruction").prompts()] == ["Add."]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ("a", [{"text": "a"}]),
        (json.dumps(["a", "2"]), [{"text": "a"}, {"text": "2"}]),
        ([{"text": "a", "doc_id": 1}, "b"], [{"text": "a", "doc_id": 1}, {"text": "b"}]),
        ([json.dumps({"title": "t", "text": "a"})], [{"title": "t", "text": "a"}]),
        (["[1] a reference"], [{"text": "[1] a reference"}]),
    ],
)
def test_documents_of_a_row_may_be_texts(make, documents, expected):
    (prompt,) = make({"prompt": ASKED, "answer": "5", "documents": documents}).prompts()
    assert prompt.template_kwargs["documents"] == expected


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]", "[]", "[{}]", "[", "null", json.dumps(SAID[1]), json.dumps(SAID[:1]), json.dumps([["user", "2+3?"]]),
        json.dumps([{"role": "user"}]), json.dumps([{"role": "admin", "content": "x"}]),
        f"{json.dumps(SAID)} Correct it.", json.dumps([*SAID, 5]), "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_another_text_that_looks_like_json_is_a_text(make, text):
    (prompt,) = make({"prompt": text, "answer": "5"}).prompts()
    assert (prompt.text, prompt.messages) == (text, ())


@pytest.mark.parametrize("error", [ValueError, AssertionError, KeyError, RuntimeError("  ")])
def test_an_error_without_a_message_is_stored_as_its_kind_alone(make, error, monkeypatch):
    task = make({"question": "q", "answer": "5"})

    def fail(*_):
        raise error

    monkeypatch.setattr(task, "score", fail)
    kind = error.__name__ if isinstance(error, type) else type(error).__name__
    assert score(task, task.prompts()[0], "5", True)[1] == f"reward of answers: {kind}"


@pytest.mark.parametrize(("grade", "gold", "response", "right"), VERDICTS)
def test_a_response_is_right_or_an_answer_cannot_be_graded(make, grade, gold, response, right):
    row = {"question": "q", "answer": gold}
    if right is None:
        with pytest.raises(TaskError, match=r"rows.jsonl:1: the answer .* (cannot be graded|is not a regular)"):
            make(row, grade=grade)
        return
    task = make(row, grade=grade)
    (prompt,) = task.prompts()
    assert task.score(prompt, response, True).total == float(right)
    assert task.score(prompt, response, False).total == 0.0


@pytest.mark.parametrize("response", ["\n" * 200_000 + "x", "option" + " " * 200_000, "answer" + " " * 200_000 + "x"])
@pytest.mark.parametrize("grade", ["exact", "choice", "number"])
def test_repeated_spaces_take_linear_time(make, grade, response):
    # Quadratic time would be more than the time limit of a test.
    task = make({"question": "q", "answer": {"number": "1"}.get(grade, "B")}, grade=grade)
    assert task.score(task.prompts()[0], response, True).total == 0.0


@pytest.mark.parametrize(
    ("row", "options", "prompt", "accepted"),
    [
        ({"question": "q", "answer": 34}, {}, "q", ("34",)),
        ({"q": "q", "a": "x"}, {"prompt": "q", "answer": "a"}, "q", ("x",)),
        ({"q": {"text": "q"}, "a.b": "x"}, {"prompt": "q.text", "answer": "a.b"}, "q", ("x",)),
        ({"question": "q", "answers": ["x", 2]}, {}, "q", ("x", "2")),
        ({"question": "q", "answers": {"text": ["x"]}}, {"answer": "answers.text"}, "q", ("x",)),
        ({"question": "q", "answer": "x"}, {"format": "Q: {prompt}\nA:"}, "Q: q\nA:", ("x",)),
    ],
)
def test_columns_of_any_names_are_read(make, row, options, prompt, accepted):
    (found,) = make(row, **options).prompts()
    assert (found.text, (found.answer, *found.accepted)) == (prompt, accepted)
    rewards = [make(row, **options).score(found, one, True).total for one in (*accepted, "other")]
    assert rewards == [1.0] * len(accepted) + [0.0]


CHOICES = ["Rome", "Paris", "Bonn", "Oslo"]
SHOWN = "The capital of France? (A) Rome (B) Paris (C) Bonn (D) Oslo"


@pytest.mark.parametrize(
    ("row", "grade", "words"),
    [
        # MMLU and its kind: a list and an index, from 0 or from 1; ARC: letters and texts; SciQ: a map of letters.
        ({"question": "Which?", "choices": CHOICES, "answer": 1}, "choice", "answer '1' cannot be graded"),
        ({"question": "Which?", "choices": CHOICES, "answer": "B"}, "choice", r"does not show its choices \['Rome"),
        ({"question": "Which?", "choices": CHOICES, "answer": 1}, "exact", "does not show its choices"),
        ({"question": "?", "choices": {"label": [*"ABCD"], "text": CHOICES}, "answer": "B"}, "choice", "not show its"),
        ({"question": "?", "options": {"A": "Rome", "B": "Paris"}, "answer": "B"}, "choice", "not show its"),
        ({"question": "A?", "choices": {"label": ["A"], "text": ["Rome"]}, "answer": "A"}, "choice", "not show its"),
        ({"question": SHOWN, "choices": CHOICES, "answer": "B"}, "choice", None),
        ({"question": SHOWN, "choices": {"label": [*"ABCD"], "text": CHOICES}, "answer": "B"}, "choice", None),
        ({"question": SHOWN, "options": dict(zip("ABCD", CHOICES, strict=True)), "answer": "(B)"}, "choice", None),
        ({"question": SHOWN, "choices": None, "answer": "B"}, "choice", None),
        ({"question": SHOWN, "options": "A-D", "answer": "B"}, "choice", None),
        ({"question": SHOWN, "options": [*"ABCD"], "answer": "B"}, "choice", None),
    ],
)  # fmt: skip
def test_a_question_that_does_not_show_what_is_to_be_chosen_is_refused(make, row, grade, words):
    if words is None:
        task = make(row, grade=grade)
        rewards = [task.score(task.prompts()[0], f"Answer: {letter}", True).total for letter in "ABCD"]
        assert rewards == [0.0, 1.0, 0.0, 0.0]
        return
    with pytest.raises(TaskError, match=f"rows.jsonl:1: .*{words}"):
        make(row, grade=grade)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "5"}]},
            "only conversations: name",
        ),
        ({"instruction": "q", "input": "", "output": "5"}, "it has no prompt .* only instruction, input, output"),
        ({"data": [{"question": "q", "answer": "5"}]}, "if `data` has the rows, write that list alone"),
        (
            {"prompt": [{"from": "human", "value": "q"}], "answer": "5"},
            "the message .*'human'.*: write .role, content.",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "5"}, "the message .*'image'"),
        ({"prompt": {"role": "user", "content": "q"}, "answer": "5"}, "the column prompt is not a text: {'role'"),
        ({"prompt": "q", "reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing"),
        ({"prompt": "q", "reward_model": {"ground_truth": {"a": 1}}}, "has {'a': 1}, which is neither a text nor a"),
        ({"prompt": "q", "answers": [["5"]]}, r"the column answers has \['5'\], which is neither a text nor a finite"),
        ({"prompt": "q", "answer": []}, "the column answer is an empty list"),
        ({"prompt": "q", "answer": "5", "documents": [5]}, r"`documents` is \[5\]: write a list of objects"),
        ({"prompt": "q", "answer": "5", "tools": ["add"]}, r"`tools` is \['add'\]: write a list of objects"),
        ({"prompt": "q", "answer": "5", "system": ["s"]}, r"`system` is \['s'\]: write a text, and no other"),
        ({"prompt": SAID, "answer": "5", "system": "Think."}, "`system` is 'Think.': write a text, and no other"),
        ({"prompt": PARTS, "answer": "5"}, r"the message .* write \(role, content\)"),
        ({"prompt": json.dumps(PARTS), "answer": "5"}, r"the message .* write \(role, content\)"),
        ({"prompt": json.dumps([*SAID, ANSWERED]), "answer": "5"}, "the column prompt .* ends with the assistant's"),
        ({"prompt": [ANSWERED], "answer": "x"}, "ends with the assistant's: remove"),
        ({"prompt": [{"role": "user"}], "answer": "x"}, "the message .* write"),
        ({"question": "q", "answer": [None]}, "the column answer has None"),
    ],
)
def test_a_row_of_another_form_is_refused_with_the_line_and_what_was_found(make, row, words):
    with pytest.raises(TaskError, match=f"task answers: .*rows.jsonl:1: .*{words}"):
        make(row)


@pytest.mark.slow
def test_rows_of_verl_and_dapo_are_read_from_parquet(tmp_path):
    rows: list[dict[str, Any]] = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"Solve {n}. The last line is Answer: $Answer."}],
            "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": n},
        }
        for n in (34, 35, 34)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    task = AnswersTask(str(tmp_path / "dapo.parquet"), answer="reward_model.ground_truth", grade="number")
    first, second = task.prompts()
    assert first.messages == (("user", rows[0]["prompt"][0]["content"]),)
    assert [task.score(prompt, "so it is\nAnswer: $34$", True).total for prompt in (first, second)] == [1.0, 0.0]
    assert task.notes == ["1 row repeats the prompt of an earlier one, whose answer counts; 0 have another"]
    assert [prompt.answer for prompt in AnswersTask(str(tmp_path / "dapo.parquet")).prompts()] == ["34", "35"]
    math = MathTask(str(tmp_path / "dapo.parquet"), answer="reward_model.ground_truth")
    assert [(prompt.messages, prompt.answer) for prompt in math.prompts()] == [
        (prompt.messages, prompt.answer) for prompt in task.prompts()
    ]


def test_tools_and_variables_of_a_row_are_those_of_its_prompt(make):
    messages = [{"role": "user", "content": "2+2?"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": messages, "answer": "4", "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = make(row).prompts()
    assert prompt.template_kwargs == {"enable_thinking": False, "tools": tools}


def test_an_unknown_grade_and_a_format_without_a_place_for_the_prompt_are_refused(make):
    with pytest.raises(TaskError, match="task answers: .*grade = 'fuzzy': use one of exact, number, choice, regex"):
        make({"question": "q", "answer": "x"}, grade="fuzzy")
    with pytest.raises(TaskError, match="task answers: .*the text of prompts 'Q' has no {prompt}"):
        make({"question": "q", "answer": "x"}, format="Q")


@pytest.mark.parametrize(("options", "lacking"), [({}, "prompt or question"), ({"prompt": "frge"}, "frge")])
def test_a_column_of_another_name_is_refused_with_the_option_that_names_it(make, options, lacking):
    row = {"frage": "1+1", "loesung": "2"}
    with pytest.raises(TaskError, match=f"it has no {lacking}.*, only frage, loesung: .* task.options.prompt = "):
        make(row, **options)
    with pytest.raises(TaskError, match=r"task\.options\.answer = "):
        make(row, prompt="frage")
    assert make(row, prompt="frage", answer="loesung").prompts()[0].answer == "2"


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    section = DOCS.read_text().partition("## Answers")[2].partition("\n## ")[0]
    toml, rows = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("toml", "json"))  # type: ignore[index]
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text(rows)
    task = load_task(Config.model_validate(tomllib.loads(toml)).task)
    (first, second) = task.prompts()
    assert [task.score(first, "Answer: Paris", True).total, task.score(second, "Rome", True).total] == [1.0, 0.0]  # type: ignore[union-attr]
    assert isinstance(first, Prompt)


def test_an_entry_survives_json_and_generators_get_problems_by_their_weights():
    values = {"a": (1, (2.5, None)), "b": [{1: "x", (2, 3): ["y"]}, {}], "c": True}
    assert decode_entry(json.loads(json.dumps(encode_entry(values)))) == values
    items = Items({"a": (2.0, {}), "b": (1.0, {}), "c": (0.001, {})}, size=30, held_out_size=0, seed=0)
    assert items.counts == {"a": (20, 0), "b": (10, 0), "c": (1, 0)}


@pytest.fixture
def make_task():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning is not installed")
    from tba.searcher.tasks.reasoning import ReasoningGymTask

    return ReasoningGymTask


@pytest.mark.slow
def test_problems_are_the_same_in_every_process_and_held_out_ones_are_others(make_task, monkeypatch):
    # word_ladder depends on the hash seed; basic_arithmetic with one digit repeats questions.
    generators = {
        "word_ladder": {},
        "basic_arithmetic": {"max_terms": 2, "min_digits": 1, "max_digits": 1, "weight": 3},
    }
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        task = make_task(generators, size=40, held_out_size=20)
        made.append((task.prompts(), task.held_out()))
    assert made[0] == made[1]
    training, held_out = ([prompt.text for prompt in prompts] for prompts in made[0])
    assert len(held_out) == 20
    assert len(set(training) | set(held_out)) == len(training) + len(held_out)


@pytest.mark.slow
def test_a_right_answer_is_correct_and_one_of_the_right_form_is_not(make_task):
    task = make_task("chain_sum", size=2, held_out_size=0)
    prompt = task.prompts()[0]
    right = json.loads(prompt.answer)["entry"]["answer"]
    assert task.score(prompt, f"so <answer>1</answer><answer> {right} </answer>", True).parts["correct"] == 1.0
    assert task.score(prompt, right, True).total == 1.0
    assert task.score(prompt, right, False).total == 0.0
    wrong = task.score(prompt, f"{right}1", True)
    assert wrong.parts == {"correct": 0.0, "score": wrong.total}


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "answer"), [("prime_factorization", "none"), ("coin_flip", "1e999")])
def test_an_odd_answer_for_which_a_scorer_raises_is_wrong_and_a_worker_says_so(make_task, generator, answer, caplog):
    task = make_task([generator], size=1, held_out_size=0)
    assert task.score(task.prompts()[0], answer, True).parts == {"correct": 0.0, "score": 0.0}
    assert [(record.levelname, record.fields["by"]) for record in caplog.records] == [("WARNING", generator)]


@pytest.mark.slow
def test_a_response_is_not_scored_if_its_scorer_fails_for_the_right_answer_too(make_task):
    task = make_task("prime_factorization", size=1, held_out_size=0)
    prompt = task.prompts()[0]
    problem = json.loads(prompt.answer)
    problem["entry"]["answer"] = "none"
    prompt = replace(prompt, answer=json.dumps(problem))
    reward, error = score(task, prompt, "none", True)
    assert (reward, str(error)[:36]) == (Reward(0.0, {}), "reward of reasoning_gym: ValueError:")


@pytest.mark.slow
def test_settings_that_a_generator_refuses_are_named(make_task):
    with pytest.raises(TaskError, match="cannot be made: .*min_terms"):
        make_task({"chain_sum": {"min_terms": 0}}, size=2).prompts()
