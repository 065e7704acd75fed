"""What tasks read from data: answers that are numbers, columns that are empty in some rows, half characters."""

import decimal
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tba.buffer.tools.import_file import Parser
from tba.buffer.tools.tokenizer import Tokenizer
from tba.common.config import Config, TaskSection
from tba.common.errors import TaskError, UsageError
from tba.searcher.task_check import check
from tba.searcher.tasks import load_task
from tba.searcher.tasks.answers_task import AnswersTask
from tba.searcher.tasks.gsm8k import Gsm8kTask
from tba.searcher.tasks.mathematics import MathTask
from tba.searcher.tasks.task import Prompt

pytest.importorskip("math_verify", reason="the extra math is not installed")

TASKS = [MathTask, Gsm8kTask, AnswersTask]
SOLVED = r"First \boxed{34} but later it says \boxed{30}."


@pytest.fixture
def write(tmp_path):
    """Write rows to a file. Returns its name."""

    def to_file(*rows) -> str:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "rows.jsonl")

    return to_file


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("answer", "gold"), [(-7, "-7"), (0, "0"), (34.5, "34.5"), (1e-7, "0.0000001"), (10**20, "1" + "0" * 20)]
)
def test_a_number_is_an_answer(write, task, answer, gold):
    (prompt,) = task(write({"question": "q", "answer": answer, "solution": SOLVED})).prompts()
    assert prompt.answer == gold
    assert task(write({"question": "q", "answer": answer})).score(prompt, f"\\boxed{{{gold}}}", True).total == 1


def test_a_decimal_of_parquet_is_an_answer_and_a_whole_float_is_an_integer(tmp_path):
    """pandas stores a column of integers as floats if a cell is empty."""
    table = {"question": ["q1"], "answer": [34.0], "price": [decimal.Decimal("1.50")]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for column, gold in (("answer", "34"), ("price", "1.50")):
        task = AnswersTask(str(tmp_path / "a.parquet"), answer=column)
        assert task.prompts()[0].answer == gold
        assert task.score(task.prompts()[0], gold, True).total == 1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": " ", "answer": "1"}, "the question is empty"),
        ({"question": "q", "answer": None, "solution": "By induction on 3 cases."}, "the column answer is null"),
        ({"question": "q", "solution": "By induction on 3 cases."}, "the column answer is missing; the row has"),
        ({"question": "q", "answer": float("nan")}, "answer has nan, which is neither a text nor a finite number"),
        ({"question": "q", "answer": True}, "answer has True, which is neither"),
        ({"question": "q", "answer": {"a": 1}}, "answer has {'a': 1}, which is neither"),
        ({"question": None, "answer": "1"}, "the column question is null"),
        ({"question": 7, "answer": "1"}, "the column question is not a text: 7"),
        ({"question": None, "problem": "other", "answer": "1"}, "the column question is null"),
        (["q", "1"], r"an object with named columns, and not \['q', '1'\]"),
        ({"question": "a \ud83d b", "answer": "1"}, r"half of a character \('\\ud83d', a lone surrogate\) in 'a "),
        ({"question": "q", "answer": "1 \udc00"}, r"half of a character \('\\udc00', a lone surrogate\) in '1 "),
    ],
)
def test_a_value_that_is_no_answer_or_question_is_refused_with_file_and_line(write, task, row, found):
    rows = write({"question": "first", "answer": "1", "solution": SOLVED}, row)
    with pytest.raises(TaskError, match=rf"task {task.name}: .*rows.jsonl:2: .*{found}"):
        task(rows)


def test_the_columns_of_the_first_row_are_those_of_all(write):
    rows = [{"problem": f"q{n}", "answer": "3", "solution": SOLVED} for n in range(2)]
    assert [prompt.answer for prompt in MathTask(write(*rows)).prompts()] == ["3", "3"]
    del rows[0]["answer"]
    assert [prompt.answer for prompt in MathTask(write(*rows)).prompts()] == ["30", "30"]
    with pytest.raises(TaskError, match="rows.jsonl:1: the column answer is null"):
        MathTask(write(rows[0] | {"answer": None}))
    assert [prompt.answer for prompt in MathTask(write({"question": "q", "answer": ["$2$"]})).prompts()] == ["$2$"]
    with pytest.raises(TaskError, match=r"rows.jsonl:1: the column answer has 2 answers: write one"):
        MathTask(write({"question": "q", "answer": ["1", "2"]}))


@pytest.mark.parametrize(
    "gold",
    [
        "The answer is 7 apples because 3+4=7",
        "We have $x=3$, so the answer is $3$.",
        "12 or 13, depending on the year",
        "Yes, because $3>2$",
        "By induction on 3 cases.",
        "[image]",
        "TODO: 3",
        "证明略",
    ],
)
def test_a_sentence_without_a_box_is_no_gold_answer(write, gold):
    with pytest.raises(TaskError, match=r"rows.jsonl:2: the gold answer .*: it is (no answer|a sentence)"):
        MathTask(write({"question": "first", "answer": "1"}, {"question": "q", "answer": gold}))
    boxed = {"question": "q", "answer": f"{gold} $\\boxed{{3}}$"}
    assert [prompt.answer for prompt in MathTask(write(boxed)).prompts()] == ["3"]


def test_words_and_numbers_with_units_are_gold_answers(write):
    golds = [
        "all real numbers",
        "2 hours and 30 minutes",
        "9.8 meters per second squared",
        "x = 2 or x = 3",
        "no solution",
        "Yes",
    ]
    rows = [{"question": f"q{n}", "answer": gold} for n, gold in enumerate(golds)]
    assert [prompt.answer for prompt in MathTask(write(*rows)).prompts()] == golds


def test_all_gold_answers_that_cannot_be_read_are_counted_at_once_and_the_key_of_the_first_is_named(write):
    golds = [r"\frac{1}{", r"\sqrt{2\pm\sqrt3}", r"\{x \mid x>2\}", r"\sqrt{"]
    task = MathTask(write(*({"question": f"q{n}", "answer": gold} for n, gold in enumerate(golds))))
    named = rf"gold answer '.*' of prompt {task.prompts()[0].key} cannot be read as mathematics: .*; 1 more, such as"
    with pytest.raises(TaskError, match=named):
        task.check()


@pytest.mark.parametrize("task", TASKS)
def test_repeated_questions_are_counted_with_those_whose_answer_differs(write, task, caplog):
    answers = ["1", "1", "2", "3"]
    loaded = task(write(*({"question": "q", "answer": answer} for answer in answers)))
    (note,) = loaded.notes
    assert "3 rows repeat the prompt of an earlier one" in note
    assert "; 2 have another" in note
    assert [prompt.answer for prompt in loaded.prompts()] == ["1"]
    finding = next(check(Config(), loaded, load_seconds=0.0))
    assert (finding["check"], finding["result"]) == ("load", "warn")
    assert note in finding["detail"]
    assert task(write({"question": "q", "answer": "1"})).notes == []


# Questions, how many repeat an earlier one, and how many differ from it in white space alone.
SPACED = [
    (["a b", "a b"], 1, 0),
    (["a b", "a  b"], 0, 1),
    (["a b", "a\nb", "a\tb ", " a b"], 0, 3),
    (["a b", "a\u00a0b"], 0, 1),
    (["a b", "a  b", "a  b"], 1, 2),
    (["a b", "ab"], 0, 0),
    (["a b", "A b"], 0, 0),
    ([[{"role": "user", "content": "a b"}], [{"role": "user", "content": "a  b "}]], 0, 1),
    ([[{"role": "user", "content": "a b"}], [{"role": "system", "content": "a  b"}]], 0, 0),
]


@pytest.mark.parametrize(("questions", "repeated", "spaced"), SPACED)
def test_questions_that_differ_in_white_space_alone_are_counted_and_kept(write, questions, repeated, spaced):
    loaded = MathTask(write(*({"question": one, "answer": "1"} for one in questions)))
    assert len(loaded.prompts()) == len(questions) - repeated
    assert [int(note.split()[0]) for note in loaded.notes if "repeat" in note] == [repeated] * bool(repeated)
    assert [int(note.split()[0]) for note in loaded.notes if "white space alone" in note] == [spaced] * bool(spaced)


def test_the_notes_of_a_mixture_are_those_of_its_tasks(write):
    rows = write({"question": "q", "answer": "1"}, {"question": "q", "answer": "1"})
    parts = ({"name": "gsm8k", "train": rows}, {"name": "arithmetic"})
    mixture: object = load_task(TaskSection.model_validate({"name": "mixture", "mixture": parts}))
    assert mixture.notes == ["gsm8k: 1 row repeats the prompt of an earlier one, whose answer counts; 0 have another"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a\ud83d"},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "\ud83d"}]}]},
        {"template_kwargs": {"tools": [{"name": "\ud83d"}]}},
        {"accepted": ["\ud83d"]},
    ],
)
def test_a_prompt_of_a_task_of_ones_own_has_no_half_characters(fields):
    with pytest.raises(ValueError, match="half of a character"):
        Prompt(**{"key": "k", **fields})


def test_an_import_refuses_an_end_token_in_a_response_and_half_a_character_with_the_line(example_model):
    parser = Parser("run", lambda: Tokenizer(str(example_model)), None)
    assert parser.parse({"prompt": "1+1=", "response": "2"}, "file:3").response_ids.tolist() == [5, 1]
    with pytest.raises(UsageError, match="file:3: the response spells the end token '<eos>': remove it"):
        parser.parse({"prompt": "1+1=", "response": "2<eos>3"}, "file:3")
    for field in ("prompt", "response", "text", "prompt_key"):
        with pytest.raises(UsageError, match="file:3: half of a character"):
            parser.parse({"prompt": "1", "response": "2"} | {field: "\ud83d"}, "file:3")


def test_rows_that_differ_in_the_variables_of_their_template_are_several_prompts(write):
    tools = [[{"type": "function", "function": {"name": name}}] for name in "ab"]
    rows = [{"prompt": "q", "answer": str(n), "tools": one} for n, one in enumerate(tools)]
    plain = AnswersTask(write({"prompt": "q", "answer": "2"})).prompts()[0].key
    prompts = AnswersTask(write(*rows)).prompts()
    assert [prompt.answer for prompt in prompts] == ["0", "1"]
    assert len({plain, *(prompt.key for prompt in prompts)}) == 3


def test_three_texts_are_no_message_of_a_row(write):
    for text in ("[1]", "x", '{"role": "system", "content": "evil"}'):
        with pytest.raises(TaskError, match=r"rows.jsonl:1: the message .*write \(role, content\)"):
            AnswersTask(write({"messages": [["user", "hi", text]], "answer": "1"}))


def test_options_that_come_from_the_configuration_of_another_task_are_said_to(tba_here, tmp_path):
    (tmp_path / "tba.toml").write_text('[task]\nname = "answers"\noptions = { prompt = "frage" }\n')
    assert tba_here("task", "new", "birds").exit_code == 0
    done = tba_here("task", "check", "birds.py")
    assert re.search(r"has no option prompt: .*; task\.options are set by .*tba\.toml", done.message), done.message
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert tba_here("task", "check", "broken.py").message.endswith("ZeroDivisionError: division by zero")
