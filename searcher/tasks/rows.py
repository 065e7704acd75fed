"""Rows of a task's data, a local file or a data set on the Hugging Face hub, and the prompts that they become."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tba.common import data_files
from tba.common.errors import MissingExtra, TaskError, quantity
from tba.common.log import get_logger
from tba.common.rendering import asked_in, instructed, message_of, variables_of
from tba.searcher.tasks.task import ListedTask, Prompt

log = get_logger(__name__)


def read_rows(task: str, source: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a file, or of a split of the data set with this id on the hub.

    `place` is `file:line` or a row number, for messages. `subset` is the configuration of a hub data set, None for its
    only one. Raises TaskError if the data is missing or malformed, MissingExtra without the package that reads it.
    """
    if data_files.is_data_file(source):
        try:
            yield from data_files.read(Path(source))
        except TaskError as error:
            advice = ": set task.train and task.test" if isinstance(error.__cause__, OSError) else ""
            raise TaskError(f"task {task}: {error}{advice}") from error
        return
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "hub") from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(source, subset, split=split)
    # The library raises many types; each means that the data is not available.
    except Exception as error:
        raise TaskError(f"task {task}: data set {source!r} ({split}) cannot be loaded: {error}") from error
    features = getattr(rows, "features", None)
    short = data_files.shortest(rows, features.arrow_schema) if features else rows
    yield from ((f"row {n} of {source}", data_files.without_nested_nulls(row)) for n, row in enumerate(short, 1))


class RowsTask(ListedTask):
    """A task whose prompts are rows of data. A subclass has `name`, `_prompt` and `score`, and calls `_load` once.

    `_prompt` gets a row and its columns, and raises ValueError for one of no use. `notes` count repeated prompts.
    """

    name: str
    _prompt: Callable[..., Prompt]

    def _load(
        self,
        train: str,
        test: str,
        columns: Sequence[Sequence[str]],
        *,
        options: Sequence[str] = (),
        subset: str = "",
        splits: tuple[str, str] = ("train", "test"),
    ) -> None:
        """Read both files, or the splits of a hub data set. Raises TaskError with the place of a row, MissingExtra.

        Of each group of `columns` a file has one, the first that its first row has, so that a column that is empty in
        some rows is not replaced by another one there. `options` are those of the task that name them.
        """
        named = [*zip_longest(columns, options, fillvalue="")]
        self.notes: list[str] = []
        self._prompts = self._read(train, splits[0], subset, named)
        held_out = test or ("" if data_files.is_data_file(train) else train)
        self._held_out = self._read(held_out, splits[1], subset, named) if held_out else []

    def _read(self, source: str, split: str, subset: str, columns: Sequence[Sequence[Any]]) -> list[Prompt]:
        """Return the prompts of rows, in order; of those with one key the first: a repeated question is one prompt."""
        found: dict[str, Prompt] = {}
        chosen: list[str] = []
        # Hashes, since the texts may be gigabytes.
        texts: dict[int, int] = {}
        told = len(self.notes)
        repeated = differing = spaced = 0
        for place, row in read_rows(self.name, source, split, subset or None):
            try:
                if not isinstance(row, dict):
                    raise ValueError(f"a row is an object with named columns, and not {row!r:.60}")
                chosen = chosen or [_column_of(row, *one) for one in columns]
                prompt = self._prompt(row, *chosen)
            except ValueError as error:
                raise TaskError(f"task {self.name}: {place}: {error}") from error
            first = found.setdefault(prompt.key, prompt)
            repeated += first is not prompt
            differing += (first.answer, first.accepted) != (prompt.answer, prompt.accepted)
            asked = (prompt.text, *chain(*prompt.messages), str(prompt.template_kwargs))
            spaced += texts.setdefault(hash(tuple(" ".join(one.split()) for one in asked)), hash(asked)) != hash(asked)
        if not found:
            raise TaskError(f"task {self.name}: {source} has no rows")
        if repeated:
            rows = quantity(repeated, "row repeats", "rows repeat")
            self.notes.append(f"{rows} the prompt of an earlier one, whose answer counts; {differing} have another")
        if spaced:
            rows = quantity(spaced, "row differs", "rows differ")
            self.notes.append(f"{rows} from an earlier one in white space alone: each is a prompt of its own")
        for note in self.notes[told:]:
            log.info(note, task=self.name)
        return [*found.values()]


def key_of(text: str, variables: dict[str, Any] | None = None) -> str:
    """Return the key of a text and its variables. Raises ValueError for a lone surrogate and an empty text (null)."""
    if not text.strip():
        raise ValueError("the question is empty")
    asked = json.dumps([text, variables], sort_keys=True, default=str) if variables else text
    data_files.require_unicode(asked)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def value_in(row: Any, column: str) -> Any:
    """Return the value of a column, or of a field below one, as in `reward_model.ground_truth`. Raises ValueError."""
    value = row
    for name in [column] if column in row else column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"the column {column} is {'null' if column in row else 'missing'}; the row has {_names(row)}")
    return value


def text_in(row: Any, column: str) -> str:
    """Return the text of a column. Raises ValueError for another value."""
    value = value_in(row, column)
    if not isinstance(value, str):
        raise ValueError(f"the column {column} is not a text: {value!r:.60}")
    return value


def question_in(row: Any, column: str, format_: str, place: str) -> dict[str, Any]:
    """Return what a column and the template variables of its row give a Prompt. Raises ValueError.

    The column has a text, which stands for `place` in `format_`, or a list of messages, which are used as they are. The
    `system` of the row is the first message.
    """
    if place not in format_:
        raise ValueError(f"the text of prompts {format_!r} has no {place}: write where the question stands")
    variables = variables_of(row)
    if not isinstance(asked := asked_in(value_in(row, column)), list):
        asked = format_.replace(place, text := text_in(row, column))
        if column == "instruction" and row.get("input"):
            raise ValueError("its `input` would be ignored: write it into the column instruction")
    if isinstance(asked := instructed(row, asked), str):
        return {"key": key_of(text, variables), "text": asked, "template_kwargs": variables}
    messages = [message_of(message) for message in asked]
    if not messages or messages[-1][0] == "assistant":
        raise ValueError(f"the column {column} has no message, or ends with the assistant's: remove the answer")
    return {"key": key_of(json.dumps(messages), variables), "messages": messages, "template_kwargs": variables}


def require_choices(row: Any, text: str, gold: str | None) -> None:
    """Raise ValueError if a text shows none of the choices of its row, unless `gold` is the text of one."""
    choices = row.get("choices") or row.get("options") or {}
    lists = [*choices.values()] if isinstance(choices, dict) else [choices]
    texts = [str(one) for some in lists for one in (some if isinstance(some, list) else [some])]
    # Without the letters before them, which any text has.
    long = [one for one in texts if len(one) > 1 and choices != one]
    if long and gold not in long and not any(one in text for one in long):
        raise ValueError(f"the question does not show its choices {choices!r:.80}: write them into it")


def answers_in(row: Any, column: str, *, several: bool = False) -> list[str]:
    """Return the texts or finite numbers of a column as texts: one, or with `several` a list. Raises ValueError."""
    value = value_in(row, column)
    values = value if several and isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"the column {column} is an empty list")
    return [data_files.as_text(one, column) for one in values]


def _column_of(row: Any, names: Sequence[str], option: str) -> str:
    for name in names:
        if name in row or name.partition(".")[0] in row:
            return name
    advice = f'name the column, as in task.options.{option} = "COLUMN"' if option else "rename the column"
    raise ValueError(f"it has no {' or '.join(names)}, only {_names(row)}: {advice}{data_files.rows_within(row)}")


def _names(row: Any) -> str:
    return ", ".join(map(str, row)) or "no column"
