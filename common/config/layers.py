"""The layers of the configuration: a flag wins over an environment variable, then the file, then the default.

Each layer is a flat map from dotted keys (`train.learning_rate`) to values with their origin.
"""

import contextlib
import difflib
import functools
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from tba.common.config import Config
from tba.common.errors import ConfigError, UsageError, problems
from tba.common.system.process import PARENT_VARIABLE, RENDEZVOUS_VARIABLE

ENVIRONMENT_PREFIX = "TBA_"
_OTHER_VARIABLES = {
    *("TBA_CONFIG", "TBA_DEBUG", "TBA_LOG", "TBA_TEST_DATA", "TBA_UI_TOKEN", PARENT_VARIABLE, RENDEZVOUS_VARIABLE)
}
# Of these types every value is a text: `2026-11-23`, `1e5` and `true` are not a date, a number and a boolean there.
_TEXT_TYPES = (str, Path, Path | None)
DEFAULT_ORIGIN = "default"
_FLAG_ORIGIN = "command line"
# Flags that say what a command works on. Others, such as --cpu, do not.
_NAMING_FLAGS = ("model.path", "buffer.database")
_MOST_MISTAKES = 10
# A key that TOML takes without quotes.
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the origin of each dotted key that was set, and the file that was read, if any.

    `partial`: tables of which only some keys were set.
    """

    config: Config
    origins: dict[str, str]
    file: Path | None
    partial: Collection[str] = ()

    def origin(self, key: str) -> str:
        """Return what set a key: a file, an environment variable, a flag, or the default."""
        return self.origins.get(key, DEFAULT_ORIGIN)

    @property
    def configured(self) -> bool:
        """Whether there is a file, a value of --set or the environment, or a flag for the model or the database."""
        named = (origin != _FLAG_ORIGIN or key in _NAMING_FLAGS for key, origin in self.origins.items())
        return self.file is not None or any(named)

    def over(self, base: Mapping[str, Any], origin: str, *, needs: str) -> Config:
        """Return the configuration of `base`, settings by dotted key, with the keys that were set here on top.

        Keys of `base` that this release does not have are left out. Raises UsageError for such a key in the section
        `needs`, unless a file was read, whose values then hold. Raises ConfigError for an invalid value.
        """
        known = {key for key, _ in fields()}
        unknown = [key for key in base if key.startswith(f"{needs}.") and key not in known]
        if unknown and self.file is None:
            raise UsageError(
                f"{unknown[0]} = {base[unknown[0]]!r} ({origin}) is not a setting of this release: pass the "
                "configuration with --config FILE"
            )
        values = {key: _Value(value, origin) for key, value in base.items() if key in known}
        for key, set_by in self.origins.items():
            value = value_of(self.config, key)
            values[key] = _Value(_merged(base.get(key), value) if key in self.partial else value, set_by)
        return _validate(values)


@dataclass(frozen=True, slots=True)
class _Value:
    value: Any
    origin: str


def resolve(
    file: Path | None,
    *,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    default_file: Path | None = None,
    unless: Collection[str] = (),
) -> Resolved:
    """Merge the layers and validate the result.

    `overrides` come from named flags (None is "not given"), `assignments` from `--set key=value`. `default_file` is
    read where no `file` is given, unless one of the keys `unless` is set by other means.
    Raises ConfigError that names each wrong key and its origin.
    """
    values = _environment_layer(environment) | _assignment_layer(assignments)
    values |= {key: _Value(value, _FLAG_ORIGIN) for key, value in (overrides or {}).items() if value is not None}
    if file is None and values.keys().isdisjoint(unless):
        file = default_file
    if file is not None:
        values = _file_layer(file) | values
    values, partial = _with_tables(values)
    return Resolved(_validate(values), {key: item.origin for key, item in values.items()}, file, partial)


def as_toml(value: Any, *, quoted: bool = False) -> str:
    """Return a value as a TOML file has it; a text that is not inside another value without quotes."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        keys = (name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in value)
        inner = ", ".join(f"{key} = {as_toml(one, quoted=True)}" for key, one in zip(keys, value.values(), strict=True))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(one, quoted=True) for one in value)}]"
    # JSON has other names for infinity.
    as_json = isinstance(value, bool) or (quoted and not isinstance(value, float))
    return json.dumps(value, ensure_ascii=False, default=str) if as_json else str(value)


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key with its pydantic field, in the order of the documentation."""
    for section_name, section in Config.model_fields.items():
        kind: Any = section.annotation
        for name, field in kind.model_fields.items():
            yield f"{section_name}.{name}", field


@functools.cache
def removed() -> dict[str, dict[str, str]]:
    """Return what earlier builds had, `keys` and `commands`, each with what is in its place."""
    return tomllib.loads(Path(__file__).with_name("removed.toml").read_text(encoding="utf-8"))


def secret_keys() -> set[str]:
    """Return the dotted keys whose values are neither shown nor recorded."""
    return {key for key, field in fields() if field.annotation is SecretStr}


def secrets_of(config: Config) -> dict[str, str]:
    """Return the secrets that are set, by dotted key."""
    values = {key: value_of(config, key).get_secret_value() for key in secret_keys()}
    return {key: value for key, value in values.items() if value}


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _file_layer(file: Path) -> dict[str, _Value]:
    if is_database(file):
        raise ConfigError(
            f"{file} is an SQLite database, not a configuration: `tba buffer stats {file}` and other commands of "
            "`tba buffer` read it; name the TOML file of the run here"
        )
    if file.suffix == ".py":
        raise ConfigError(f"{file} is a Python file, not a configuration: pass a task as --set task.name={file}")
    if os.path.isdir(file):
        raise ConfigError(
            f"{file} is a directory, not a configuration: name the TOML file of the run, and the directory with --set "
            f"run.dir={file} if the file does not; `tba run --resume`, `status`, `eval` and `report` take one"
        )
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: name a TOML file, or the directory of a run") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}: name a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    values: dict[str, _Value] = {}
    for section, content in tree.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: `{section}` is outside a section: move it into one, such as [run]")
        values |= {f"{section}.{name}": _Value(value, str(file)) for name, value in content.items()}
    return values


def _environment_layer(environment: Mapping[str, str]) -> dict[str, _Value]:
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if "__" not in variable:
            # A supervisor has warned already: its children stay silent.
            if PARENT_VARIABLE not in environment:
                section, _, name = variable.removeprefix(ENVIRONMENT_PREFIX).partition("_")
                print(  # noqa: T201
                    f"warning: environment variable {variable} sets nothing: a key is set by TBA_SECTION__KEY with two "
                    f"underscores, such as TBA_{section}__{name}",
                    file=sys.stderr,
                )
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1)
        values[key] = _Value(_parse(key, text), variable)
    return values


def is_database(file: Path) -> bool:
    """Return whether a file is an SQLite database, by its first bytes. False for a file that cannot be read."""
    try:
        with file.open("rb") as content:
            return content.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _assignment_layer(assignments: Sequence[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for assignment in assignments:
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise ConfigError(f"--set {assignment}: write it as section.key=value")
        if key in secret_keys():
            variable = ENVIRONMENT_PREFIX + key.upper().replace(".", "__")
            raise ConfigError(f"--set {key}: others can read a command line: set {variable}, or write it into the file")
        # The last one holds, also over keys inside a table.
        values = {other: value for other, value in values.items() if not other.startswith(f"{key}.")}
        values[key] = _Value(_parse(key, text), "--set")
    return values


def _with_tables(values: Mapping[str, _Value]) -> tuple[dict[str, _Value], set[str]]:
    """Move the value of a key inside a table, such as `task.options.path`, into the value of the table.

    Also returns the tables of which only keys were given.
    """
    tables = {key for key, field in fields() if get_origin(field.annotation) is dict}
    inside = {key: ".".join(key.split(".")[:2]) for key in values if key not in tables}
    inside = {key: table for key, table in inside.items() if table in tables and all(key.split("."))}
    found = {key: value for key, value in values.items() if key not in inside}
    partial = set(inside.values()) - found.keys()
    for key, table in inside.items():
        content = found[table].value if table in found else {}
        # Anything else than a table is an error of its own.
        if isinstance(content, dict):
            value: Any = values[key].value
            for name in reversed(key.split(".")[2:]):
                value = {name: value}
            found[table] = _Value(_merged(content, value), values[key].origin)
    return found, partial


def _merged(base: Any, changes: Any) -> Any:
    """Return a table with the keys of another one on top, and so for the tables in both."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return {**base, **{key: _merged(base.get(key), value) for key, value in changes.items()}}


def _parse(key: str, text: str) -> Any:
    """Return a value parsed as TOML, or the text itself if it is not TOML: `3`, `true`, `[1, 2]`, `cpu`.

    A key whose value is a text gets the text, without the quotes of a TOML string; a secret gets all of it.
    """
    field = dict(fields()).get(key)
    if field is not None and field.annotation is SecretStr:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    is_text = field is not None and field.annotation in _TEXT_TYPES
    return text if is_text and not isinstance(value, str) else value


def _unknown(key: str, origin: str, known: Sequence[str]) -> str:
    """Return a sentence on a key that does not exist."""
    gone = removed()["keys"]
    if instead := gone.get(key) or gone.get(key.partition(".")[0]):
        return f"{key} ({origin}) is no longer a key: {instead}"
    # Without a section it may be meant in each that has it.
    near = " or ".join(other for other in known if other.endswith(f".{key}")) or _nearest(key, known)
    hint = f"did you mean {near}?" if near else "`tba config show` lists all keys"
    return f"unknown key {key} ({origin}): {hint}"


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the key that was probably meant: the same name in another section, or a similar name or key."""
    section, _, name = key.rpartition(".")
    same = [other for other in known if other.rpartition(".")[2] == name]
    here = [other.rpartition(".")[2] for other in known if other.startswith(f"{section}.")]
    like = [f"{section}.{other}" for other in difflib.get_close_matches(name, here, n=1, cutoff=0.7)]
    return max(
        [*same, *like] or difflib.get_close_matches(key, known, n=1, cutoff=0.8),
        key=lambda other: difflib.SequenceMatcher(None, other, key).ratio(),
        default=None,
    )


def _validate(values: Mapping[str, _Value]) -> Config:
    """Return the configuration. Raises ConfigError with everything that is wrong, up to a limit."""
    known = [name for name, _ in fields()]
    tree: dict[str, dict[str, Any]] = {}
    mistakes, sections = [], set()
    for key, item in values.items():
        section, _, name = key.partition(".")
        if key not in known:
            # A section that does not exist is one mistake, whatever it holds.
            if section in Config.model_fields or section not in sections:
                mistakes.append(_unknown(key, item.origin, known))
            sections.add(section)
            continue
        tree.setdefault(section, {})[name] = item.value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # One sentence per key: a value that fits none of several types has an error for each.
        first = {".".join(field[:2]): (field, message) for field, message in reversed(problems(error))}
        found = [(key, _sentence(*problem, values)) for key, problem in reversed(first.items())]
        # Report a cross-key error only if no key is unknown: a misspelt one may be its cause.
        mistakes += [sentence for key, sentence in found if key in values or not mistakes]
        raise ConfigError(_together(mistakes)) from error
    if mistakes := mistakes or [*_unusable_names(config)]:
        raise ConfigError(_together(mistakes))
    return config


def _unusable_names(config: Config) -> Iterator[str]:
    """Yield a sentence for each path that Python and ZeroMQ, which writes UTF-8, would not take for the same file."""
    for key, _ in fields():
        value = value_of(config, key)
        if not isinstance(value, Path):
            continue
        # The working directory may be deleted.
        with contextlib.suppress(FileNotFoundError):
            value = value.absolute()
        try:
            usable = os.fsencode(value) == str(value).encode()
        except UnicodeEncodeError:
            usable = False
        if not usable:
            yield (
                f"{key} {str(value)!r} is not a UTF-8 name here, where file names are {sys.getfilesystemencoding()}: "
                "set PYTHONUTF8=1 or a UTF-8 locale such as LC_ALL=C.UTF-8, or choose another name"
            )


def _together(mistakes: Sequence[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    shown = [f"({number}) {mistake}" for number, mistake in enumerate(mistakes[:_MOST_MISTAKES], 1)]
    more = len(mistakes) - len(shown)
    return f"{len(mistakes)} mistakes: {'; '.join(shown)}" + (f"; and {more} more" if more else "")


def _sentence(field: Sequence[str], message: str, values: Mapping[str, _Value]) -> str:
    key = ".".join(field[:2])
    if key not in values:
        return message
    item = values[key]
    # A field of a table in a list, such as the second of task.mixture.
    if len(field) > 3 and field[2].isdigit():
        return f"{key}[{field[2]}].{'.'.join(field[3:])} ({item.origin}): {message[0].lower()}{message[1:]}"
    # Errors end in logs.
    shown = "(not shown)" if dict(fields())[key].annotation is SecretStr else repr(item.value)
    return f"{key} = {shown} ({item.origin}): {message[0].lower()}{message[1:]}"
